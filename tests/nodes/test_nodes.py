"""Nodes of several workers: ``attach(..., node_group=...)``, on real processes, 2 × 2."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from loops import Faulty, attach, close, error_of, everything, sgd, trained
from offbeat.nodes.detection import group_into_nodes, open_nodes
from offbeat.strategies.registry import STRATEGIES
from problems import bsp_reference, flat, loss_of, make_batch, make_model
from workers import run
from worlds import simulated

STEPS = 9
TEXTS = [
    "bsp",
    "local:period=1",
    "local:period=4",
    "selsync:delta=0.05",
    "local:period=2",
    "diloco:period=4,overlap=1",
    "streaming:schedule=cyclic,staleness=4,parts=1",
    "async:staleness=4",
]
"""At least one row for each strategy. test_eager_nodes has the eager schedules, and several parts,
which contain other numbers in a node than in one worker."""


# -- values ---------------------------------------------------------------------------------------


def of_a_node(rank: int, size: int) -> Any:
    """Return, for each strategy, the model after each step and at the end, bytes, and decisions."""
    found = []
    for text in TEXTS:
        model = make_model(rank)
        sync = attach(model, sgd(model), text, node_group="auto")
        trace = trained(sync, model, [make_batch(rank, step) for step in range(STEPS)])
        sent = sync.stats.payload_bytes
        with sync.consensus():  # shows what is in flight as landed
            trace.append(flat(model))
        sync.finish()
        stats = sync.stats
        found.append((trace, flat(model), sent, stats.syncs))
        assert (sync.rank, sync.size) == (rank, size)
    return found


def of_one_worker(rank: int, size: int, text: str) -> Any:
    """Train without nodes. Each worker has the data of two and takes the mean of their losses."""
    model = make_model(2 * rank)
    sync = attach(model, sgd(model), text)
    batches = [[make_batch(2 * rank + i, step) for i in (0, 1)] for step in range(STEPS)]
    trace = trained(sync, model, batches)
    sent = sync.stats.payload_bytes
    with sync.consensus():
        trace.append(flat(model))
    sync.finish()
    return trace, flat(model), sent, sync.stats.syncs


def test_every_strategy_that_trains_in_nodes_has_a_row() -> None:
    """Baselines, which have a flow of their own, cannot train in nodes."""
    assert {text.partition(":")[0] for text in TEXTS} == {*STRATEGIES}


def test_a_node_trains_as_one_worker_with_all_of_its_data() -> None:
    """In every step, at the end, and in its decisions. Its workers have the same bits.

    Simulated workers give the same as real processes.
    """
    results = run(of_a_node, workers=4, workers_per_node=2)
    for i, text in enumerate(TEXTS):
        plain = simulated(of_one_worker, text, workers=2)
        for rank, found in enumerate(results):
            trace, final, sent, syncs = found[i]
            expected, at_end, of_one, decided = plain[rank // 2]
            assert syncs == decided, text
            duplicate = results[rank ^ 1][i]
            for one, same, other in zip(trace, duplicate[0], expected, strict=True):
                assert torch.equal(one, same), text
                close(one, other, 1e-11)
            assert torch.equal(final, results[0][i][1]), text
            close(final, at_end, 1e-11)
            # A process sends half of the model, but whole votes of up to eleven numbers.
            sends = of_one if text == "bsp" else of_one / 2
            assert 0 <= sent - sends <= 0.5 * 88 * STEPS, text
    assert results[0][3][3] not in (0, STEPS), "selsync synchronized in some steps only"
    reference = bsp_reference(4, "sgd", STEPS)
    for i in (0, 1):
        for one, other in zip(results[3][i][0][:STEPS], reference, strict=True):
            close(one, other, 1e-12)
    virtual = simulated(of_a_node, workers=4, workers_per_node=2)
    for real, other in zip(results, virtual, strict=True):
        for one, same in zip(real, other, strict=True):
            for a, b in zip([*one[0], one[1]], [*same[0], same[1]], strict=True):
                close(a, b, 1e-11)
            assert one[2:] == same[2:], "bytes and decisions"


# -- other features of attach -------------------------------------------------------------------


def with_statistics(seed: int) -> nn.Module:
    model = make_model(seed)
    model.register_buffer("seen", torch.zeros(4, dtype=torch.float64))
    return model


class Clipped:
    """A training with accumulation, clipping, momentum and a buffer, on the data of some ranks."""

    def __init__(self, seed: int, ranks: list[int], **options: Any) -> None:
        self.model, self.ranks = with_statistics(seed), ranks
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.sync = attach(self.model, self.optimizer, "local:period=1", **options)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        for rank in self.ranks:
            for half in (0, 1):
                batch = make_batch(rank, 2 * step + half)
                (loss_of(self.model, batch) / len(self.ranks)).backward()
                self.model.seen += batch[0].mean(0) / len(self.ranks)
        self.sync.clip_grad_norm_(0.5)
        self.optimizer.step()


def statistics(rank: int, size: int, folder: str) -> Any:
    """Train also with a moving average, a consensus, and a checkpoint that is loaded."""
    node = node_of(rank)
    one = Clipped(rank, [rank], node_group=node)
    ema = torch.optim.swa_utils.AveragedModel(with_statistics(rank + 10), use_buffers=True)
    for step in range(4):
        one.step(step)
        if step == 0:
            ema.update_parameters(one.model)
        if step == 1:
            offbeat.save(folder, one.sync)
            saved = everything(one.model)
    with one.sync.consensus():
        shown = everything(one.model)
    one.sync.finish(also=[ema])
    again = Clipped(rank + 20, [rank], node_group=node)
    loaded = offbeat.load(folder, again.sync)
    assert loaded is not None
    assert loaded.path.name.endswith(f"rank{rank}.pt")
    same = all(map(torch.equal, everything(again.model), saved))
    for step in (2, 3):
        again.step(step)
    again.sync.finish()
    return everything(one.model), shown, everything(again.model), same, everything(ema)


def without_nodes(rank: int, size: int) -> list[Tensor]:
    one = Clipped(2 * rank, [2 * rank, 2 * rank + 1])
    for step in range(4):
        one.step(step)
    one.sync.finish()
    return everything(one.model)


def test_clipping_further_modules_buffers_consensus_and_checkpoints_work_in_nodes(
    tmp_path: Any,
) -> None:
    """Each node clips its mean gradient, as one worker with all of its data does."""
    results = run(statistics, str(tmp_path), workers=4)
    expected = simulated(without_nodes, workers=2)[0]
    for final, shown, resumed, same, ema in results:
        assert same
        assert all(map(torch.equal, final, results[0][0]))
        assert all(map(torch.equal, ema, results[0][4]))
        for model in (final, shown, resumed):
            for got, want in zip(model, expected, strict=True):
                close(got, want)


def in_wrappers(rank: int, size: int) -> list[Tensor]:
    """Train plainly, and in a DistributedDataParallel over all workers and over the node."""
    node, found = node_of(rank), []
    for group in (None, dist.group.WORLD, node):
        model = wrapped = make_model(rank // 2)
        if group is not None:
            wrapped = DistributedDataParallel(model, process_group=group)
        sync = attach(wrapped, sgd(model), "local:period=2", node_group=node)
        found.append(torch.stack(trained(sync, wrapped, [make_batch(rank, s) for s in range(3)])))
        sync.finish()
    return found


def test_a_wrapper_over_the_node_is_switched_off_too() -> None:
    for plain, everyone, node in run(in_wrappers, workers=4):
        assert torch.equal(plain, everyone)
        assert torch.equal(plain, node)


def node_of(rank: int) -> Any:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return nodes[rank // 2]


def large(seed: int) -> nn.Sequential:
    """Return a model with three buckets of gradients."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 500), nn.Tanh(), nn.Linear(500, 400), nn.Linear(400, 1)]
        return nn.Sequential(*layers).double()


