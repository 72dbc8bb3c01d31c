"""Local SGD against a simulation of all workers in one process."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from problems import (
    OPTIMIZERS,
    PARAMETERS,
    Simulated,
    bsp_reference,
    flat,
    loss_of,
    make_batch,
    make_model,
    train_step,
)
from worlds import run

ROLL_BYTES = 7 * 8  # weight, stepping, finishing, flag, measure, view, round as float64


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


class Sink:
    """Keeps the decisions of all steps."""

    def __init__(self) -> None:
        self.synced: list[bool] = []

    def write(self, record: dict[str, Any]) -> None:
        self.synced.append(record["decision"] == "sync")

    def close(self) -> None: ...


def train(
    rank: int, size: int, strategy: offbeat.LocalSGD, kind: str, counts: Sequence[int]
) -> dict[str, Any]:
    """Own seed, own data, ``counts[rank]`` steps."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    sink = Sink()
    sync = offbeat.attach(model, optimizer, strategy, log=sink, timeout_seconds=20)
    trace = []
    for step in range(counts[rank]):
        train_step(model, optimizer, make_batch(rank, step))
        trace.append(flat(model))
    payload = sync.stats.payload_bytes
    sync.finish()
    return {
        "trace": trace,
        "end": flat(model),
        "stats": sync.stats,
        "payload": payload,
        "synced": sink.synced,
    }


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "period", "warmup_steps", "steps"),
    [
        ("momentum", 4, 0, 22),  # ends in the middle of a period
        ("adamw", 4, 0, 24),  # ends with a period
        ("fused", 3, 0, 10),
        ("momentum", 5, 7, 25),  # post-local SGD: steps 1…7, then 12, 17, 22
        ("sgd", 50, 0, 12),  # no period ends: finish alone averages
    ],
)
def test_models_are_averaged_after_exactly_period_steps(
    kind: str, period: int, warmup_steps: int, steps: int
) -> None:
    """Pitfall 14: x ← mean(x) after steps H, 2H, …, in each of the warm-up, and once in finish."""
    sim = Simulated.start(3, kind)
    trace, synced, since = [], [], 0
    for step in range(steps):
        sim.step(step)
        since += 1
        synced.append(step < warmup_steps or since == period)
        if synced[-1]:
            sim.average()
            since = 0
        trace.append(sim.flat())
    if since:
        sim.average()
    if not warmup_steps:
        assert synced == [step % period == 0 for step in range(1, steps + 1)]
    strategy = offbeat.LocalSGD(period=period, warmup_steps=warmup_steps)
    results = run(train, strategy, kind, [steps] * 3, workers=3)
    for rank, result in enumerate(results):
        assert result["synced"] == synced
        for step, got in enumerate(result["trace"]):
            close(got, trace[step][rank])
            others = [other["trace"][step] for other in results if other is not result]
            same = [torch.equal(got, other) for other in others]
            assert all(same) if synced[step] else not any(same), f"step {step + 1}"
        close(result["end"], sim.flat()[0])
        assert torch.equal(result["end"], results[0]["end"]), "finish leaves all the same bits"
        stats = result["stats"]
        assert (stats.steps, stats.syncs) == (steps, sum(synced))
        assert stats.lssr == synced.count(False) / steps
        means = 8 * PARAMETERS + ROLL_BYTES
        assert result["payload"] == means * sum(synced), "nothing is sent within a period"
        last = means if since else ROLL_BYTES
        assert stats.payload_bytes == result["payload"] + last


@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_period_one_is_bsp(kind: str) -> None:
    """H = 1 with (momentum) SGD is the mean gradient, to rounding."""
    expected = bsp_reference(3, kind, 55)
    for result in run(train, offbeat.LocalSGD(period=1), kind, [55] * 3, workers=3):
        assert all(result["synced"])
        for got, want in zip(result["trace"], expected, strict=True):
            close(got, want)


@pytest.mark.parametrize("counts", [[3, 7, 5], [8, 2, 4], [1, 12, 11]])
def test_uneven_counts_average_who_has_news(counts: list[int]) -> None:
    """A worker past its steps counts once more, for its last steps, and then has weight 0."""
    sim = Simulated.start(3, "momentum")
    news, since, trace = [False] * 3, 0, []
    for step in range(max(counts)):
        for rank in range(3):
            if step < counts[rank]:
                train_step(sim.models[rank], sim.optimizers[rank], make_batch(rank, step))
                news[rank] = True
        since += 1
        if since == 4:
            sim.average([float(new) for new in news])
            news, since = [False] * 3, 0
        trace.append(sim.flat())
    if any(news):
        sim.average([float(new) for new in news])
    results = run(train, offbeat.LocalSGD(period=4), "momentum", counts, workers=3)
    for rank, result in enumerate(results):
        assert len(result["trace"]) == counts[rank]
        for step, got in enumerate(result["trace"]):
            close(got, trace[step][rank])
        close(result["end"], sim.flat()[0])
        assert torch.equal(result["end"], results[0]["end"])


