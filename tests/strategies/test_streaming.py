"""Streaming averaging: use of link and processor, adaptive choices, and the end of training.

``test_decisions`` and ``averaging/test_pace`` test the rules on plain numbers.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from loops import attach, sgd
from offbeat import Compute, Network, StreamingAveraging, simulate
from offbeat.averaging.averager import Averager
from offbeat.averaging.flight import Flight
from offbeat.simulate.host import SimulatedHost
from problems import flat, make_wide, wide_step
from worlds import run


def wide_steps(model: torch.nn.Module, rank: int, steps: int, lr: float = 0.05) -> Any:
    """Return an optimizer of a model of ``make_wide``, and a function that trains it."""
    optimizer = sgd(model, lr)

    def go() -> None:
        for step in range(steps):
            wide_step(model, optimizer, rank, step)

    return optimizer, go


# -- link and processor ---------------------------------------------------------------------------


def costly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the packing of a message take so much virtual time, which counts as processor time."""
    real = Averager.begin

    def begin(self: Averager, *args: Any) -> Flight:
        flight = real(self, *args)
        flight.work = packing(self, flight.work)
        return flight

    def packing(self: Averager, work: Iterator[None]) -> Iterator[None]:
        self.worker.team.host.sleep(seconds, "a test")
        yield from work

    monkeypatch.setattr(Averager, "begin", begin)
    monkeypatch.setattr(SimulatedHost, "processor_seconds", SimulatedHost.now)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        *[("streaming:staleness=64", 64), ("streaming:staleness=8", 8)],
        *[("async:staleness=8,schedule=eager", 8)],
    ],
)
def test_the_bound_is_kept_by_workers_without_processor_time(
    text: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 2 and 18 ms; a message costs 10 ms, so 5 % of the time pay one in 100 or 11 steps.

    All workers choose the same number of parts, although their steps differ.
    """
    costly(monkeypatch, 0.01)

    def work() -> tuple[dict[str, Any], float, Any]:
        rank = dist.get_rank()
        model = make_wide(rank)
        optimizer, go = wide_steps(model, rank, (300, 40)[rank], lr=0.01)
        sync = attach(model, optimizer, text)
        go()
        found = dict(sync.stats.details), sync.stats.idle
        sync.finish()
        return *found, sync._iteration.flow.state.sizer

    network, compute = Network("1Gbit/s", latency="100us"), Compute("2ms", slowdown={1: 9})
    results = simulate(work, workers=2, network=network, compute=compute).results
    for rank, (details, _, sizer) in enumerate(results):
        oldest = max(details["staleness_histogram"])
        assert oldest == bound if rank == 0 else oldest <= bound
        assert details["landings"] >= 3
        assert sizer == results[0][2]
        assert sizer.known
    assert results[1][1] <= 0.05, "the slow worker does not wait"


def test_messages_take_a_twentieth_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that costs 10 ms is launched in each 20th step of 10 ms."""
    costly(monkeypatch, 0.01)

    def work() -> float:
        rank = dist.get_rank()
        model = make_wide(rank)
        optimizer, go = wide_steps(model, rank, 200)
        with attach(model, optimizer, "streaming:parts=1") as sync:
            go()
            return float(sync.stats.details["launches"])

    place = {"network": Network("1Gbit/s"), "compute": Compute("10ms")}
    assert simulate(work, workers=3, **place).results == pytest.approx([10] * 3, abs=1)


@pytest.mark.parametrize("slowest", [1.0, 2.0])
def test_short_waits_keep_equal_workers_together(slowest: float) -> None:
    """Then nearly every step sends the whole model. A slow worker waits for nobody."""

    def work(patience: float) -> tuple[float, float]:
        rank = dist.get_rank()
        model = make_wide(rank)
        optimizer, go = wide_steps(model, rank, round(80 / (slowest if rank == 0 else 1)))
        with attach(model, optimizer, f"streaming:parts=2,patience={patience}") as sync:
            go()
            stats = sync.stats
            return stats.details["landings"] / (2 * stats.steps), stats.idle

    network = Network("8Mbit/s", latency="100us")
    compute = Compute("25ms", jitter=0.1, slowdown={0: slowest})
    without, patient = (
        simulate(partial(work, patience), workers=4, network=network, compute=compute).results
        for patience in (0.0, 0.05)
    )
    for (passes, idle), (more_passes, more_idle) in zip(without, patient, strict=True):
        assert idle == 0
        assert more_idle <= 0.05
        if slowest == 1:
            assert more_passes > max(passes, 0.97)
    if slowest > 1:
        assert patient[0][1] == 0


# -- the outer gain -------------------------------------------------------------------------------


def test_the_gain_is_that_of_coherence() -> None:
    """G = √(mean‖u‖²/‖D‖²): √N if the updates are noise, 1 if they are equal."""

    def worker(noise: float) -> float:
        rank = dist.get_rank()
        model = torch.nn.Linear(1, 4096, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sync = attach(model, optimizer, "streaming:parts=2", wire="float32")
        for step in range(20):
            random = torch.Generator().manual_seed(1000 * rank + step)
            own = torch.randn(4096, 1, generator=random)
            model.weight.grad = torch.ones(4096, 1) + noise * own
            optimizer.step()
        gain = float(sync.stats.details["outer_gain"])
        sync.finish()
        return gain

    def gains(noise: float) -> list[float]:
        place = {"network": Network("1Gbit/s"), "compute": Compute("10ms")}
        return simulate(lambda: worker(noise), workers=6, **place).results

    for noise in (0.1, 1.0, 30.0):
        found = gains(noise)
        # Of k steps together: mean‖u‖² = n·(k² + k·noise²), ‖D‖² = n·(k² + k·noise²/6), k from 1
        # to 3, and 4,096 numbers.
        ideal = [math.sqrt((k + noise**2) / (k + noise**2 / 6)) for k in (1, 3)]
        assert min(ideal) * 0.99 < found[0] < max(ideal) * 1.01
        assert found[0] <= math.sqrt(6)
        assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("optimizer", "strategy", "shorter"),
    [
        *[(torch.optim.SGD, "streaming", True), (torch.optim.SGD, "streaming:outer_gain=2", False)],
        *[(torch.optim.SGD, "local:period=2", False), (torch.optim.RMSprop, "streaming", False)],
    ],
)
def test_steps_of_sgd_are_shorter_by_the_root_of_the_gain(
    optimizer: Any, strategy: str, shorter: bool
) -> None:
    """The gradients are noise, so G is √N. A scheduler sees its own rate."""

    def worker() -> tuple[float, float]:
        model = torch.nn.Linear(1, 4096, bias=False)
        steps = optimizer(model.parameters(), lr=0.5)
        sync = attach(model, steps, strategy, wire="float32")
        random = torch.Generator().manual_seed(dist.get_rank())
        used: list[float] = []
        steps.register_step_pre_hook(lambda *_: used.append(steps.param_groups[0]["lr"]))
        for _ in range(30):
            model.weight.grad = torch.randn(4096, 1, generator=random)
            steps.step()
        sync.finish()
        return used[-1], steps.param_groups[0]["lr"]

    place = {"network": Network("1Gbit/s"), "compute": Compute("10ms")}
    for used, after in simulate(worker, workers=4, **place).results:
        assert used == pytest.approx(0.5 / math.sqrt(2) if shorter else 0.5, rel=0.02)
        assert after == 0.5


# -- the end --------------------------------------------------------------------------------------


def ending(rank: int, size: int, wire: Any) -> tuple[Tensor, float, Tensor, int, float]:
    """The mean of the models, max |x − P|, the model and bytes after ``finish``, max error of sums.

    The last part lands in the last step, so that ``finish`` only averages what is left.
    """
    model = make_wide(0)
    optimizer, go = wide_steps(model, rank, 10, lr=0.2)
    strategy = StreamingAveraging(parts=2, schedule="cyclic", staleness=4, outer_gain=1.0)
    sync = attach(model, optimizer, strategy, wire=wire)
    go()
    flow = sync._iteration.flow
    flow.settle()
    with sync.consensus():
        mean = flat(model)
    errors = [part.stream.errors for part in flow.parts]
    kept = max((float(e.abs().max()) for e in errors if e is not None), default=0.0)
    before = sync.stats.payload_bytes
    (space,) = flow.spaces
    residual = 0.0 if space.P is None else float((flat(model) - space.P).abs().max())
    sync.finish()
    return mean, residual, flat(model), sync.stats.payload_bytes - before, kept


@pytest.mark.parametrize("wire", ["float32", "int8", "int2"])
def test_the_end_is_the_mean_of_all_models(wire: str) -> None:
    """The same bits on all; over few bits the mean of x − P travels in int8."""
    results = run(ending, wire, workers=4)
    (mean, _, end, sent, _), *others = results
    for _, _, other, *_ in others:
        assert torch.equal(end, other)
    if wire == "float32":
        torch.testing.assert_close(end, mean, rtol=1e-6, atol=1e-7)
        return
    # int8 rounds each x − P, and then their sum, by at most 1/254 of the largest number. The end
    # contains the quantization errors of the sums, too.
    largest = max(residual for _, residual, *_ in results)
    assert largest > 0
    kept = max(errors for *_, errors in results) / 4
    assert float((end - mean).abs().max()) < kept + 2.1 * (largest + kept) / 254 + 1e-6
    assert sent < 0.7 * 4 * mean.numel()
