"""What every strategy must keep: one table of strategies, one test a property.

A new strategy is one row here. What only one strategy promises stands in its own file.
"""

import contextlib
import gc
import io
import json
import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import offbeat
import workers
import worlds
from cells import some
from offbeat import parse_strategy
from offbeat.strategies import STRATEGIES
from problems import OPTIMIZERS, flat, loss_of, make_batch, make_model, train_step
from worlds import run


@dataclass(frozen=True)
class Row:
    """One strategy.

    Attributes:
        text: Its text form.
        alone: Settings with which one worker's own model moves as if it trained alone.
        exactly: To the last bit; else to rounding.
        timed: Whether values depend on how fast workers and network are.
    """

    text: str
    alone: str
    exactly: bool = True
    timed: bool = False

    def __str__(self) -> str:
        return self.text

    @property
    def adapts(self) -> bool:
        """Whether it takes ``wire="auto"``."""
        strategy = parse_strategy(self.text)
        return strategy.adapts or strategy.chooses

    @property
    def repeatable(self) -> int:
        """With so many workers two runs give the same, whatever takes how long."""
        # A server of processes adds up in the order in which pushes come in, which rounds.
        pushes = parse_strategy(self.text).averages == "pushes"
        return 1 if self.timed or (pushes and worlds.world == "gloo") else 3


ROWS = [
    Row("bsp", "bsp"),
    Row("local:period=3", "local:period=3"),
    Row("local:period=4,warmup_steps=3", "local:period=2"),
    Row("fedavg:period=3,fraction=0.67", "fedavg:period=3"),
    Row("selsync:delta=0.05", "selsync:delta=0.05"),
    Row("selsync:target_lssr=0.5,max_interval=3", "selsync:target_lssr=0.5"),
    Row("selsync:delta=0.05,flags=deferred", "selsync:delta=0.05,flags=deferred"),
    Row("selsync:delta=0.05,aggregate=gradients", "selsync:delta=0.05,aggregate=gradients"),
    Row("async:staleness=4", "async:staleness=4"),
    Row("async:staleness=4,outer_lr=0.7,outer_momentum=0.5", "async:staleness=2"),
    Row("async:staleness=3,schedule=eager", "async:staleness=3,schedule=eager", timed=True),
    Row("streaming:parts=3", "streaming:parts=3", timed=True),
    Row("streaming:parts=3,schedule=cyclic,staleness=4", "streaming:parts=2,schedule=cyclic"),
    Row("streaming:parts=2,schedule=cyclic,staleness=8", "streaming:parts=1"),
    Row("diloco:period=3", "diloco:period=3,outer_lr=1.0,outer_momentum=0.0", exactly=False),
    Row("diloco:period=5,fragments=3,overlap=2", "diloco:period=1000"),
    Row("ssp:staleness=0", "ssp:staleness=0"),
    Row("ssp:staleness=2", "ssp:staleness=2", timed=True),
    Row("ssp:staleness=2,refresh=lazy", "ssp:staleness=2,refresh=lazy", timed=True),
    Row("downpour", "downpour:fetch_every=1000", timed=True),
    Row("easgd:period=2,synchronous=true", "easgd:period=1000"),
    Row("easgd:period=2", "easgd:period=1000", timed=True),
]
every_row = pytest.mark.parametrize("row", ROWS, ids=str)
_FIRST = {row.text.partition(":")[0]: row for row in reversed(ROWS)}.values()
every_strategy = pytest.mark.parametrize(  # its first row, the others nightly
    "row",
    [row if row in _FIRST else pytest.param(row, marks=pytest.mark.nightly) for row in ROWS],
    ids=str,
)
RESUMED = [(wire, step) for step in (5, 8) for wire in ("float32", "bfloat16", "int8", "auto")]


def test_every_strategy_has_a_row() -> None:
    assert {row.text.partition(":")[0] for row in ROWS} == set(STRATEGIES)


class Sink:
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(dict(record))

    def close(self) -> None: ...


