"""Values of every strategy: references, identities, consensus, checkpoints, in both worlds."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
import workers
from cells import some
from loops import Sink, attach, close, restart
from offbeat.strategies.base import GlobalModel
from offbeat_lab.baselines import STRATEGIES
from problems import OPTIMIZERS, flat, make_batch, make_model, make_wide, train_step, wide_step
from strategies.references import Reference, SelSync
from strategies.rows import CUSTOM, ROWS, TO_TRAIN_WITH, Row, each, first_of_each
from worlds import run, simulated

with_reference = each(row for row in [*ROWS, CUSTOM] if row.reference is not None)


def test_every_strategy_has_a_row() -> None:
    assert {row.text.partition(":")[0] for row in ROWS} == set(STRATEGIES)


def train(
    rank: int,
    size: int,
    text: str,
    steps: Sequence[int],
    kind: str = "momentum",
    looks: Sequence[int] = (),
    step_seconds: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """Train unequal models on unequal data, with a consensus after the steps in ``looks``."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    sink = Sink()
    sync = attach(model, optimizer, text, log=sink, **options)
    trace, seen = [], []
    for step in range(1, steps[rank] + 1):
        time.sleep(step_seconds)
        train_step(model, optimizer, make_batch(rank, step - 1))
        trace.append(flat(model))
        if step in looks:
            with sync.consensus():
                seen.append(flat(model))
    counted = (sync.step, sync.stats.steps, sync.stats.syncs, sync.stats.payload_bytes)
    sync.finish()
    return {
        "trace": trace,
        "seen": seen,
        "end": flat(model),
        "counted": counted,
        "sent": sync.stats.payload_bytes,
        "details": sync.stats.details,
        "records": sink.records,
        "synced": [record["decision"] == "sync" for record in sink.records],
    }


