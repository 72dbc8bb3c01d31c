"""Every update counts once, also of workers that differ in speed and in their number of steps."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import workers
from cells import nightly
from loops import attach, sgd
from offbeat import Compute, Network, simulate
from problems import flat, make_wide
from worlds import run

LR, WORKERS, STEPS = 0.1, 3, 24
TEXTS = {
    "async:schedule=eager,staleness=4": 4,
    "async:schedule=eager,staleness=1": 1,
    "streaming:parts=3,outer_gain=1": 64,
    "streaming:parts=3,outer_gain=1,staleness=5,patience=0": 5,
}
"""Self-clocked strategies, and their bounds on the staleness."""


@dataclass(frozen=True)
class Case:
    """Steps of each worker, and factors on the time of a step.

    ``shown``: step before which all workers show a consensus, if any.
    """

    steps: tuple[int, int, int] = (24, 24, 24)
    slowdown: tuple[float, float, float] = (1.0, 1.0, 1.0)
    shown: int | None = None


CASES = {
    "alike": Case(),
    "one is late": Case(slowdown=(3.0, 1.0, 1.0)),
    "one is far behind": Case(slowdown=(1.0, 20.0, 1.0)),
    "a consensus in the middle": Case(slowdown=(1.0, 1.5, 1.0), shown=12),
    "other numbers of steps": Case(steps=(24, 17, 9)),
    "the fast one has least steps": Case(steps=(7, 24, 24), slowdown=(1.0, 4.0, 2.0)),
}


def gradient(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(flat(make_wide(0)).numel(), generator=generator)


def drift(
    rank: int, size: int, text: str, case: Case, sleep: bool = False, wire: str = "float32"
) -> dict[str, Any]:
    """Take steps whose gradients do not depend on the model."""
    model = make_wide(seed=rank)
    optimizer, shown = sgd(model, LR), None
    sync = attach(model, optimizer, text, wire=wire)
    for step in range(case.steps[rank]):
        if step == case.shown:
            with sync.consensus():
                shown = flat(model)
        if sleep:
            time.sleep(0.002 * case.slowdown[rank])
        moved = gradient(rank, step)
        for p in model.parameters():
            p.grad, moved = moved[: p.numel()].view_as(p), moved[p.numel() :]
        optimizer.step()
    details = dict(sync.stats.details)
    sync.finish()
    return {"end": flat(model), "shown": shown, "state": sync._iteration.flow.state, **details}


def mean_drift(steps: int) -> Tensor:
    """Where the models are after so many steps of each worker."""
    total = sum(gradient(rank, step) for rank in range(WORKERS) for step in range(steps))
    return flat(make_wide(0)) - LR * total / WORKERS


def check(results: list[dict[str, Any]], text: str, case: Case) -> None:
    for result in results:
        assert torch.equal(result["state"].shared[0], results[0]["state"].shared[0])
        assert torch.equal(result["end"], results[0]["end"])
        assert max(result["staleness_histogram"]) <= TEXTS[text]
        if TEXTS[text] == 1:  # a second message in a step would have nothing new
            assert result["launches"] <= 24 + 1
        if case.shown is not None:
            torch.testing.assert_close(result["shown"], mean_drift(12), rtol=0, atol=1e-5)
    if len({*case.steps}) == 1:  # each update counts once
        torch.testing.assert_close(results[0]["end"], mean_drift(STEPS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("wire", ["float32", "int8", "int2", *nightly(["int4"])])
@pytest.mark.parametrize(
    "text",
    [
        "bsp",
        "local:period=3",
        "async:staleness=4",
        "async:staleness=4,schedule=eager",
        "diloco:period=4,fragments=2,overlap=2,outer_lr=1.0,outer_momentum=0.0",
        "streaming:parts=3,schedule=cyclic,staleness=4,outer_gain=1",
    ],
)
def test_every_update_counts_once(text: str, wire: str) -> None:
    """The model moves by the mean of all steps, up to one quantization error.

    Errors do not add up over the launches, because each is part of a later one.
    """
    found, *_ = run(drift, text, Case(), False, wire, workers=WORKERS)
    error = found["end"] - mean_drift(STEPS)
    # A step of the quantization of an update, in units of its largest value.
    share = {"float32": 1e-6, "int8": 1 / 127, "int4": 1 / 7, "int2": 1}[wire]
    assert float(error.square().mean().sqrt()) <= 2.5 * share * LR


def test_pieces_do_not_change_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of a message at a time and all at once give the same bits."""
    text = "streaming:parts=2,schedule=cyclic,staleness=4,outer_gain=2"
    whole = run(drift, text, Case(), False, "int8", workers=WORKERS)
    monkeypatch.setattr("offbeat.quantization.codecs.PIECE_BLOCKS", 1)
    pieces = run(drift, text, Case(), False, "int8", workers=WORKERS)
    for one, same in zip(pieces, whole, strict=True):
        assert torch.equal(one["end"], same["end"])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_update_counts_once_and_the_bound_is_kept(text: str, case: Case) -> None:
    """P has the same bits on all workers, and the model ends at the mean of all steps."""

    def worker() -> dict[str, Any]:
        return drift(dist.get_rank(), dist.get_world_size(), text, case)

    compute = Compute("5ms", jitter=0.3, slowdown=dict(enumerate(case.slowdown)))
    for latency in ("100us", "30ms"):  # in the first case messages land during training
        network = Network("10Mbit/s", latency=latency)
        found = simulate(worker, workers=WORKERS, network=network, compute=compute)
        check(found.results, text, case)
        assert latency != "100us" or all(result["landings"] for result in found.results)