def attach(model: nn.Module, optimizer: Any, text: str, **options: Any) -> offbeat.Synchronizer:
    strategy = parse_strategy(text)
    return offbeat.attach(model, optimizer, strategy, **{"timeout_seconds": 20, **options})


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return make_batch(rank, step)


Step = Callable[[nn.Module, Optimizer, tuple[Tensor, Tensor]], None]


def train(
    rank: int,
    size: int,
    text: str,
    steps: list[int],
    step_of: Step = train_step,
    looks: tuple[int, ...] = (),
    kind: str = "momentum",
    sink: Any = None,
) -> dict[str, Any]:
    """Unequal models and data; the model after every own step, and what it ends with."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    sync = attach(model, optimizer, text, log=sink)
    trace = []
    for step in range(steps[rank]):
        step_of(model, optimizer, batch_of(rank, step))
        trace.append(flat(model))
        if step in looks:
            with sync.consensus():
                seen = flat(model)
            assert torch.equal(flat(model), trace[-1]), "a look leaves the own model as it was"
            assert seen.isfinite().all()
    counted = (sync.step, sync.stats.steps, sync.stats.syncs, sync.stats.payload_bytes)
    sync.finish()
    return {"trace": trace, "counted": counted, "end": flat(model), "stats": sync.stats}


def assert_same_training(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    """To the last bit, and with the same counts and bytes."""
    for one, other in zip(a, b, strict=True):
        for name in ("trace", "end"):
            assert torch.equal(
                torch.stack([*one["trace"], one["end"]]),
                torch.stack([*other["trace"], other["end"]]),
            ), name
        assert one["counted"] == other["counted"]


# -- values ------------------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_one_worker_trains_as_if_alone(row: Row, kind: str) -> None:
    """The same script with one process is plain training, for any optimizer."""
    model = make_model(seed=0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    expected = []
    for step in range(8):
        train_step(model, optimizer, batch_of(0, step))
        expected.append(flat(model))
    (got,) = run(train, row.alone, [8], train_step, (), kind, workers=1)
    for one, want in zip(got["trace"], expected, strict=True):
        torch.testing.assert_close(one, want, rtol=0, atol=0 if row.exactly else 1e-12)


@every_row
@pytest.mark.parametrize("steps", some([[5, 0, 9], [0, 0, 4], [0, 0, 0], [7, 7, 7]], 0, 2), ids=str)
def test_workers_may_take_any_numbers_of_steps(row: Row, steps: list[int]) -> None:
    """One that runs out of data, or has none, takes part without a step; all end alike."""
    results = run(train, row.text, steps, workers=3)
    for own, result in zip(steps, results, strict=True):
        assert result["counted"][:2] == (own, own)
        assert torch.equal(result["end"], results[0]["end"])
        assert result["end"].isfinite().all()
    if sum(steps):
        assert not torch.equal(results[0]["end"], flat(make_model(seed=0)))
    else:
        assert torch.equal(results[0]["end"], flat(make_model(seed=0)))


BUFFERS = {
    "mean": torch.tensor([0.5, -1.0], dtype=torch.float64),
    "phase": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128),
    "count": torch.tensor([1, 7]),
    "mask": torch.tensor([True, False, True]),
    "packed": torch.tensor([200, 7], dtype=torch.uint8),
}


def buffered(
    rank: int, size: int, text: str, timed: bool
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Buffers of every kind that differ between the workers, up to the end; looked at in between.

    Returns:
        Those of the worker before ``finish``, those that it saw in ``consensus``, and at the end.
    """
    model = make_model(seed=rank)
    for name, value in BUFFERS.items():
        model.register_buffer(name, value.clone())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sync = attach(model, optimizer, text)
    seen = []
    for step in range(7):
        for name in ("mean", "phase", "count", "packed"):
            model.get_buffer(name).add_(rank + 1)
        model.get_buffer("mask")[:] = torch.tensor([rank == 2, rank == 1, rank == 0])
        train_step(model, optimizer, batch_of(rank, step))
        if step == 4:
            own = {name: buffer.clone() for name, buffer in model.named_buffers()}
            with sync.consensus():
                seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})
            for name, buffer in model.named_buffers():
                # Something may have landed while this worker waited for the others.
                left = torch.equal(buffer, own[name])
                assert left or timed, "a look leaves the own buffers as they were"
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    sync.finish()
    return own, [*seen, {name: buffer.clone() for name, buffer in model.named_buffers()}]