def overlapped(rank: int, size: int) -> Any:
    """Train with buckets launched during backward, with two backward passes in later steps."""
    began: list[int] = []
    model = large(rank)
    optimizer = sgd(model)
    sync = attach(model, optimizer, "local:period=1", node_group="auto")
    node = sync._iteration.node
    start = node.start

    def watched(bucket: int) -> bool:
        began.append(bucket)
        return bool(start(bucket))

    node.start = watched
    for step, passes in enumerate((1, 2, 2)):
        optimizer.zero_grad()
        for half in range(passes):
            loss_of(model, make_batch(rank, 2 * step + half)).backward()
        optimizer.step()
    sync.finish()
    return began, flat(model)


def several(rank: int, size: int, text: str) -> Any:
    """Train with two optimizers."""
    model = make_model(rank)
    halves = list(model[:1].parameters()), list(model[1:].parameters())
    optimizers = [torch.optim.SGD(half, lr=0.05) for half in halves]
    sync = attach(model, optimizers, text, node_group="auto")
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, make_batch(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    sync.finish()
    return flat(model)


def test_means_inside_the_node_are_launched_during_backward() -> None:
    model = large(0)
    for step, passes in enumerate((1, 2, 2)):
        model.zero_grad()
        for rank in range(4):
            for half in range(passes):
                (loss_of(model, make_batch(rank, 2 * step + half)) / 4).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad  # type: ignore[operator]
    for began, final in simulated(overlapped, workers=4, workers_per_node=2):
        assert began, "buckets were announced"
        close(final, flat(model))


@pytest.mark.parametrize(
    ("text", "workers"), [("local:period=1", 2), ("local:period=4", 4), ("bsp", 1)]
)
def test_any_number_of_workers_in_a_node_and_of_optimizers(text: str, workers: int) -> None:
    """A single node is DDP. Nodes of one worker train as without nodes."""
    expected = bsp_reference(4, "sgd", STEPS)[-1]
    for final in simulated(several, text, workers=4, workers_per_node=workers):
        close(final, expected)


# -- errors ---------------------------------------------------------------------------------------


CASES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"node_group": "other"}),
    ({}, {"min_workers": 1}),
    ({"LOCAL_WORLD_SIZE": "2"}, {}),  # with LOCAL_RANK=RANK, as in a node of three
]
"""Environment and options of ``attach``."""


