"""Totals, records and sinks of a run."""

import dataclasses
import json
import math
import sys
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
from problems import (
    loss_of,
    make_batch,
    make_model,
)
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
    sink = Sink()
    log = [f"{folder}/run.jsonl", Path(folder) / "of-{rank}" / "log.json", sink]
    sync = offbeat.attach(
        model, optimizer, offbeat.SelSync(delta=0.05), log=log, timeout_seconds=20
    )
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(rank, step))
        losses.append(loss.item())
        if step % 2 == 0:
            sync.record(loss=loss, epoch=np.int64(step // 4), good=torch.tensor(True))
        loss.backward()
        optimizer.step()
        readable = read(Path(folder, f"run.rank{rank}.jsonl"))
        assert len(readable) == step + 1, "a line is there as soon as its step is over"
    payload = sync.stats.payload_bytes
    waited, computed = sync.stats.wait_seconds, sync.stats.compute_seconds
    sync.finish()
    assert sink.closed == 1
    return losses, (payload, waited, computed), sync.stats, sink.records


def test_one_line_per_step_with_the_decision(tmp_path: Path) -> None:
    """step, rank, decision, seconds, bytes, what ``record`` adds, and SelSync's flag."""
    results = run(write, str(tmp_path), workers=2)
    assert sorted(p.name for p in tmp_path.rglob("*.json*")) == [
        "log.json",
        "log.json",
        "run.rank0.jsonl",
        "run.rank1.jsonl",
    ]
    flags = []
    for rank, (losses, totals, stats, kept) in enumerate(results):
        lines = read(tmp_path / f"run.rank{rank}.jsonl")
        assert lines == read(tmp_path / f"of-{rank}" / "log.json")
        assert [line["step"] for line in lines] == list(range(1, 9))
        assert {line["rank"] for line in lines} == {rank}
        assert lines[0]["change"] == "inf", "infinity is text, so that the line is JSON"
        flags.append([line["flag"] for line in lines])
        for step, line in enumerate(lines):
            given = {"loss", "epoch", "good"} & line.keys()
            assert given == ({"loss", "epoch", "good"} if step % 2 == 0 else set())
            if given:
                assert line["loss"] == losses[step]
                assert (line["epoch"], line["good"]) == (step // 4, True)
        assert sum(line["payload_bytes"] for line in lines) == totals[0]
        assert sum(line["wait_seconds"] for line in lines) == pytest.approx(totals[1])
        assert sum(line["compute_seconds"] for line in lines) == pytest.approx(totals[2])
        assert min(line["wait_seconds"] for line in lines) >= 0
        assert stats.flags == sum(line["flag"] for line in lines)
        assert stats.syncs == sum(line["decision"] == "sync" for line in lines)
        assert [record["step"] for record in kept] == list(range(1, 9))
    for line0, line1, *asked in zip(
        read(tmp_path / "run.rank0.jsonl"), read(tmp_path / "run.rank1.jsonl"), *flags, strict=True
    ):
        assert line0["decision"] == line1["decision"] == ("sync" if any(asked) else "local")
        assert line0["payload_bytes"] == 8 * 10 + any(asked) * 8 * 40
    assert any(not any(asked) for asked in zip(*flags, strict=True)), "some steps are local"


def closes(rank: int, size: int) -> Any:
    closed = []
    for how in ("finish", "detach", "exception"):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sink = Sink()
        sync = offbeat.attach(model, optimizer, offbeat.BSP(), log=sink)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        if how == "exception":
            try:
                with sync:
                    raise KeyError
            except KeyError:
                pass
        else:
            getattr(sync, how)()
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
    """NaN is null, infinities are text, tensors and numpy scalars are numbers, at any depth."""
    path = tmp_path / "deep" / "log.{rank}.jsonl"
    with closing(JsonLines(path, rank=3)) as sink:
        sink.write({"a": math.nan, "b": -math.inf, "c": torch.tensor(1.5), "d": np.float32(0.25)})
        sink.write({"a": np.nan, "b": torch.tensor(math.inf), "c": None, "d": [1, 2], "e": "x"})
        sink.write({"a": True, "b": Fraction(1, 4), "c": {"1": (-math.inf, np.float32("nan"))}})
    assert read(tmp_path / "deep" / "log.3.jsonl") == [
        {"a": None, "b": "-inf", "c": 1.5, "d": 0.25},
        {"a": None, "b": "inf", "c": None, "d": [1, 2], "e": "x"},
        {"a": True, "b": 0.25, "c": {"1": ["-inf", None]}},
    ]


def test_json_lines_overwrites(tmp_path: Path) -> None:
    """A new run starts a new file."""
    for value in (1, 2):
        with closing(JsonLines(tmp_path / "log.jsonl")) as sink:
            sink.write({"value": value})
    assert read(tmp_path / "log.jsonl") == [{"value": 2}]


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


def test_tensorboard_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tensorboard the error names the extra."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'offbeat\[tensorboard\]'"):
        offbeat.TensorBoard("unused")


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


def test_wandb_gets_one_curve_per_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curves have their own step. A run that the sink has started is finished with it."""
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda: run))
    sink = offbeat.WandB()
    for record in RECORDS:
        sink.write(record)
    sink.close()
    assert run.calls == [*DEFINED, *LOGGED, "finished"]
    assert all(type(value) is float for values in run.calls[2:4] for value in values.values())
    assert str(sink) == "wandb run eager-otter-7"


def test_a_run_that_was_given_to_wandb_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner finishes it. Nothing is imported for it."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = Run()
    (sink,) = open_sinks(offbeat.WandB(run), rank=0)
    sink.write(RECORDS[0])
    sink.close()
    assert run.calls == [*DEFINED, LOGGED[0]]


def test_wandb_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without wandb the error names the extra. Another argument than a run is refused."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'offbeat\[wandb\]'"):
        offbeat.WandB()
    with pytest.raises(TypeError, match=r"what wandb\.init\(\) returned, got 'project'"):
        offbeat.WandB("project")