@every_strategy
def test_all_end_with_the_same_buffers(row: Row) -> None:
    """Of every dtype: in consensus() and after finish(); bools and bytes are those of rank 0."""
    results = run(buffered, row.text, row.timed, workers=3)
    first, firsts = results[0]
    for _, looks in results:
        for look, same in zip(looks, firsts, strict=True):
            assert {name: value.dtype for name, value in look.items()} == {
                name: value.dtype for name, value in BUFFERS.items()
            }
            for name in ("phase", "mean", "count", "mask", "packed"):
                assert torch.equal(look[name], same[name]), name
        for name in ("mask", "packed"):
            assert torch.equal(looks[-1][name], first[name])
    for name in ("mean", "phase"):  # of some combination of the workers' values
        values = [own[name] for own, _ in results]
        assert float(values[0].real.min()) <= float(firsts[-1][name].real.min())
        assert float(firsts[-1][name].real.max()) <= float(values[2].real.max())


@every_strategy
def test_a_look_at_the_consensus_leaves_no_trace(row: Row) -> None:
    """Own models, decisions, bytes and the end are those of a training without looks."""
    size = row.repeatable
    plain = run(train, row.text, [11] * size, workers=size)
    looked = run(train, row.text, [11] * size, train_step, (0, 3, 4, 8), workers=size)
    assert_same_training(looked, plain)


def resume(rank: int, size: int, text: str, wire: Any, at: int, steps: int) -> list[Tensor]:
    """Train to the end; with ``at`` > 0, as two scripts, the second from a file of the first."""
    torch.manual_seed(rank)
    wide = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 1), nn.BatchNorm1d(1))
    optimizer = OPTIMIZERS["momentum"](wide.parameters())
    sync = attach(wide, optimizer, text, wire=wire)
    trace = []
    for step in range(steps):
        if at and step == at:
            file = io.BytesIO()
            saved = {"sync": sync.state_dict(), "model": wide.state_dict()}
            torch.save({**saved, "optimizer": optimizer.state_dict()}, file)
            sync.detach()
            loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            torch.manual_seed(100 + rank)  # another process, with another fresh model
            wide = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 1), nn.BatchNorm1d(1))
            optimizer = OPTIMIZERS["momentum"](wide.parameters())
            sync = attach(wide, optimizer, text, wire=wire)
            wide.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            sync.load_state_dict(loaded["sync"])
            assert sync.step == at
        x, y = make_batch(rank, step, dtype=torch.float32)
        optimizer.zero_grad()
        (wide(x) - y).square().mean().backward()
        optimizer.step()
        trace.append(flat(wide))
    sync.finish()
    return [*trace, flat(wide)]


@pytest.mark.sampled
@every_row
@pytest.mark.parametrize("resumed", some(RESUMED, 0, 6), ids=str)
def test_a_resumed_training_goes_on_bit_for_bit(row: Row, resumed: tuple[str, int]) -> None:
    """The file holds all that the rest of the training depends on, over each wire."""
    wire, at = resumed
    if wire == "auto" and not row.adapts:
        with pytest.raises(ValueError, match=r'wire="auto": .* Name a precision'):
            run(resume, row.text, wire, 0, 1, workers=1)
        return
    size = row.repeatable
    whole = run(resume, row.text, wire, 0, 11, workers=size)
    for got, want in zip(run(resume, row.text, wire, at, 11, workers=size), whole, strict=True):
        assert torch.equal(torch.stack(got), torch.stack(want))


# -- the training loop stays as it is ------------------------------------------------------------