def assert_same_training(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    """Compare to the last bit, including counts and bytes."""
    for one, other in zip(a, b, strict=True):
        for got, want in zip(
            [*one["trace"], one["end"]], [*other["trace"], other["end"]], strict=True
        ):
            assert torch.equal(got, want)
        assert (one["counted"], one["synced"]) == (other["counted"], other["synced"])


# -- values ---------------------------------------------------------------------------------------

EVEN, UNEVEN = [23] * 3, [6, 17, 11]


@with_reference
@pytest.mark.parametrize(
    ("steps", "kind", "looks"),
    [
        (EVEN, "momentum", (3, 8, 14, 20)),
        pytest.param(EVEN, "adamw", (5, 21), marks=pytest.mark.nightly),
        (UNEVEN, "sgd", (2, 5)),
        pytest.param([0, 9, 4], "momentum", (), marks=pytest.mark.nightly),
        pytest.param([14], "adamw", (9,), marks=pytest.mark.nightly),
    ],
    ids=["even", "adaptive", "uneven", "none", "alone"],
)
def test_values_are_those_of_the_reference(
    row: Row, steps: list[int], kind: str, looks: tuple[int, ...]
) -> None:
    """Compares models after every step, in every consensus and at the end; decisions; bytes."""
    assert row.reference is not None
    reference = row.reference(steps, kind)

    def worker(*place: int) -> dict[str, Any]:  # the references take plain steps of Adam
        return train(*place, row.text, steps, kind, looks, adam_correction=False)

    results = run(worker, workers=len(steps))
    seen = []
    for time_ in range(1, max(steps) + 1):
        reference.step()
        for rank, model in enumerate(reference.models()):
            if time_ <= steps[rank]:
                close(results[rank]["trace"][time_ - 1], model, 1e-11)
        if time_ in looks:
            seen.append(reference.mean())
    for rank, result in enumerate(results):
        assert len(result["trace"]) == steps[rank]
        assert result["synced"] == reference.synced[: steps[rank]]
        for got, want in zip(result["seen"], seen, strict=True):
            close(got, want, 1e-11)
        close(result["end"], reference.mean(), 1e-11)
        assert torch.equal(result["end"], results[0]["end"])
    averages = row.strategy.averages()
    if isinstance(averages, GlobalModel) and averages.blocking and len(set(steps)) == 1:
        for time_, synced in enumerate(reference.synced):
            first, *others = (result["trace"][time_] for result in results)
            assert [torch.equal(first, other) for other in others] == [synced] * len(others)
    check_counts(row, steps, reference, results)


def check_counts(
    row: Row, steps: list[int], reference: Reference, results: list[dict[str, Any]]
) -> None:
    for rank, result in enumerate(results):
        own, _, syncs, payload = result["counted"]
        assert (own, syncs) == (steps[rank], sum(reference.synced[: steps[rank]]))
        if isinstance(row.strategy.averages(), GlobalModel):
            assert result["details"]["launches"] == result["details"]["landings"]
            assert result["details"]["launches"] == reference.launches
        if len(set(steps)) == 1 and len(steps) > 1:
            assert payload == 8 * reference.numbers
            last = reference.vote_numbers + reference.last_numbers()
            assert result["sent"] == payload + 8 * last
        if isinstance(reference, SelSync):
            trigger, records = reference.triggers[rank], result["records"]
            found = [record["change"] for record in records]
            assert found == pytest.approx(trigger.changes, rel=1e-8, abs=1e-12)
            assert [record["flag"] for record in records] == trigger.flags
            assert result["details"].get("flags", 0) == sum(trigger.flags)


@each(ROWS)
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_one_worker_trains_as_if_alone(row: Row, kind: str) -> None:
    """The same script with one process is plain training, for any optimizer."""
    model = make_model(seed=0)
    text = row.alone or row.text
    optimizer = OPTIMIZERS[kind](model.parameters())
    (got,) = run(lambda *place: train(*place, text, [8], kind), workers=1)
    for step, one in enumerate(got["trace"]):
        train_step(model, optimizer, make_batch(0, step))
        close(one, flat(model), 0 if row.exactly else 1e-12)


IDENTITIES = [
    ("local:period=1", "bsp"),
    ("local:period=9,warmup_steps=1000", "bsp"),
    ("selsync:delta=0", "bsp"),
    ("selsync:delta=inf,warmup_steps=1000", "bsp"),
    ("selsync:delta=inf,max_interval=5", "local:period=5"),
    ("selsync:delta=inf,warmup_steps=6", "local:period=1000,warmup_steps=6"),
    ("diloco:period=1,outer_lr=1.0,outer_momentum=0.0", "bsp"),
    ("diloco:period=4,outer_lr=1.0,outer_momentum=0.0", "local:period=4"),
    ("powersgd:rank=4", "bsp"),
    ("streaming:parts=1,schedule=cyclic,staleness=2,outer_gain=1", "async:staleness=2"),
    ("streaming:parts=1,schedule=cyclic,staleness=6,outer_gain=1", "async:staleness=6"),
]


@pytest.mark.parametrize(("text", "same"), IDENTITIES)
@pytest.mark.parametrize("kind", ["momentum", pytest.param("sgd", marks=pytest.mark.nightly)])
def test_identities(text: str, same: str, kind: str) -> None:
    """Equal up to rounding with plain and momentum SGD, which are linear in the gradient."""
    expected = run(train, same, [21] * 3, kind, workers=3)
    for got, want in zip(run(train, text, [21] * 3, kind, workers=3), expected, strict=True):
        for one, other in zip(
            [*got["trace"], got["end"]], [*want["trace"], want["end"]], strict=True
        ):
            close(one, other, 1e-11)


# -- all workers together -------------------------------------------------------------------------


@each(ROWS)
@pytest.mark.parametrize("steps", some([[5, 0, 9], [0, 0, 4], [0, 0, 0], [7, 7, 7]], 0), ids=str)
def test_workers_may_take_any_numbers_of_steps(row: Row, steps: list[int]) -> None:
    """A worker without data takes part without stepping. All end with the same model."""
    results = run(train, row.text, steps, workers=3)
    for own, result in zip(steps, results, strict=True):
        assert result["counted"][:2] == (own, own)
        assert torch.equal(result["end"], results[0]["end"])
        assert result["end"].isfinite().all()
    moved = not torch.equal(results[0]["end"], flat(make_model(seed=0)))
    assert moved == bool(sum(steps))


@first_of_each(ROWS)
def test_a_consensus_in_the_middle_changes_nothing(row: Row) -> None:
    """Models, decisions, bytes and the end are bitwise those of a training without it."""
    size = row.repeatable
    plain = run(train, row.text, [11] * size, workers=size)
    looked = run(train, row.text, [11] * size, "momentum", (1, 4, 5, 9), workers=size)
    assert_same_training(looked, plain)


LOOKS = [[2, 9], [14, 15], [7, 18]]


def look(rank: int, size: int, text: str) -> dict[str, Any]:
    return train(rank, size, text, [16, 21, 33], looks=LOOKS[rank])


@first_of_each(row for row in TO_TRAIN_WITH if not row.timed)
def test_a_consensus_after_different_numbers_of_steps_is_the_same_on_all(row: Row) -> None:
    """An early worker votes in the other workers' rounds, and then continues its schedule."""
    results = run(look, row.text, workers=3)
    for result in results:
        assert torch.equal(result["end"], results[0]["end"])
        for one, other in zip(result["seen"], results[0]["seen"], strict=True):
            assert torch.equal(one, other)


BUFFERS = {
    "mean": torch.tensor([0.5, -1.0], dtype=torch.float64),
    "phase": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128),
    "count": torch.tensor([1, 7]),
    "mask": torch.tensor([True, False, True]),
    "packed": torch.tensor([200, 7], dtype=torch.uint8),
}