def resume(rank: int, size: int, strategy: offbeat.LocalSGD, at: int) -> list[Any]:
    """Uninterrupted, saved on the way, and continued in new objects from what was saved."""
    runs: list[Any] = []
    saved = io.BytesIO()
    for how in ("straight", "saving", "resumed"):
        model = make_model(seed=rank)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        sink = Sink()
        sync = offbeat.attach(model, optimizer, strategy, log=sink, timeout_seconds=20)
        first = 0
        if how == "resumed":
            saved.seek(0)
            state = torch.load(saved, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            sync.load_state_dict(state["sync"])
            first = sync.step
            assert first == at
        trace = []
        for step in range(first, 16):
            if how == "saving" and step == at:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "sync": sync.state_dict(),
                }
                torch.save(state, saved)
            if step < 15:
                train_step(model, optimizer, make_batch(rank, step))
                trace.append(flat(model))
        sync.finish()
        runs.append((trace, flat(model), sink.synced, (sync.stats.steps, sync.stats.syncs)))
    return runs


@pytest.mark.parametrize("at", [4, 6, 11, 15])  # 15 is the end: finish alone is left
def test_a_checkpoint_continues_bit_for_bit(at: int) -> None:
    """state_dict changes nothing; loaded in the middle of a period it continues, bit for bit."""
    strategy = offbeat.LocalSGD(period=4, warmup_steps=2)  # averages after 1, 2, 6, 10, 14
    for straight, saving, resumed in run(resume, strategy, at, workers=2):
        assert [i for i, sync in enumerate(straight[2], 1) if sync] == [1, 2, 6, 10, 14]
        for other, first in ((saving, 0), (resumed, at)):
            assert len(other[0]) == 15 - first
            for got, want in zip(other[0], straight[0][first:], strict=True):
                assert torch.equal(got, want)
            assert torch.equal(other[1], straight[1])
            assert other[2:] == (straight[2][first:], straight[3])


class Normalised(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 1)
        self.register_buffer("low", torch.full((2,), float(seed), dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int32))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def normalise(rank: int, size: int) -> list[dict[str, Tensor]]:
    """Own buffers before each mean, as a step hook of the user's sees them, and after it."""
    model = Normalised(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = offbeat.attach(model, optimizer, offbeat.LocalSGD(period=2), timeout_seconds=20)
    out = []
    for step in range(5):
        for _ in range(1 + rank):  # another number of forward passes on each worker
            loss = loss_of(model, make_batch(rank, step, dtype=torch.float32))
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            model.low.fill_([256.0, 1.0, 2.0][rank])
            model.seen[rank] += 5 + step
            model.phase.fill_([1 + 2j, 3 - 1j, -1j][rank])
        out.append({name: b.clone() for name, b in model.named_buffers()})
        optimizer.step()
        out.append({name: b.clone() for name, b in model.named_buffers()})
    sync.finish()
    return [*out, {name: b.clone() for name, b in model.named_buffers()}]


def test_float_buffers_are_averaged_and_integer_ones_take_the_maximum() -> None:
    """With the models: running statistics ← mean (in float32), counts ← max, on all alike."""
    results = run(normalise, workers=3)
    for step in range(5):
        before = [result[2 * step] for result in results]
        after = [result[2 * step + 1] for result in results]
        if step % 2 == 0:
            for own, same in zip(before, after, strict=True):
                assert all(torch.equal(own[name], same[name]) for name in own), "a local step"
            means_before, means_after = before, [result[-1] for result in results]
            if step < 4:
                continue
        else:
            means_before, means_after = before, after
        for name in ("norm.running_mean", "norm.running_var", "low", "phase"):
            wide = torch.complex128 if name == "phase" else torch.float64
            parts = [own[name].to(wide) for own in means_before]
            assert not torch.equal(parts[0], parts[1])
            want = (sum(parts) / 3).to(means_before[0][name].dtype)  # type: ignore[union-attr]
            for found in means_after:
                torch.testing.assert_close(found[name], want, rtol=1e-6, atol=1e-6)
        for name in ("norm.num_batches_tracked", "seen"):
            want = torch.stack([own[name] for own in means_before]).amax(0)
            for found in means_after:
                assert torch.equal(found[name], want)
                assert found[name].dtype == want.dtype
        for found in means_after:
            assert all(torch.equal(found[name], means_after[0][name]) for name in found)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"period": 0}, ValueError, "period must be at least 1, got 0"),
        ({"period": True}, TypeError, "period must be an integer of at least 1, got True"),
        ({"period": "8"}, TypeError, "period must be an integer of at least 1, got '8'"),
        ({"period": 2.0}, TypeError, "period must be an integer of at least 1, got 2.0"),
        ({"period": 4, "warmup_steps": -1}, ValueError, "warmup_steps must be at least 0, got -1"),
        ({"period": 4, "warmup_steps": None}, TypeError, "warmup_steps must be an integer"),
        ({}, TypeError, "period"),
        ({"period": 4, "momentum": 0.9}, TypeError, "momentum"),
    ],
)
def test_bad_arguments_name_what_is_allowed(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """An impossible setting is refused at once, and the message says what is possible."""
    with pytest.raises(error, match=words):
        offbeat.LocalSGD(**options)
