"""Streaming averaging: use of the link, adaptive choices, and the end of training.

``test_decisions`` and ``test_rate_control`` test the rules on plain numbers.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offbeat.averaging.parts.part import Part
from offbeat.averaging.parts.update_part import UpdatePart
from torch import Tensor

from loops import attach, sgd
from offbeat import Compute, Network, StreamingAveraging, simulate
from problems import flat, make_wide, wide_step
from worlds import run


def wide_steps(model: torch.nn.Module, rank: int, steps: int, lr: float = 0.05) -> Any:
    """Return an optimizer of a model of ``make_wide``, and a function that trains it."""
    optimizer = sgd(model, lr)

    def go() -> None:
        for step in range(steps):
            wide_step(model, optimizer, rank, step)

    return optimizer, go


# -- measurements ---------------------------------------------------------------------------------


def details() -> list[dict[str, Any]]:
    """Details after 150 steps of 10 ms, with a model of 280 kB, on 3 workers of unequal speed."""

    def worker() -> dict[str, Any]:
        rank = dist.get_rank()
        model = torch.nn.Linear(264, 264)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = attach(model, optimizer, "streaming")
        for step in range(150):
            optimizer.zero_grad()
            x = torch.randn(4, 264, generator=torch.Generator().manual_seed(100 * rank + step))
            model(x).square().mean().backward()
            optimizer.step()
        found = dict(sync.stats.details)
        sync.finish()
        return found

    compute = Compute("10ms", jitter=0.1)
    network = Network("1Mbit/s", latency="100us")
    return simulate(worker, workers=2, network=network, compute=compute).results


def test_the_log_says_how_often_the_model_passes(caplog: pytest.LogCaptureFixture) -> None:
    """The link is never idle: each worker sends 2 bits a number and 4 bytes a block."""
    with caplog.at_level(logging.INFO, logger="offbeat"):
        found = details()
    elements = 264 * 264 + 264
    seconds = elements * (2 + 32 / 512) / 1e6
    for one in found:
        assert one["pass_steps"] == pytest.approx(seconds / 0.01, rel=0.1)
    logged = [one for one in caplog.messages if "is averaged every" in one]
    assert len(logged) == 2, "once on each worker"
    assert all(one.startswith("the whole model (2 parts) is averaged every") for one in logged)


def slow(patch: pytest.MonkeyPatch, kind: type[Part], name: str, seconds: float) -> None:
    """Let a method of a part take virtual time."""
    real: Callable[..., Any] = getattr(kind, name)

    def slowly(self: Part, *args: Any, **options: Any) -> Any:
        self._team.host.sleep(seconds, "a test")
        return real(self, *args, **options)

    patch.setattr(kind, name, slowly)


@pytest.mark.parametrize(
    ("text", "bound", "most_idle", "warnings"),
    [
        ("streaming:staleness=64", 64, 0.01, 2),
        ("streaming:staleness=8", 8, 0.5, 2),
        ("async:staleness=8,schedule=eager", 8, 0.95, 0),
    ],
)
def test_the_bound_is_kept_by_workers_without_a_cpu_budget(
    text: str,
    bound: int,
    most_idle: float,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps of 2 and 18 ms; a part costs 20 ms, so 5 % of the time pay one in 200 or 22 steps."""
    slow(monkeypatch, UpdatePart, "launch", 0.004)
    slow(monkeypatch, UpdatePart, "_write", 0.006)

    def work() -> tuple[dict[str, Any], float]:
        rank = dist.get_rank()
        model = make_wide(rank)
        optimizer, go = wide_steps(model, rank, (300, 40)[rank], lr=0.01)
        with attach(model, optimizer, text) as sync:
            go()
            return dict(sync.stats.details), sync.stats.idle

    network, compute = Network("1Gbit/s", latency="100us"), Compute("2ms", slowdown={1: 9})
    results = simulate(work, workers=2, network=network, compute=compute).results
    for details, _ in results:
        assert max(details["staleness_histogram"]) <= bound
        assert details["landings"] > 5
    assert results[0][1] <= most_idle
    assert results[1][1] <= 0.05, "the slow worker does not wait"
    messages = [one for one in caplog.messages if "more often than the CPU budget" in one]
    assert len(messages) == warnings, "once on each worker"


@pytest.mark.parametrize("slowest", [1.0, 2.0])
def test_short_waits_keep_equal_workers_together(slowest: float) -> None:
    """Then nearly every step sends the whole model. The others rarely wait for a slow one."""

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
        assert more_idle <= 0.02
        if slowest == 1:
            assert more_passes > passes + 0.02


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


def ending(rank: int, size: int, wire: Any) -> tuple[Tensor, Tensor, Tensor, int]:
    """The mean of the models, P, the model after ``finish``, and the bytes of ``finish``.

    The last part lands in the last step, so that ``finish`` only averages what is left.
    """
    model = make_wide(0)
    optimizer, go = wide_steps(model, rank, 10, lr=0.2)
    strategy = StreamingAveraging(parts=2, schedule="cyclic", staleness=4, outer_gain=1.0)
    sync = attach(model, optimizer, strategy, wire=wire)
    go()
    state = sync.state_dict()
    sync.load_state_dict(state)  # lets everything in flight arrive
    with sync.consensus():
        mean = flat(model)
    kept = max((float(e["summed"].abs().max()) for e in state["errors"].values()), default=0.0)
    before = sync.stats.payload_bytes
    parts = sync._iteration.flow.pipeline.parts
    base = torch.cat([one for part in parts for one in part.base])
    residual = float((flat(model) - base).abs().max())
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