def buffered(rank: int, size: int, row: Row) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Buffers of every kind that differ between the workers, up to the end.

    Returns:
        Those of the worker before ``finish``; those that it saw in ``consensus``, and at the end.
    """
    model = make_model(seed=rank)
    for name, value in BUFFERS.items():
        model.register_buffer(name, value.clone())
    constant = torch.zeros(3)
    model.register_buffer("constant", constant, persistent=False)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sync = attach(model, optimizer, row.text)
    constant.fill_(rank)

    def buffers() -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    seen = []
    for step in range(7):
        for name in ("mean", "phase", "count", "packed"):
            model.get_buffer(name).add_(rank + 1)
        model.get_buffer("mask")[:] = torch.tensor([rank == 2, rank == 1, rank == 0])
        train_step(model, optimizer, make_batch(rank, step))
        if step == 4:
            own = buffers()
            with sync.consensus():
                seen.append(buffers())
            for name, buffer in buffers().items():
                # Something may have landed while this worker waited for the others.
                assert torch.equal(buffer, own[name]) or row.timed
    own = buffers()
    sync.finish()
    assert constant.tolist() == [rank] * 3
    return own, [*seen, buffers()]


@first_of_each(ROWS)
def test_all_end_with_the_same_buffers(row: Row) -> None:
    """This holds for every dtype. Bools and bytes become those of rank 0.

    A buffer that no checkpoint contains is a constant and does not change.
    """
    results = run(buffered, row, workers=3)
    first, firsts = results[0]
    for _, looks in results:
        for look, same in zip(looks, firsts, strict=True):
            for name, value in BUFFERS.items():
                assert look[name].dtype == value.dtype
                assert torch.equal(look[name], same[name]), name
        for name in ("mask", "packed"):
            assert torch.equal(looks[-1][name], first[name])
    assert firsts[-1]["count"].tolist() == max(own["count"].tolist() for own, _ in results)
    for name in ("mean", "phase"):  # some combination of the workers' values
        values = [own[name] for own, _ in results]
        assert float(values[0].real.min()) <= float(firsts[-1][name].real.min())
        assert float(firsts[-1][name].real.max()) <= float(values[2].real.max())


# -- torch's defaults -----------------------------------------------------------------------------


def by_hand(
    rank: int, size: int, text: str, wire: Any, device: str, saves: bool = True, looks: bool = True
) -> tuple[Tensor, Tensor]:
    """Train with given gradients, and with a parameter that has no elements.

    ``device`` is torch's default. ``saves`` is True to load a saved state, ``looks`` for a
    consensus. Returns the model before and after.
    """
    with torch.device("cpu"):
        model = make_wide(seed=rank)
        model[0].empty = nn.Parameter(torch.empty(0, 3))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with torch.device(device), attach(model, optimizer, text, wire=wire) as sync:
        start = flat(model)
        for step in range(8):
            for p in model.parameters():
                p.grad = p.detach().sin().add_(rank - step)
            optimizer.step()
            if step == 4:
                if saves:
                    sync.load_state_dict(sync.state_dict())
                if looks:
                    with sync.consensus():
                        pass
    return start, flat(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("text", "wire"), [("streaming", None), ("diloco:period=2", "int4"), ("bsp", "int8")]
)
def test_any_default_dtype_trains(text: str, wire: Any, dtype: torch.dtype) -> None:
    """Internal numbers do not have torch's default dtype; only the model has it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        results = simulated(by_hand, text, wire, "cpu", workers=3)
    finally:
        torch.set_default_dtype(before)
    start, end = results[0]
    assert end.dtype == dtype
    assert end.isfinite().all()
    assert not torch.equal(start, end)
    assert all(torch.equal(other, end) for _, other in results)


