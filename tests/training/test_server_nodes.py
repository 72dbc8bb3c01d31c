"""SSP, Downpour and EASGD between nodes of several workers, on real processes and in the simulator.

A node is a worker that has the data of all of its own; what a parameter server gives such workers,
without nodes, is the reference. The order of arrival counts, so messages take as long for both.
"""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from cells import nightly, some
from loops import attach, bits, close, error_of, everything, sgd, trained
from offbeat.simulate import Kill
from offbeat.strategies import STRATEGIES
from problems import bsp_reference, flat, loss_of, make_batch, make_model, make_wide
from workers import run

STEPS = 9
MEETING = ["ssp:staleness=0", "easgd:period=2,synchronous=true"]
FREE = [
    "ssp:staleness=2,servers=0/",
    "ssp:staleness=2,refresh=lazy,servers=0/",
    "downpour:push_every=2,fetch_every=3,warmup_steps=2,servers=0/",
    "downpour:server_optimizer=adagrad,server_lr=0.1,servers=0/",
    "easgd:period=2,servers=0/",
]


def simulated(
    function: Any,
    *args: Any,
    workers: int,
    per_node: int = 1,
    latency: str = "1us",
    **options: Any,
) -> Any:
    """Results with messages that take as long in all cases; the second half takes longer steps."""

    def worker() -> Any:
        return function(dist.get_rank(), dist.get_world_size(), *args)

    network = offbeat.Network("100Gbit/s", latency=latency, workers_per_node=per_node)
    slow = {rank: 1.15 for rank in range(workers // 2, workers)}  # nobody comes at the same time
    compute = offbeat.Compute("5ms", slowdown=slow)
    return offbeat.simulate(
        worker, workers=workers, network=network, compute=compute, **options
    ).results


def in_environment(rank: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")


def story(rank: int, text: str, batches: list[Any], node_group: str | None = None) -> Any:
    """The models after each step, in a look after four, at the end; bytes sent and pulled."""
    model = make_model(rank)
    sync = attach(model, sgd(model), text, node_group=node_group)
    trace = trained(sync, model, batches[:4])
    with sync.consensus():
        shown = flat(model)
    trace += trained(sync, model, batches[4:])
    sent = sync.stats.payload_bytes
    sync.finish()
    return trace, shown, flat(model), sent, sync.stats.details.get("pulled_bytes")


def of_a_node(rank: int, size: int, texts: list[str]) -> Any:
    in_environment(rank)
    batches = [make_batch(rank, step) for step in range(STEPS)]
    return [story(rank, text, batches, "auto") for text in texts]


def of_workers(rank: int, size: int, texts: list[str]) -> Any:
    """The same without nodes: each worker has the data of two."""
    batches = [[make_batch(2 * rank + i, step) for i in (0, 1)] for step in range(STEPS)]
    return [story(2 * rank, text, batches) for text in texts]


def require_one_model(results: list[Any]) -> None:
    """In a node all hold the same bits after every step, and all in a look and at the end."""
    for rank, found in enumerate(results):
        for one, twin, first in zip(found, results[rank ^ 1], results[0], strict=True):
            for a, b in zip(one[0], twin[0], strict=True):
                assert torch.equal(a, b)
            assert torch.equal(one[1], first[1])
            assert torch.equal(one[2], first[2])


@pytest.fixture(scope="module")
def virtual() -> list[Any]:
    return list(simulated(of_a_node, MEETING + FREE, workers=4, per_node=2))


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return list(simulated(of_workers, MEETING + FREE, workers=2))


def test_a_node_is_one_worker_that_has_the_data_of_all_of_its_own(
    virtual: list[Any], plain: list[Any]
) -> None:
    """To rounding, of every strategy, in every step, in a look and at the end."""
    require_one_model(virtual)
    for rank, found in enumerate(virtual):
        for text, one, other in zip(MEETING + FREE, found, plain[rank // 2], strict=True):
            for a, b in zip([*one[0], *one[1:3]], [*other[0], *other[1:3]], strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-11), text


@pytest.mark.nightly
def test_it_is_one_where_answers_come_some_steps_later() -> None:
    """After 14 ms, about three steps, in which both do the same."""
    given = {"latency": "7ms"}
    results = simulated(of_a_node, FREE, workers=4, per_node=2, **given)
    require_one_model(results)
    plain = simulated(of_workers, FREE, workers=2, **given)
    for rank, found in enumerate(results):
        for text, one, other in zip(FREE, found, plain[rank // 2], strict=True):
            for a, b in zip([*one[0], *one[1:3]], [*other[0], *other[1:3]], strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-11), text


def test_a_node_sends_what_one_worker_does(virtual: list[Any], plain: list[Any]) -> None:
    """And pulls it; but for the header of a push, of which each of its workers sends one."""
    for i, text in enumerate(MEETING + FREE):
        for node in (0, 1):
            sent, pulled = (
                sum(virtual[2 * node + place][i][k] for place in (0, 1)) for k in (3, 4)
            )
            more = sent - plain[node][i][3]
            assert more % 56 == 0, text
            assert bool(more) == bool(sent), text
            assert more <= 56 * (STEPS + 4), text
            assert i or more == 56 * STEPS, "one push in each step"
            assert pulled == plain[node][i][4], text


def test_with_no_staleness_it_is_bsp(virtual: list[Any]) -> None:
    reference = bsp_reference(4, "sgd", STEPS)
    for found in virtual:
        for one, other in zip(found[0][0], reference, strict=True):
            close(one, other, 1e-12)
        close(found[0][1], reference[3], 1e-12)


def test_synchronous_easgd_by_hand(virtual: list[Any]) -> None:
    """d = 0.45·(x − z) before every second step; z ← z + Σ d; a look shows z."""
    found = [one[1] for one in virtual]
    models = [make_model(0) for _ in (0, 1)]
    centre = flat(models[0])
    for step in range(STEPS):
        gradients, moves = [], []
        for node, model in enumerate(models):
            loss = sum(loss_of(model, make_batch(2 * node + i, step)) for i in (0, 1)) / 2
            grads = torch.autograd.grad(loss, list(model.parameters()))
            gradients.append(torch.cat([g.reshape(-1) for g in grads]))
            moves.append(0.45 * (flat(model) - centre) if step % 2 else 0.0)
        for model, gradient, move in zip(models, gradients, moves, strict=True):
            x = flat(model) - 0.05 * gradient - move
            nn.utils.vector_to_parameters(x, model.parameters())
        centre = centre + sum(moves)
        for rank in range(4):
            close(found[rank][0][step], flat(models[rank // 2]).detach(), 1e-12)
        if step == 3:
            close(found[0][1], centre, 1e-12)


def test_real_processes_give_the_same(virtual: list[Any]) -> None:
    """Those that meet the same values, the others what they have agreed on inside their nodes."""
    results = run(of_a_node, [*MEETING, FREE[0], FREE[2]], workers=4)
    require_one_model(results)
    for rank, found in enumerate(results):
        for one, other in zip(found[: len(MEETING)], virtual[rank], strict=False):
            for a, b in zip([*one[0], *one[1:3]], [*other[0], *other[1:3]], strict=True):
                close(a, b, 1e-11)
            assert one[3:] == other[3:], "bytes"
        for one in found:
            assert one[2].isfinite().all()


def test_every_strategy_with_a_server_has_a_row() -> None:
    rows = {text.partition(":")[0] for text in MEETING + FREE}
    assert rows == {name for name, kind in STRATEGIES.items() if kind.averages == "pushes"}


class Own(offbeat.EASGD):
    """A user's, on the server of this package."""


def test_one_of_ones_own_on_this_server_keeps_a_node_together() -> None:
    """It says so itself; its values depend on time all the same, so not with DDP at work inside."""

    def work(rank: int, size: int) -> Any:
        model = make_model(rank)
        sync = attach(model, sgd(model), Own(period=2), node_group="auto")
        trained(sync, model, [make_batch(rank, step) for step in range(4)])
        sync.finish()
        return flat(model)

    assert Own().keeps_nodes
    assert not Own().repeatable
    results = simulated(work, workers=4, per_node=2)
    assert all(torch.equal(one, results[0]) for one in results)


# -- a lossy wire, checkpoints, different numbers of steps ----------------------------------------

TEXTS = ["ssp:staleness=0", "ssp:staleness=2", "downpour:fetch_every=2", "easgd:period=2"]


def wide(rank: int, size: int, text: str, wire: str, nodes: bool = True) -> Any:
    """8,705 parameters, whose shards are worth rounding."""
    if nodes:
        in_environment(rank)
    model, trace = make_wide(rank if nodes else 2 * rank), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with attach(model, optimizer, text, wire=wire, node_group="auto" if nodes else None) as sync:
        for step in range(8):
            ranks = [rank] if nodes else [2 * rank, 2 * rank + 1]
            batches = [make_batch(one, step, 8, torch.float32) for one in ranks]
            trace += trained(sync, model, [batches])
        sent = sync.stats.payload_bytes
    return trace, flat(model), sent


@pytest.mark.parametrize("text", [TEXTS[0], *nightly(TEXTS[1:])])
def test_a_lossy_wire_keeps_a_node_equal(text: str) -> None:
    """And near the exact one: what rounding takes away comes later. 0.3 of the bytes: blocks."""
    results = simulated(wide, text, "int8", workers=4, per_node=2)
    exact = simulated(wide, text, "float32", workers=4, per_node=2)
    for rank, (trace, final, sent) in enumerate(results):
        assert torch.equal(torch.stack(trace), torch.stack(results[rank ^ 1][0]))
        assert torch.equal(final, results[0][1])
        assert not torch.equal(final, exact[0][1])
        torch.testing.assert_close(final, exact[0][1], rtol=0, atol=0.02)
        assert sent < 0.31 * exact[rank][2]


def through_a_checkpoint(rank: int, size: int, cases: list[Any], at: str) -> Any:
    """Unbroken, with a save in the middle; and from there on again."""
    in_environment(rank)
    found = []
    for text, wire in cases:
        folder = f"{at}/{text.replace('/', '')}-{wire}"
        batches = [make_batch(rank, step, 8, torch.float32) for step in range(8)]
        model = make_wide(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with attach(model, optimizer, text, wire=wire, node_group="auto") as sync:
            trained(sync, model, batches[:4])
            offbeat.save(folder, sync)
            trace = trained(sync, model, batches[4:])
        unbroken = [*trace, flat(model)]
        model = make_wide(rank + 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with attach(model, optimizer, text, wire=wire, node_group="auto") as sync:
            loaded = offbeat.load(folder, sync)
            assert loaded is not None
            assert loaded.path.name.endswith(f"rank{rank}.pt")
            trace = trained(sync, model, batches[4:])
        found.append((unbroken, [*trace, flat(model)]))
    return found


CASES = [
    (FREE[0], "int8"),
    (FREE[2], "float32"),
    (MEETING[0], "int8"),
    (MEETING[1], "float32"),
    (FREE[1], "float32"),
    (FREE[3], "float32"),
    (FREE[4], "int8"),
]


@pytest.mark.parametrize("case", some(CASES, 0, 1), ids=str)
def test_a_resumed_run_equals_the_unbroken_one(case: tuple[str, str], tmp_path: Any) -> None:
    """Bit for bit, over an exact and a lossy wire."""
    for found in simulated(through_a_checkpoint, [case], str(tmp_path), workers=4, per_node=2):
        for unbroken, resumed in found:
            for one, other in zip(unbroken, resumed, strict=True):
                assert torch.equal(bits(one), bits(other))


@pytest.mark.nightly
def test_a_resumed_run_equals_the_unbroken_one_on_real_processes(tmp_path: Any) -> None:
    """But for the order of sums, which rounding makes coarser."""
    for found in run(through_a_checkpoint, CASES[2:4], str(tmp_path), workers=4):
        for unbroken, resumed in found:
            for one, other in zip(unbroken, resumed, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


def uneven(rank: int, size: int, texts: list[str]) -> Any:
    """The second node has three batches less; two optimizers, BatchNorm, a clip."""
    found = []
    for text in texts:
        model = nn.Sequential(make_model(rank), nn.BatchNorm1d(1, dtype=torch.float64))
        halves = list(model[0].parameters()), list(model[1].parameters())
        optimizers = [torch.optim.SGD(half, lr=0.05, weight_decay=0.01) for half in halves]
        sync = attach(model, optimizers, text, node_group="auto", max_grad_norm=0.5)
        for step in range(8 - rank // 2 * 3):
            model.zero_grad()
            loss_of(model, make_batch(rank, step)).backward()
            for optimizer in optimizers:
                optimizer.step()
        sync.finish()
        found.append((sync.step, everything(model)))
    return found


@pytest.mark.parametrize("case", some([(2, TEXTS[1:3]), (2, TEXTS[::3]), (4, TEXTS)], 0), ids=str)
def test_nodes_may_take_different_numbers_of_steps(case: tuple[int, list[str]]) -> None:
    """All end with one model, as does a lone node, whose workers must take as many."""
    per_node, texts = case

    def work(rank: int, size: int) -> Any:
        return uneven(rank if per_node == 2 else rank % 2, size, texts)

    results = simulated(work, workers=4, per_node=per_node)
    for rank, found in enumerate(results):
        for (count, model), (_, first) in zip(found, results[0], strict=True):
            assert count == (5 if per_node == 2 and rank > 1 else 8)
            for one, other in zip(model, first, strict=True):
                assert torch.equal(one, other)
                assert one.isfinite().all()


def test_a_lone_node_trains_as_one_worker() -> None:
    """SSP and Downpour then are plain training with the mean gradient; a look is the model."""
    texts = ["ssp:staleness=3", "downpour"]
    expected = bsp_reference(4, "sgd", STEPS)
    for found in simulated(of_a_node, texts, workers=4, per_node=4):
        for trace, shown, final, sent, _ in found:
            for one, other in zip(trace, expected, strict=True):
                close(one, other, 1e-11)
            close(shown, expected[3], 1e-11)
            close(final, expected[-1], 1e-11)
            assert sent == 0


# -- errors ---------------------------------------------------------------------------------------


def one_dies(rank: int, size: int, text: str, dies: bool = True) -> Any:
    in_environment(rank)
    model = make_model(rank)
    sync = attach(model, sgd(model), text, node_group="auto")
    optimizer = sync._worker.parts[0].optimizer

    def train() -> None:
        for step in range(400):
            if dies and rank == 3 and step == 3:
                os._exit(0)
            if dies:
                time.sleep(0.01)
            loss_of(model, make_batch(rank, step)).backward()
            optimizer.step()

    started = time.monotonic()
    kinds, text = error_of(train)
    sync.detach()
    return kinds, text, time.monotonic() - started


@pytest.mark.parametrize("text", [TEXTS[0], *nightly(["downpour", "easgd:period=2"])])
def test_all_learn_of_a_worker_that_dies(text: str) -> None:
    """By what they wait for: its node for it, the others for its counterparts. Not by time-out."""
    results = run(one_dies, text, workers=4, may_die=(3,))
    for kinds, message, seconds in results[:3]:
        assert "CommunicationError" in kinds
        assert "inside the node" in message or "rank" in message
        assert seconds < 15


@pytest.mark.parametrize("text", nightly(TEXTS))
def test_all_learn_of_a_worker_that_dies_in_virtual_time(text: str) -> None:
    kill = Kill(worker=3, at="0.2 s")
    results = simulated(one_dies, text, False, workers=4, per_node=2, faults=[kill])
    for kinds, message, _ in results[:3]:
        assert "CommunicationError" in kinds
        assert "rank" in message
