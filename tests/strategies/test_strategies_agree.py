"""Every strategy gives the same on real processes and on simulated workers.

So the simulator is a verified fake. A new strategy is one row.
"""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from cells import nightly
from offbeat import Compute, Network, simulate
from offbeat.strategies import STRATEGIES, parse_strategy
from problems import OPTIMIZERS, flat, loss_of, make_batch, make_model, train_step
from workers import run

TEXTS = [
    "bsp",
    "local:period=4,warmup_steps=5",
    "selsync:target_lssr=0.5",
    "selsync:delta=0.3,flags=deferred",
    "async:staleness=4,outer_lr=0.7,outer_momentum=0.5",
    "fedavg:rounds_per_epoch=3,steps_per_epoch=10,fraction=0.5,unselected=restart",
    "streaming:parts=3,schedule=cyclic,staleness=4",
    "diloco:period=5,fragments=3,overlap=2",
    "ssp:staleness=0",
    "easgd:period=2,synchronous=true,servers=0/2",
]
TEXTS_TOO = [
    "local:period=3",
    "selsync:delta=0.3",
    "selsync:delta=0.2,window=3,max_interval=4",
    "selsync:delta=0.3,aggregate=gradients",
    "async:staleness=4",
    "fedavg:period=3,fraction=0.5,weights=3/1/2",
    "streaming:parts=2,schedule=cyclic,staleness=8",
    "diloco:period=4",
    "ssp:staleness=0,servers=1/",
]
# What these give depends on how fast network and workers are.
TIMED = ["streaming:parts=3", "ssp:staleness=2", "downpour", "easgd:period=2"]
TIMED_TOO = ["downpour:push_every=3,fetch_every=2,server_optimizer=adagrad,server_lr=0.1"]


class Sink:
    def __init__(self) -> None:
        self.decisions: list[str] = []

    def write(self, record: dict[str, Any]) -> None:
        self.decisions.append(record["decision"])

    def close(self) -> None: ...


def train(rank: int, size: int, text: str, step_seconds: float = 0.0) -> dict[str, Any]:
    """Unequal replicas, data and numbers of steps, clipping, and a look at the consensus."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sink = Sink()
    sync = offbeat.attach(model, optimizer, parse_strategy(text), log=sink, timeout_seconds=30)
    for step in range(11 + 2 * rank):
        time.sleep(step_seconds)  # the work of a step, where results depend on how long it takes
        if step % 2:
            optimizer.zero_grad()
            loss_of(model, make_batch(rank, step)).backward()
            sync.clip_grad_norm_(1.0)
            optimizer.step()
        else:
            train_step(model, optimizer, make_batch(rank, step))
        if step == 6:
            with sync.consensus():
                seen = flat(model)
    own = flat(model)
    stats = sync.stats
    before = (stats.steps, stats.syncs, stats.payload_bytes)
    sync.finish()
    return {
        "own": own,
        "seen": seen,
        "end": flat(model),
        "counts": before,
        "decisions": sink.decisions,
    }


@pytest.mark.sampled
@pytest.mark.parametrize("text", [*TEXTS, *nightly(TEXTS_TOO)])
def test_gloo_and_the_simulator_agree(text: str) -> None:
    """Models, decisions, counts and bytes."""
    real = run(train, text, workers=3)
    simulated = simulate(
        lambda: train(dist.get_rank(), dist.get_world_size(), text),
        workers=3,
        network=Network("10Mbit/s", latency="1ms"),
        compute=Compute("10ms", jitter=0.3),
    )
    for a, b in zip(real, simulated.results, strict=True):
        for key in ("own", "seen", "end"):
            torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-10, msg=key)
        assert a["counts"] == b["counts"]
        assert a["decisions"] == b["decisions"]
        assert torch.equal(b["end"], simulated.results[0]["end"])


@pytest.mark.sampled
@pytest.mark.parametrize("text", [*TIMED, *nightly(TIMED_TOO)])
def test_gloo_and_the_simulator_train_alike(text: str) -> None:
    """Where order matters: all workers end with the same bits, near the other world's."""
    real = run(train, text, 0.01, workers=3)
    simulated = simulate(
        lambda: train(dist.get_rank(), dist.get_world_size(), text),
        workers=3,
        network=Network("10Mbit/s", latency="1ms"),
        compute=Compute("10ms", jitter=0.3),
    ).results

    start = flat(make_model(seed=0))
    for world in (real, simulated):
        for rank, one in enumerate(world):
            assert one["counts"][0] == 11 + 2 * rank
            assert torch.equal(one["end"], world[0]["end"])
            assert torch.equal(one["seen"], world[0]["seen"])
    apart = (real[0]["end"] - simulated[0]["end"]).norm()
    assert apart < 0.5 * (simulated[0]["end"] - start).norm()


def test_every_strategy_has_a_row() -> None:
    assert {text.partition(":")[0] for text in (*TEXTS, *TIMED)} == set(STRATEGIES)