def refused(rank: int, size: int) -> Any:
    found, model = [], make_model(rank)
    for environment, options in CASES:
        if environment:
            os.environ.update(LOCAL_RANK=str(rank), **environment)
        given = {"node_group": "auto", **options}
        found.append(error_of(lambda o=given: attach(model, sgd(model), "bsp", **o)))
    os.environ.update(LOCAL_RANK=str(rank % 2))
    sync = attach(model, sgd(model), "local:period=8", node_group="auto")
    optimizer = sync._worker.optimizers[0].optimizer
    dist.barrier()

    def uneven() -> None:
        for step in range(2 if rank % 2 else 3):
            loss_of(model, make_batch(rank, step)).backward()
            optimizer.step()
        sync.finish()

    found.append(error_of(uneven))
    sync.detach()
    return found


TEXTS_OF_ERRORS = [
    'rank 0: node_group="auto" reads LOCAL_RANK',
    "rank 0: node_group must be",
    "min_workers with node_group: a node cannot continue without one of its workers",
    "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 do not fit rank 2",
    "The workers of a node must stop together",
]


def test_invalid_options_are_refused_on_all_workers() -> None:
    for found in run(refused, workers=4):
        for (kinds, text), part in zip(found, TEXTS_OF_ERRORS, strict=True):
            assert part in text
            assert "OffbeatError" in kinds


@pytest.mark.parametrize(
    ("reported", "text"),
    [
        ([[0, 1], [0, 1], [2], [3]], "that of rank 0 has 2, that of rank 2 has 1"),
        ([[0, 1], [0, 1], [1, 2], [3]], "that of rank 2 has ranks 1, 2"),
        ([[1], [0]], "do not fit together"),
        ([[0], "it has none"], "rank 1: it has none"),
    ],
)
def test_errors_name_inconsistent_nodes(reported: list[Any], text: str) -> None:
    with pytest.raises(offbeat.AttachError, match=text):
        group_into_nodes(reported)


def test_nodes_are_ordered_by_their_lowest_rank() -> None:
    assert group_into_nodes([[0, 3], [1, 2], [1, 2], [0, 3]]) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("sharded", [False, True])
def test_nodes_of_a_transport_may_be_sharded(sharded: bool) -> None:
    """The communicator connects this process with its counterparts."""

    def work(rank: int, size: int) -> Any:
        team = open_nodes(dist.group.WORLD, "auto", 60.0, sharded=sharded)
        return team.sharded, team.rank, team.size

    found = simulated(work, workers=4, workers_per_node=2)
    assert found == [(sharded, rank // 2, 2) for rank in range(4)]


def test_a_transport_without_nodes_is_refused() -> None:
    def work(rank: int, size: int) -> Any:
        model = make_model(rank)
        return error_of(lambda: attach(model, sgd(model), "bsp", node_group="auto", group=Faulty()))

    for kinds, text in simulated(work, workers=2):
        assert "AttachError" in kinds
        assert "make_nodes" in text


def one_dies(rank: int, size: int) -> Any:
    model = make_model(rank)
    sync = attach(model, sgd(model), "local:period=2", node_group="auto", timeout_seconds=100)
    optimizer = sync._worker.optimizers[0].optimizer

    def train() -> None:
        for step in range(8):
            if rank == 3 and step == 3:
                os._exit(0)
            loss_of(model, make_batch(rank, step)).backward()
            optimizer.step()

    kinds, text = error_of(train)
    sync.detach()
    return kinds, text


def test_all_workers_notice_a_dead_worker() -> None:
    """Before the time-out. The error says whether ranks are inside the node or between nodes."""
    results = run(one_dies, workers=4, may_die=(3,), workers_per_node=2)
    for kinds, _ in results[:3]:
        assert "CommunicationError" in kinds
    assert "rank 1" in results[2][1], "its place in its node"
    assert "(inside the node)" in results[2][1]
    assert "(between nodes)" in results[1][1], "of its counterpart"