@first_of_each(ROWS)
def test_no_internal_tensor_is_on_the_default_device(row: Row) -> None:
    """Tensors on "meta" have no values, so the first use of one fails.

    Neither a parameter without elements nor a consensus changes anything, over a lossy wire.
    """
    wire, saves = "float32" if row.baseline else "int4", not row.served
    results = simulated(by_hand, row.text, wire, "meta", saves, workers=3)
    expected = simulated(by_hand, row.text, wire, "cpu", saves, row.timed, workers=3)
    for (_, end), (_, same) in zip(results, expected, strict=True):
        assert torch.equal(end, same)


# -- checkpoints ----------------------------------------------------------------------------------


def normed(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 1), nn.BatchNorm1d(1))


def resume(
    rank: int, size: int, text: str, wire: Any, at: int, steps: int, *, again: bool = True
) -> list[Tensor]:
    """Train to the end, and save a file at a step. ``again``: a second script loads it."""

    def begin(seed: int) -> tuple[nn.Module, Any, Any]:
        model = normed(seed)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        return model, optimizer, attach(model, optimizer, text, wire=wire)

    model, optimizer, sync = begin(rank)
    trace = []
    for step in range(steps):
        if step == at and again:
            model, optimizer, sync = restart(model, optimizer, sync, lambda: begin(100 + rank))
            assert sync.step == at
        elif step == at:
            sync.state_dict()
        wide_step(model, optimizer, rank, step)
        trace.append(flat(model))
    sync.finish()
    return [*trace, flat(model)]


RESUMED = [(wire, step) for step in (5, 8) for wire in ("float32", "int8")]


@pytest.mark.sampled
@each([CUSTOM, *ROWS])
@pytest.mark.parametrize("resumed", some(RESUMED, 0, 5), ids=str)
def test_a_resumed_training_continues_bit_for_bit(row: Row, resumed: tuple[str, int]) -> None:
    """The file contains everything that later steps depend on, over each wire.

    To save lands what is in flight, so the training that does not stop saves, too.
    """
    wire, at = resumed
    if row.baseline and (wire != "float32" or row.served):
        return  # tests/baselines
    size = row.repeatable
    whole = run(partial(resume, again=False), row.text, wire, at, 11, workers=size)
    for got, want in zip(run(resume, row.text, wire, at, 11, workers=size), whole, strict=True):
        assert torch.equal(torch.stack(got), torch.stack(want))


@each(row for row in TO_TRAIN_WITH if row.timed)
@pytest.mark.parametrize("wire", ["float32", "int2"])
def test_an_eager_training_resumes_to_one_model(row: Row, wire: str) -> None:
    """Saving is a collective then, and the values depend on the arrivals."""
    results = run(resume, row.text, wire, 9, 25, workers=3)
    for trace in results:
        assert torch.equal(trace[-1], results[0][-1])
        assert trace[-1].isfinite().all()


# -- wires ----------------------------------------------------------------------------------------