def addresses(rank: int, size: int, text: str) -> list[bool]:
    model = nn.Sequential(make_model(seed=rank), nn.BatchNorm1d(1).double())
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    tensors = [*model.parameters(), *model.buffers()]
    before = [t.data_ptr() for t in tensors]
    seen = []

    def check() -> None:
        now = [*model.parameters(), *model.buffers()]
        same = all(a is b for a, b in zip(now, tensors, strict=True))
        whole = all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
        seen.append(same and whole and [t.data_ptr() for t in now] == before)

    sync = attach(model, optimizer, text)
    for step in range(7):
        train_step(model, optimizer, batch_of(rank, step))
        check()
    with sync.consensus():
        check()
    sync.finish()
    check()
    return seen


@every_strategy
def test_tensors_stay_where_they_are(row: Row) -> None:
    """Pitfall 9: none is rebound or becomes a view of a larger one."""
    for seen in run(addresses, row.text, workers=2):
        assert all(seen)


def one_cycle(rank: int, size: int, text: str | None) -> tuple[list[float], list[str]]:
    model = make_model(seed=0)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    events: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
    sync = None if text is None else attach(model, optimizer, text)
    optimizer.register_step_post_hook(lambda *_: events.append("post"))
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    rates = []
    for step in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        train_step(model, optimizer, batch_of(rank, step))
        scheduler.step()
    if sync is not None:
        sync.finish()
    return rates, events


@every_strategy
def test_schedulers_and_the_users_own_hooks_go_on_working(row: Row) -> None:
    """Pitfall 4: OneCycleLR gives the rates of plain training, hooks fire once a step."""
    rates, events = one_cycle(0, 1, None)
    assert len(set(rates)) == 8
    assert events == ["pre", "post"] * 8
    assert run(one_cycle, row.text, workers=2) == [(rates, events)] * 2


