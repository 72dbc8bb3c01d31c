"""Training that goes on when workers are lost and join, on simulated workers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import offbeat
from loops import Sink, sgd
from offbeat import Compute, Network, simulate
from offbeat.simulate import Kill
from problems import flat, loss_of, make_batch, make_model

STRATEGIES = [
    "bsp",
    "local:period=3",
    "local:period=1",
    "selsync:delta=0",
    "selsync:delta=0,flags=deferred",
    "selsync:target_lssr=0.5",
    "selsync:delta=0.05,aggregate=gradients",
    "fedavg:period=3",
    "fedavg:period=2,fraction=0.5",
    "async:staleness=4",
    "async:staleness=4,outer_momentum=0.5",
    "async:schedule=eager",
    "streaming",
    "streaming:schedule=cyclic,staleness=8",
    "streaming:parts=2,outer_gain=2",
    "diloco:period=4",
    "diloco:period=4,fragments=2,overlap=2",
    "ssp:staleness=2",
    "ssp:staleness=0",
    "ssp:staleness=2,servers=0/1",
    "downpour",
    "downpour:warmup_steps=3",
    "easgd:period=2",
    "easgd:period=2,synchronous=true",
]
STEPS = 12


def attach(model: torch.nn.Module, strategy: str, **options: Any) -> Any:
    optimizer = options.pop("optimizer", None) or sgd(model)
    chosen = offbeat.parse_strategy(strategy)
    options = {"on_failure": "continue", "timeout_seconds": 2.0, **options}
    return optimizer, offbeat.attach(model, optimizer, chosen, **options)


def train(strategy: str, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    model, sink = make_model(rank), Sink()
    optimizer, sync = attach(model, strategy, log=sink, **options)
    begun = sync.step
    for step in range(sync.step, steps):
        optimizer.zero_grad()
        loss_of(model, make_batch(rank, step)).backward()
        optimizer.step()
    sync.finish()
    return {
        "model": flat(model),
        "begun": begun,
        "steps": sync.step,
        "details": dict(sync.stats.details),
        "records": sink.records,
    }


def run(
    function: Callable[[], Any], *faults: Any, workers: int = 4, shuffle: int | None = None
) -> list[Any]:
    return simulate(
        function,
        workers=workers,
        network=Network("1Mbit/s", latency="1ms"),
        compute=Compute("10ms", jitter=0.2),
        faults=faults,
        shuffle_ties=shuffle,
    ).results


def survivors(results: Sequence[Any]) -> list[dict[str, Any]]:
    return [one for one in results if one is not None]


def check(results: Sequence[Any], members: list[int]) -> None:
    """Those who are left have one finite model, all steps, and know of each other."""
    left = survivors(results)
    assert len(left) == len(members)
    for one in left:
        assert torch.equal(one["model"], left[0]["model"])
        assert one["model"].isfinite().all()
        assert one["steps"] == STEPS
        assert one["details"]["members"] == members


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_others_go_on(strategy: str) -> None:
    """Whichever of four is killed, and wherever it is."""
    for lost, at in [(0, 0.061), (2, 0.1), (3, 0.083)]:
        results = run(lambda: train(strategy), Kill(worker=lost, at=at))
        assert results[lost] is None
        check(results, [rank for rank in range(4) if rank != lost])