def send(rank: int, size: int, text: str, wire: Any) -> tuple[int, Tensor]:
    model = make_wide(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
    sync = attach(model, optimizer, text, wire=wire)
    for step in range(12):
        wide_step(model, optimizer, rank, step)
    sent = sync.stats.payload_bytes
    sync.finish()
    return sent, flat(model)


@first_of_each(TO_TRAIN_WITH)
def test_a_wire_is_honoured(row: Row) -> None:
    """It sends fewer bytes, and quantized values near the exact ones."""
    # Payloads are what is handed over: all chunks, then the sum of the own one.
    exact, lossy = (run(send, row.text, w, workers=3) for w in ("float32", "int8"))
    start = flat(make_wide(0))
    for (before, a), (after, b) in zip(exact, lossy, strict=True):
        if not row.timed:  # eager parts that are shorter are launched more often
            assert after < 0.4 * before
        assert not torch.equal(a, b)
        assert torch.equal(b, lossy[0][1])
        # Runs of an eager schedule differ, too, in the steps at which parts land. With the small
        # learning rate above, that changes little.
        assert (a - b).norm() < 0.2 * (a - start).norm()


# -- waiting --------------------------------------------------------------------------------------

OVERLAPPED = [
    ("diloco:period=5,overlap=3", "float32", "8Mbit/s"),
    ("diloco:period=5,overlap=3", "int8", "8Mbit/s"),
    ("async:staleness=10", "float32", "8Mbit/s"),
    ("async:staleness=10", "int8", "8Mbit/s"),
    ("async:staleness=24,schedule=eager", "float32", "1Mbit/s"),
    ("streaming:parts=4,schedule=cyclic,staleness=16", "float32", "8Mbit/s"),
    ("streaming:parts=4", "float32", "1Gbit/s"),
    ("streaming:parts=4,patience=0", "float32", "1Mbit/s"),
    ("streaming:parts=4,patience=0", "int4", "1Mbit/s"),
]


def twenty_steps(text: str, wire: Any, bandwidth: str) -> list[tuple[float, dict[str, Any]]]:
    """Return the waiting time and details of two workers after 20 steps of 20 ms."""

    def worker() -> tuple[float, dict[str, Any]]:
        model = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = attach(model, optimizer, text, wire=wire)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
        found = sync.stats.wait_seconds, dict(sync.stats.details)
        sync.finish()
        return found

    place = {"network": offbeat.Network(bandwidth, latency="1ms")}
    return offbeat.simulate(worker, workers=2, compute=offbeat.Compute("20ms"), **place).results


@pytest.mark.parametrize(("text", "wire", "bandwidth"), OVERLAPPED)
def test_no_worker_waits_for_a_mean_that_overlaps(text: str, wire: str, bandwidth: str) -> None:
    """A mean takes about 43 ms (2 steps) at 8 Mbit/s, and 17 steps at 1 Mbit/s."""
    for seconds, details in twenty_steps(text, wire, bandwidth):
        assert seconds == 0
        assert details["landings"] > 0


@pytest.mark.parametrize(("text", "means"), [("diloco:period=5", 4), ("local:period=4", 5)])
def test_workers_wait_for_a_mean_that_does_not_overlap(text: str, means: int) -> None:
    for seconds, _ in twenty_steps(text, "float32", "8Mbit/s"):
        assert means * 0.04 < seconds < means * 0.06


@pytest.mark.parametrize(
    "text", ["async:staleness=4,schedule=eager", "streaming:parts=1,staleness=4"]
)
def test_eager_workers_wait_at_the_bound(text: str) -> None:
    """Local steps past the newest launch that has landed never exceed it."""
    for seconds, details in twenty_steps(text, "float32", "1Mbit/s"):
        assert seconds > 0.5
        assert details["staleness_max"] == 4


# -- both worlds ----------------------------------------------------------------------------------


@pytest.mark.sampled
@first_of_each(row for row in ROWS if not row.timed)
def test_processes_and_the_simulator_agree(row: Row) -> None:
    """Models, consensus, decisions, counts and bytes are equal."""
    args = (row.text, [11, 13, 15], "momentum", (6,))
    real, virtual = (go(train, *args, workers=3) for go in (workers.run, simulated))
    for a, b in zip(real, virtual, strict=True):
        one, other = ([*x["trace"], *x["seen"], x["end"]] for x in (a, b))
        close(torch.stack(one), torch.stack(other), 1e-10)
        assert (a["counted"], a["synced"]) == (b["counted"], b["synced"])
        assert torch.equal(b["end"], virtual[0]["end"])


@pytest.mark.sampled
@first_of_each(row for row in ROWS if row.timed)
def test_processes_and_the_simulator_train_alike(row: Row) -> None:
    """For strategies that depend on timing, all workers end with the same bits.

    Without momentum the path depends little on the timing.
    """
    steps = [11, 13, 15]
    real = workers.run(train, row.text, steps, "sgd", (), 0.01, workers=3)
    virtual = simulated(train, row.text, steps, "sgd", workers=3)
    for world in (real, virtual):
        for rank, one in enumerate(world):
            assert one["counted"][0] == steps[rank]
            assert torch.equal(one["end"], world[0]["end"])
    apart = (real[0]["end"] - virtual[0]["end"]).norm()
    assert apart < 0.5 * (virtual[0]["end"] - flat(make_model(seed=0))).norm()