@pytest.mark.parametrize("name", ["one is late", "other numbers of steps"])
def test_the_same_on_real_processes(name: str) -> None:
    for text in TEXTS:
        found = workers.run(drift, text, CASES[name], True, workers=WORKERS)
        check(found, text, CASES[name])


def test_a_worker_out_of_data_counts_for_the_steps_that_it_has_taken() -> None:
    """Equal workers: the mean of a step is that of the workers that take it, as with BSP."""
    case = Case(steps=(12, 9, 5))

    def worker() -> dict[str, Any]:
        text = "async:schedule=eager,staleness=4"
        return drift(dist.get_rank(), dist.get_world_size(), text, case)

    network = Network("1Gbit/s", latency="10us")
    found = simulate(worker, workers=WORKERS, network=network, compute=Compute("5ms"))
    expected = flat(make_wide(0))
    for step in range(12):
        moving = [gradient(rank, step) for rank in range(WORKERS) if step < case.steps[rank]]
        expected = expected - LR * sum(moving) / len(moving)
    torch.testing.assert_close(found.results[0]["end"], expected, rtol=0, atol=1e-5)


def test_buffers_are_averaged_once_a_pass_wherever_messages_begin() -> None:
    """They travel with the last part, which may be in the middle of a message."""

    def worker() -> tuple[int, int]:
        model = make_wide(dist.get_rank())
        model.register_buffer("statistic", torch.zeros(3))
        optimizer, seen = sgd(model, LR), []
        sync = attach(model, optimizer, "streaming:parts=4", wire="float32")
        averager = sync._iteration.flow
        land = averager.finish_landing

        def record(flight: Any, **options: Any) -> None:
            indices = [part.index for part in flight.parts]
            seen.append((indices[-1], 3 in indices, flight.buffers is not None))
            land(flight, **options)

        averager.finish_landing = record
        for _ in range(30):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        sync.finish()
        assert all(last == sent for _, last, sent in seen)
        return sum(sent for *_, sent in seen), sum(at != 3 and sent for at, _, sent in seen)

    network = Network("1Gbit/s", latency="10us")
    for sent, wrapped in simulate(
        worker, workers=2, network=network, compute=Compute("5ms")
    ).results:
        assert sent > 20
        assert wrapped > 0, "messages of the whole model begin with another part"
