"""Totals, records and sinks of a run."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from loops import Sink
from offbeat.telemetry import JsonLines, Records, Stats, open_sinks
from problems import loss_of, make_batch, make_model
from workers import run


def refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines, each of which must be an object in strict JSON."""
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# -- totals ---------------------------------------------------------------------------------------


def test_stats_arithmetic() -> None:
    """LSSR = local / all steps, idle = waiting / (waiting + computing), 0 before any step."""
    stats = Stats(steps=10, syncs=4, wait_seconds=1.0, compute_seconds=3.0, details={"flags": 3})
    derived = {"local_steps": 6, "lssr": 0.6, "idle": 0.25, "flags": 3}
    assert {name: getattr(stats, name) for name in derived} == derived
    assert json.loads(json.dumps(stats.to_dict())) == {**dataclasses.asdict(stats), **derived}
    assert (Stats().local_steps, Stats().lssr, Stats().idle) == (0, 0.0, 0.0)
    assert Stats().details is not Stats().details


# -- records --------------------------------------------------------------------------------------


def write(rank: int, size: int, folder: str) -> Any:
    model = make_model(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sink, given = Sink(), []
    log = [f"{folder}/run.jsonl", Path(folder) / "of-{rank}" / "log.json", sink]
    sync = offbeat.attach(
        model, optimizer, offbeat.SelSync(delta=0.05), log=log, timeout_seconds=20
    )
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(rank, step))
        given.append({"loss": loss.item(), "epoch": step // 4, "good": True} if step % 2 else {})
        if step % 2:
            sync.record(loss=loss, epoch=np.int64(step // 4), good=torch.tensor(True))
        loss.backward()
        optimizer.step()
        readable = read(Path(folder, f"run.rank{rank}.jsonl"))
        assert len(readable) == step + 1, "a line is there as soon as its step is over"
    stats = dataclasses.replace(sync.stats)
    sync.finish()
    assert sink.closed == 1
    return given, stats, sink.records


def test_one_line_per_step_with_the_decision(tmp_path: Path) -> None:
    """step, rank, decision, seconds, bytes, what ``record`` adds, and SelSync's flag."""
    results = run(write, str(tmp_path), workers=2)
    assert len([*tmp_path.rglob("*.json*")]) == 4
    lines = [read(tmp_path / f"run.rank{rank}.jsonl") for rank in (0, 1)]
    for rank, (given, stats, kept) in enumerate(results):
        assert lines[rank] == read(tmp_path / f"of-{rank}" / "log.json")
        assert [(line["rank"], line["step"]) for line in lines[rank]] == [
            (rank, step) for step in range(1, 9)
        ]
        assert [record["step"] for record in kept] == [*range(1, 9)]
        assert lines[rank][0]["change"] == "inf", "infinity is text, so that the line is JSON"
        for line, added in zip(lines[rank], given, strict=True):
            assert {k: line[k] for k in ("loss", "epoch", "good") if k in line} == added
        for name in ("payload_bytes", "wait_seconds", "compute_seconds"):
            column = [line[name] for line in lines[rank]]
            assert sum(column) == pytest.approx(getattr(stats, name))
            assert min(column) >= 0
        assert stats.flags == sum(line["flag"] for line in lines[rank])
        assert stats.syncs == sum(line["decision"] == "sync" for line in lines[rank])
    for pair in zip(*lines, strict=True):
        asked = any(line["flag"] for line in pair)
        assert {line["decision"] for line in pair} == {"sync" if asked else "local"}
        assert {line["payload_bytes"] for line in pair} == {8 * 10 + asked * 8 * 40}
    assert {line["decision"] for line in lines[0]} == {"sync", "local"}


def closes(rank: int, size: int) -> Any:
    closed = []
    for how in ("finish", "detach", "__exit__"):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sink = Sink()
        sync = offbeat.attach(model, optimizer, offbeat.BSP(), log=sink)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        getattr(sync, how)(*(KeyError, KeyError(), None) if how == "__exit__" else ())
        optimizer.step()
        sync.finish()
        closed.append((sink.closed, len(sink.records)))
    return closed


def test_sinks_are_closed_once() -> None:
    """After finish, detach or an exception nothing is written."""
    assert run(closes, workers=1) == [[(1, 1)] * 3]


def test_a_last_line_that_cannot_be_written_does_not_stop_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All sinks are closed, whatever one of them raises."""

    class Last(Sink):
        def close(self) -> None:
            super().close()
            raise OSError("quota")

    sinks = [Last(), Sink(), Last()]
    records = Records(sinks, rank=3)
    records.write(1, 3, "sync", 0.5, 0.5, 0, more={})
    records.close()
    assert [sink.closed for sink in sinks] == [1, 1, 1]
    assert caplog.text.count("lacks the last records: quota") == 2


def stops(rank: int, size: int) -> Any:
    model = make_model(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    class Fails(Sink):
        def write(self, record: dict[str, Any]) -> None:
            super().write(record)
            if len(self.records) > 1:
                raise KeyError("my own end")

    sync = offbeat.attach(model, optimizer, offbeat.BSP(), log=Fails())
    caught = []
    for step in range(3):
        loss_of(model, make_batch(rank, step)).backward()
        sync.record(number=step)
        try:
            optimizer.step()
        except KeyError as error:
            caught.append(str(error))
    sync.detach()
    return caught, sync.stats.steps


def test_any_other_exception_of_a_sink_ends_training() -> None:
    """It leaves optimizer.step() after the iteration is complete."""
    assert run(stops, workers=1) == [(["'my own end'"] * 2, 3)]


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"a": 1, "b": torch.ones(2)}, TypeError, r"record\(b=…\) takes one real number.*\(2,\)"),
        ({"a": 1, "b": np.ones(0)}, TypeError, r"record\(b=…\)"),
        ({"a": 1, "b": torch.ones(1, device="meta")}, TypeError, r"record\(b=…\)"),
        ({"a": 1, "b": torch.ones(1) * 1j}, TypeError, r"record\(b=…\).*complex"),
        ({"a": 1, "b": 1j}, TypeError, r"record\(b=…\) takes a number"),
        ({"a": 1, "b": object()}, TypeError, r"record\(b=…\) takes a number"),
        ({"a": 1, "b": [1, {"x": set()}]}, TypeError, r"record\(b\['x'\]=…\)"),
        ({"a": 1, "b": {1: 2}}, TypeError, r"record\(b=…\): keys must be text"),
        ({"a": 1, "step": 7}, ValueError, r"record\(step=…\): 'step' is Offbeat's own"),
        ({"a": 1, "rank": 7}, ValueError, "'rank' is Offbeat's own"),
    ],
)
def test_other_types_than_numbers_are_refused_at_once(
    values: dict[str, Any], error: type[Exception], match: str
) -> None:
    """The error names the value before the step, and no value is added."""
    sink = Sink()
    records = Records([sink], rank=0)
    with pytest.raises(error, match=match):
        records.add(values)
    records.add({"good": 1})
    records.write(1, 0, "sync", 0.5, 0.5, 0, more={"change": 2.0})
    records.write(2, 0, "sync", 0.5, 0.5, 0, more={})
    assert [one.keys() - set(Records.KEYS) for one in sink.records] == [{"good", "change"}, set()]


# -- sinks ----------------------------------------------------------------------------------------


def test_json_lines_writes_plain_valid_json(tmp_path: Path) -> None:
    """NaN is null, infinities are text, tensors and numpy scalars are numbers, at any depth.

    A new run starts a new file.
    """
    path = tmp_path / "deep" / "log.{rank}.jsonl"
    for _ in range(2):
        with closing(JsonLines(path, rank=3)) as sink:
            sink.write({"a": math.nan, "b": -math.inf, "c": torch.tensor(1.5), "d": np.float32(1)})
            sink.write({"a": np.nan, "b": torch.tensor(math.inf), "c": None, "d": [1, 2]})
            sink.write({"a": True, "b": Fraction(1, 4), "c": {"1": (-math.inf, np.float32("nan"))}})
    assert read(tmp_path / "deep" / "log.3.jsonl") == [
        {"a": None, "b": "-inf", "c": 1.5, "d": 1.0},
        {"a": None, "b": "inf", "c": None, "d": [1, 2]},
        {"a": True, "b": 0.25, "c": {"1": ["-inf", None]}},
    ]


@pytest.mark.parametrize(
    ("log", "want"),
    [
        ("log.jsonl", "log.rank2.jsonl"),
        ("log", "log.rank2"),
        ("a.b.jsonl", "a.b.rank2.jsonl"),
        ("sub/log.jsonl", "sub/log.rank2.jsonl"),
        ("{rank}.jsonl", "2.jsonl"),
        ("of-{rank}/log.jsonl", "of-2/log.jsonl"),
    ],
)
def test_a_path_becomes_one_file_per_rank(log: str, want: str, tmp_path: Path) -> None:
    """.rankN goes before the suffix unless the path contains {rank}."""
    for given in (str(tmp_path / log), tmp_path / log):
        for sink in open_sinks(given, rank=2):
            sink.write({})
            sink.close()
        assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()] == [want]


def test_log_takes_none_sinks_and_lists() -> None:
    """No sink, one sink, or a nested list of them. The error shows the allowed types."""
    first, second = Sink(), Sink()
    assert open_sinks(None, rank=0) == []
    assert open_sinks(first, rank=0) == [first]
    assert open_sinks([first, (second, None)], rank=0) == [first, second]
    for log in (3, object(), [3.5], b"bytes"):
        with pytest.raises(TypeError, match=r"a path, a sink with write\(record\) and close\(\)"):
            open_sinks(log, rank=0)


def curves(rank: int, size: int, folder: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = offbeat.TensorBoard(folder)
    for record in RECORDS:
        sink.write(record)
    sink.close()
    events = EventAccumulator(folder)
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_gets_one_curve_per_number(tmp_path: Path) -> None:
    """Numbers become scalars under offbeat/, a decision 0 or 1. Other values are skipped."""
    pytest.importorskip("tensorboard")
    (seen,) = run(curves, str(tmp_path), workers=1)  # in a worker: the writer starts a thread
    assert seen == {
        "offbeat/decision": [(1, 0.0), (2, 1.0)],
        "offbeat/loss": [(1, 2.5), (2, 1.5)],
        "offbeat/flag": [(1, 1.0), (2, 0.0)],
    }


# -- Weights & Biases -----------------------------------------------------------------------------


class Run:
    """A stand-in for wandb's run, which records the calls in order."""

    name = "eager-otter-7"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.define_metric = lambda name, step_metric=None: self.calls.append((name, step_metric))
        self.log = self.calls.append
        self.finish = lambda: self.calls.append("finished")


DEFINED = [("offbeat/step", None), ("offbeat/*", "offbeat/step")]
RECORDS: list[dict[str, Any]] = [
    {"step": 1, "decision": "local", "loss": torch.tensor(2.5), "flag": True, "t": [1]},
    {"step": 2, "decision": "sync", "loss": np.float64(1.5), "flag": False, "note": "x"},
]
LOGGED = [
    {"offbeat/step": 1, "offbeat/decision": 0, "offbeat/loss": 2.5, "offbeat/flag": 1},
    {"offbeat/step": 2, "offbeat/decision": 1, "offbeat/loss": 1.5, "offbeat/flag": 0},
]


@pytest.mark.parametrize("given", [False, True])
def test_wandb_gets_one_curve_per_number(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The curves have their own step.

    A run that the sink has started is finished with it. A given one is left open, and needs no
    import.
    """
    run = Run()
    module = None if given else SimpleNamespace(init=lambda: run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    (sink,) = open_sinks(offbeat.WandB(run) if given else offbeat.WandB(), rank=0)
    for record in RECORDS:
        sink.write(record)
    sink.close()
    assert run.calls == [*DEFINED, *LOGGED, *(() if given else ("finished",))]
    assert all(type(value) is float for values in run.calls[2:4] for value in values.values())
    assert str(sink) == "wandb run eager-otter-7"


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("torch.utils.tensorboard", lambda: offbeat.TensorBoard("unused"), "tensorboard"),
        ("wandb", lambda: offbeat.WandB(), "wandb"),
    ],
)
def test_a_sink_says_what_to_install(
    module: str, make: Callable[[], object], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'offbeat\[{extra}\]'"):
        make()


def test_wandb_takes_a_run_only() -> None:
    with pytest.raises(TypeError, match=r"what wandb\.init\(\) returned, got 'project'"):
        offbeat.WandB("project")
