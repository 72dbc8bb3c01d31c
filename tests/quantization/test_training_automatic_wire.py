"""Training with ``wire="auto"`` and fixed schedules: all workers choose the same precision."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cells import nightly, some
from loops import attach, sgd
from offbeat import Compute, Network, simulate
from problems import flat

WORKERS, NUMBERS, STEP_SECONDS, LATENCY = 4, 2**14, 0.005, 2e-5
# A mean of 16,384 numbers on links of 1 Gbit/s, 100 Mbit/s and 10 Mbit/s, in steps of 5 ms:
# 2(N−1)/N·4 bytes a number take 0.79, 7.9 and 79 ms, in int8 a quarter of that.
EXPECTED = {
    "bsp": ("int8", "int8", "int8"),  # 0.15, 0.11 (there is an agreement, too) and 0.07 of the time
    "local:period=4": ("float32", "int8", "int8"),  # 0.04; 0.28, 0.17 and 0.09; 0.80
    "selsync:delta=inf,max_interval=4,aggregate=gradients": ("float32", "int8", "int8"),
    "diloco:period=12": ("float32", "bfloat16", "int8"),  # 0.01; 0.12 and 0.06; 0.57
    "async:staleness=8": ("float32", "float32", "int8"),  # 4 steps of 5 ms hide 7.9 ms
    "async:staleness=8,schedule=eager": ("float32", "float32", "int8"),
    "diloco:period=8,fragments=2,overlap=3": ("float32", "float32", "int8"),
}

QUICK = ("local:period=4", "diloco:period=12", "async:staleness=8")


def model_of(seed: int) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterList(torch.randn(NUMBERS // 2, generator=generator) for _ in range(2))


def aim_of(rank: int) -> Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(100 + rank))


def train(
    text: str, steps: int, wire: str = "auto", every: int = 0, fewer: int = 0
) -> dict[str, Any]:
    """Train a model towards a different target on each worker.

    Args:
        text: Strategy.
        steps: Steps of rank 0.
        wire: Precision.
        every: Steps between consensus, 0 for none.
        fewer: Steps that each rank takes less than the rank before it.
    """
    rank = torch.distributed.get_rank()
    steps -= fewer * rank
    model = model_of(seed=rank)
    aim = aim_of(rank)
    optimizer = sgd(model, lr=0.3)
    sync = attach(model, optimizer, text, wire=wire)
    trace = []
    for step in range(steps):
        optimizer.zero_grad()
        (0.5 * (torch.cat([*model]) - aim).square().sum()).backward()
        optimizer.step()
        trace.append(sync.stats.details.get("wire"))
        if every and step % every == 0:
            with sync.consensus():
                flat(model)
    idle, details = sync.stats.idle, dict(sync.stats.details)
    sync.finish()
    return {"trace": trace, "details": details, "idle": idle, "end": flat(model)}


def on(bandwidth: str, text: str, steps: int, *args: Any, jitter: float = 0.0) -> list[Any]:
    return simulate(
        lambda: train(text, steps, *args),
        workers=WORKERS,
        network=Network(bandwidth, latency=LATENCY),
        compute=Compute(STEP_SECONDS, jitter=jitter),
    ).results


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def changes(trace: list[str]) -> int:
    return sum(a != b for a, b in itertools.pairwise(trace) if a is not None)


@pytest.mark.sampled
@pytest.mark.parametrize("text", [*QUICK, *nightly(sorted({*EXPECTED} - {*QUICK}))])
@pytest.mark.parametrize("place", some([0, 1, 2], 0, 2), ids=["1Gbit", "100Mbit", "10Mbit"])
def test_the_most_exact_precision_that_keeps_waiting_short(text: str, place: int) -> None:
    """On three links. All workers choose the same, and the choice does not oscillate."""
    bandwidth = ("1Gbit/s", "100Mbit/s", "10Mbit/s")[place]
    wanted = EXPECTED[text][place]
    results = on(bandwidth, text, 120)
    for result in results:
        assert result["details"]["wire"] == results[0]["details"]["wire"]
        assert torch.equal(result["end"], results[0]["end"])
        assert changes(result["trace"]) <= 6
    settled = results[0]["trace"][60:]
    assert settled.count(wanted) >= 0.5 * len(settled), settled
    if wanted == "float32":
        assert results[0]["details"]["wire_reason"] == "initial precision"
    elif "async" not in text:
        assert "the link made workers wait" in results[0]["details"]["wire_reason"]


def test_training_reaches_the_mean_of_the_targets() -> None:
    """Whatever the precision changes to, and with less waiting than float32."""
    mean = torch.stack([aim_of(rank) for rank in range(WORKERS)]).mean(0)
    for text in ("local:period=4", "async:staleness=4"):
        (result, *_) = on("50Mbit/s", text, 80)
        assert "int8" in result["trace"]
        assert float((result["end"] - mean).abs().max()) < 0.02
        (plain, *_) = on("50Mbit/s", text, 80, "float32")
        assert float((plain["end"] - mean).abs().max()) < 0.02
        assert result["idle"] < plain["idle"]


def test_a_slow_worker_does_not_reduce_the_precision() -> None:
    """Workers wait for each other a third of the time on a fast link, and keep float32."""
    (result, *_) = on("10Gbit/s", "bsp", 80, jitter=0.4)
    assert result["idle"] > 0.2
    assert set(result["trace"]) == {"float32"}


def test_measuring_continues_after_a_consensus() -> None:
    (result, *_) = on("10Mbit/s", "bsp", 80, "auto", 5)
    assert result["trace"][-1] == "int8"


@pytest.mark.parametrize("text", ["bsp", "local:period=2", "async:staleness=4,schedule=eager"])
def test_workers_without_data_follow_the_choice(text: str) -> None:
    """They sum at the precision that the others choose, and all end with the same bits."""
    results = on("10Mbit/s", text, 90, "auto", 0, 20)
    for result in results:
        assert torch.equal(result["end"], results[0]["end"])
    assert results[0]["trace"][-1] == "int8"


def test_the_log_has_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="offbeat"):
        on("10Mbit/s", "local:period=4", 60)
    logged = {record.getMessage() for record in caplog.records}
    assert logged == {
        "means: int8 from now on, as the link made workers wait 80 % of the time in float32"
    }


def buckets(overlap: bool) -> tuple[list[str], Tensor]:
    """Train with four buckets of gradients, launched during backward or changed after it."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Linear(768, 768, bias=False) for _ in range(4)))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.1)
    optimizer = sgd(model, lr=0.01)
    sync = attach(model, optimizer, "bsp", wire="auto")
    trace = []
    for step in range(45):
        optimizer.zero_grad()
        for _ in range(2 if step in (24, 33, 34) and not overlap else 1):
            model(torch.randn(4, 768)).square().mean().backward()
        optimizer.step()
        trace.append(sync.stats.details["wire"])
    sync.finish()
    return trace, flat(model)


@pytest.mark.parametrize("overlap", some([True, False], 0))
def test_all_buckets_of_a_step_have_the_same_precision(overlap: bool) -> None:
    """Buckets that were launched too early are undone and sent again at the same precision."""
    results = simulate(
        lambda: buckets(overlap),
        workers=2,
        network=Network("2Gbit/s", latency="100us"),
        compute=Compute(STEP_SECONDS),
    ).results
    for trace, end in results:
        assert trace == results[0][0]
        assert torch.equal(end, results[0][1])
        assert trace[0] == "float32"
        assert trace[-1] == "int8"