def halves(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """One step from two backward passes."""
    optimizer.zero_grad()
    for half in range(2):
        x, y = (part[half::2] for part in batch)
        (loss_of(model, (x, y)) / 2).backward()
    optimizer.step()


def by_closure(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    assert optimizer.step(closure).isfinite()


@every_strategy
def test_accumulated_gradients_are_one_step(row: Row) -> None:
    """Pitfall 6: two backward passes and a step train as one pass over the whole batch."""
    size = row.repeatable
    whole = run(train, row.text, [9] * size, workers=size)
    parts = run(train, row.text, [9] * size, halves, workers=size)
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(
            torch.stack(a["trace"]), torch.stack(b["trace"]), rtol=0, atol=1e-12
        )
        assert a["counted"][:3] == b["counted"][:3]


@every_strategy
def test_a_closure_trains_as_a_plain_step(row: Row) -> None:
    """optimizer.step(closure) is the same training, to the last bit."""
    size = row.repeatable
    plain = run(train, row.text, [9] * size, workers=size)
    assert_same_training(run(train, row.text, [9] * size, by_closure, workers=size), plain)


def in_turn(rank: int, size: int, text: str, steps: list[int]) -> dict[str, Any]:
    """Two optimizers that step in turn, each after a backward pass of its own, as in a GAN."""
    torch.manual_seed(rank)
    model = nn.ModuleDict({"g": nn.Linear(4, 3), "d": nn.Linear(3, 1)}).double()
    optimizers = {
        "g": torch.optim.SGD(model["g"].parameters(), lr=0.05, momentum=0.9),
        "d": torch.optim.AdamW(model["d"].parameters(), lr=0.01),
    }
    sync = attach(model, [optimizers["g"], optimizers["d"]], text)
    counts = []
    for step in range(steps[rank]):
        x, y = batch_of(rank, step)
        for which in ("d", "g"):  # the other way round than in attach()
            model.zero_grad()
            fake = model["g"](x).tanh()
            if which == "d":
                (model["d"](fake.detach()) - y).square().mean().backward()
            else:
                model["d"](fake).square().mean().backward()
            optimizers[which].step()
            counts.append(sync.step)
        if step == 3:
            with sync.consensus():
                pass
    sync.finish()
    return {"end": flat(model), "counts": counts, "steps": sync.stats.steps}


@every_strategy
def test_two_optimizers_in_turn_are_one_iteration(row: Row) -> None:
    """Pitfall 5: an iteration is one step of each; workers with unequal data end alike."""
    results = run(in_turn, row.text, [7, 5], workers=2)
    for own, result in zip([7, 5], results, strict=True):
        assert result["counts"] == [step + half for step in range(own) for half in (0, 1)]
        assert result["steps"] == own
        assert torch.equal(result["end"], results[0]["end"])


class Overflowing(torch.amp.GradScaler):
    """On the CPU, with a scale that one step overflows on one worker."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=2.0**10, growth_interval=1000)


def scale(rank: int, size: int, text: str, declared: bool) -> dict[str, Any]:
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    scaler = Overflowing()
    sync = attach(model, optimizer, text, scaler=scaler)
    scales = []
    for step in range(9):
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(rank, step, dtype=torch.float32))
        if step == 4 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    sync.finish()
    return {"end": flat(model), "steps": sync.stats.steps, "scales": scales}


@every_strategy
def test_a_step_that_a_scaler_skips_counts(row: Row) -> None:
    """Pitfall 3: the worker whose gradient overflowed stays in step with the others."""
    for size, odd in ((2, 1),):
        results = run(scale, row.text, True, workers=size)
        for result in results:
            assert result["steps"] == 9
            assert torch.equal(result["end"], results[0]["end"])
            assert result["end"].isfinite().all()
        assert results[odd]["scales"][3] == 2 * results[odd]["scales"][4], "it was skipped"


# -- the wire ------------------------------------------------------------------------------------


def send(rank: int, size: int, text: str, wire: Any) -> tuple[int, Tensor]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 5000), nn.Tanh(), nn.Linear(5000, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    sync = attach(model, optimizer, text, wire=wire)
    for step in range(12):
        x, y = make_batch(rank, step, dtype=torch.float32)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    sent = sync.stats.payload_bytes
    sync.finish()
    return sent, flat(model)


@every_strategy
@pytest.mark.parametrize(
    ("wire", "share"),
    [pytest.param("bfloat16", 0.78, marks=pytest.mark.nightly), ("int8", 0.4)],
)
def test_a_wire_is_honoured(row: Row, wire: str, share: float) -> None:
    """Pitfall 31: fewer bytes and rounded values."""
    # Payloads are what is handed over: all chunks, then the sum of the own one.
    exact, lossy = (run(send, row.text, w, workers=3) for w in ("float32", wire))
    for (before, a), (after, b) in zip(exact, lossy, strict=True):
        if not row.timed:  # an eager merge that is shorter makes more of them
            assert after < share * before
        assert not torch.equal(a, b)
        assert torch.equal(b, lossy[0][1])


# -- words -------------------------------------------------------------------------------------


@every_row
def test_the_text_form_is_read_back(row: Row) -> None:
    strategy = parse_strategy(row.text)
    assert parse_strategy(str(strategy)) == strategy
    assert eval(repr(strategy), vars(offbeat)) == strategy


def strictly(text: str) -> Any:
    """JSON as the standard has it: no NaN, no infinity."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def tell(rank: int, size: int, text: str, folder: str) -> str:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sync = attach(model, optimizer, text, log=f"{folder}/run.jsonl")
    for step in range(8):
        train_step(model, optimizer, batch_of(rank, step))
    told = json.dumps(sync.stats.to_dict(), allow_nan=False)
    sync.finish()
    json.dumps(sync.stats.to_dict(), allow_nan=False)
    return told


@every_strategy
def test_every_word_of_telemetry_is_json(row: Row, tmp_path: Path) -> None:
    """Records and totals are plain values, the same keys in each record of one kind."""
    for rank, told in enumerate(run(tell, row.text, str(tmp_path), workers=2)):
        assert strictly(told)["steps"] == 8
        lines = (tmp_path / f"run.rank{rank}.jsonl").read_text().splitlines()
        records = [strictly(line) for line in lines]
        assert [record["step"] for record in records] == list(range(1, 9))
        assert {record["decision"] for record in records} <= {"sync", "local"}
        assert {record["rank"] for record in records} == {rank}


def hold(rank: int, size: int, text: str, wire: Any, alive: "weakref.WeakSet[Any]") -> None:
    model = nn.Sequential(make_model(seed=rank), nn.BatchNorm1d(1).double())
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sync = attach(model, optimizer, text, wire=wire, distance_every=2, gradient_change=True)
    for step in range(7):
        train_step(model, optimizer, batch_of(rank, step))
    sync.finish()
    alive.update([model, optimizer, sync])


@every_strategy
@pytest.mark.parametrize("wire", [None, pytest.param("auto", marks=pytest.mark.nightly)])
def test_a_simulated_run_holds_nothing_when_it_has_ended(row: Row, wire: Any) -> None:
    """Its models are freed at once: the garbage collector counts objects, and not their bytes."""
    if wire == "auto" and not row.adapts:
        return
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    gc.disable()
    try:
        worlds.simulated(hold, row.text, wire, alive, workers=2)
        assert not [*alive]
    finally:
        gc.enable()


# -- faults, on real processes -----------------------------------------------------------------


@contextlib.contextmanager
def caught() -> Iterator[list[BaseException]]:
    found: list[BaseException] = []
    try:
        yield found
    except Exception as error:
        found.append(error)


def raise_in_the_loop(rank: int, size: int, text: str) -> dict[str, Any]:
    """Rank 0 raises between two steps, inside the block; the others go on."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with caught() as found, attach(model, optimizer, text, timeout_seconds=20):
        for step in range(60):
            if rank == 0 and step == 5:
                own = flat(model)
                started = time.perf_counter()
                raise KeyError("a mistake of the user's")
            started = time.perf_counter()
            train_step(model, optimizer, batch_of(rank, step))
    seconds = time.perf_counter() - started
    (error,) = found
    if rank == 0:
        same = torch.equal(flat(model), own)
        train_step(model, optimizer, batch_of(rank, 0))  # the hooks are gone
        return {"error": type(error).__name__, "seconds": seconds, "same": same}
    finite = bool(flat(model).isfinite().all())
    return {"error": type(error).__name__, "seconds": seconds, "same": finite, "text": str(error)}


@pytest.mark.sampled
@every_strategy
def test_an_exception_starts_no_collective_and_is_noticed(row: Row) -> None:
    """Pitfall 13: it leaves the block at once, and the others fail long before their time-out."""
    first, *others = workers.run(raise_in_the_loop, row.text, workers=2, may_die=())
    assert first["error"] == "KeyError"
    assert first["same"]
    assert first["seconds"] < 5
    for other in others:
        assert other["error"] == "CommunicationError", other["text"]
        assert other["seconds"] < 10
        assert other["same"]


def die(rank: int, size: int, text: str, folder: str) -> dict[str, Any]:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sync = attach(model, optimizer, text, timeout_seconds=20)
    with caught() as found:
        for step in range(6000):  # who waits for nobody goes on until it is told
            if rank == 1 and step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            started = time.perf_counter()
            train_step(model, optimizer, batch_of(rank, step))
    seconds = time.perf_counter() - started
    with caught() as again:
        train_step(model, optimizer, batch_of(rank, 0))
    sync.detach()
    (error,), (repeated,) = found, again
    return {
        "error": type(error).__name__,
        "text": str(error),
        "seconds": seconds,
        "again": str(repeated),
        "finite": bool(flat(model).isfinite().all()),
    }


@pytest.mark.sampled
@every_strategy
def test_a_dead_worker_is_named(row: Row, tmp_path: Path) -> None:
    """Pitfalls 15, 19: by rank, soon, with the operation; and no later step succeeds."""
    survivor, _ = workers.run(die, row.text, str(tmp_path), workers=2, may_die=(1,))
    assert survivor["error"] == "CommunicationError", survivor["text"]
    assert re.match(r"rank 0: .+ failed after \d+\.\d s: ", survivor["text"]), survivor["text"]
    assert "lost the connection to rank 1, which" in survivor["text"]
    assert survivor["again"] == survivor["text"]
    assert survivor["seconds"] < 10
    assert survivor["finite"]
