"""The command watch, on files that other code writes meanwhile."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.commands import Call
from cli.test_cli_runs import interruptible
from offbeat.cli import watch
from offbeat.cli.watch import sparkline


def line(step: int, rank: int = 0, **more: Any) -> str:
    """Return a record of a step of 0.5 s, half of it waiting, in which 100 kB are sent."""
    values = {"step": step, "rank": rank, "decision": "sync", "payload_bytes": 100_000}
    return json.dumps({**values, "compute_seconds": 0.25, "wait_seconds": 0.25, **more}) + "\n"


def rows(out: str) -> dict[str, list[str]]:
    """Return the cells of the last table by the worker's name."""
    last = out[out.rindex("worker ") :].strip().splitlines()[1:]
    split = [re.split(" {2,}", one.strip()) for one in last]
    return {name: [re.sub(r"^\d+ s ago", "now", cell) for cell in cells] for name, *cells in split}


# -- one look --------------------------------------------------------------------------------------


def test_once_shows_every_worker(call: Call, tmp_path: Path) -> None:
    """Rates are the means of the last 30 s. Rank 10 comes after rank 9."""
    for rank in (9, 10):
        steps = [line(step, rank, loss=1 / step, total_steps=400) for step in range(1, 201)]
        steps += [line(201, rank, staleness=3, total_steps=400)]
        # Only the last 30 s of the 100 s are slow.
        slow = [one.replace("0.25", "0.5") for one in steps[-30:]]
        path = tmp_path / f"run.rank{rank}.jsonl"
        path.write_text("".join(steps[:-30] + slow))
        os.utime(path, (time.time() - 120,) * 2)
    code, out, err = call("watch", str(tmp_path / "run.jsonl"), "--once")
    assert (code, err) == (0, "")
    assert f"{tmp_path}/run.jsonl: about 3 min left\n" in out
    cells = ["201/400", "1", "0.005", "█▂▂▁▁▁▁▁▁▁▁▁", "50%", "3", "800 kbit/s", "2 min ago"]
    assert rows(out) == {"9": cells, "10": cells}
    assert call("watch", str(tmp_path), "--once")[1].splitlines()[1:] == out.splitlines()[1:]
    assert rows(call("watch", str(tmp_path / "run.rank9.jsonl"), "--once")[1]) == {"9": cells}
    assert [*rows(call("watch", str(tmp_path / "run.rank{rank}.jsonl"), "--once")[1])] == [
        "9",
        "10",
    ]


def test_records_of_several_trainings_have_the_names_of_their_files(
    call: Call, tmp_path: Path
) -> None:
    """Unknown values are "-". A loss that is not finite is shown."""
    (tmp_path / "a.jsonl").write_text(line(7))
    (tmp_path / "b.jsonl").write_text(line(8, loss=2.0) + line(9, loss=None))
    (tmp_path / "c.jsonl").write_text("no record\n[1]\n" + line(3, loss="inf", total_steps=3))
    (tmp_path / "results.jsonl").write_text('{"job": {}}\n')
    code, out, err = call("watch", str(tmp_path), "--once")
    assert (code, err) == (0, "")
    assert rows(out) == {
        "a": ["7", "2", "-", "-", "50%", "-", "1.6 Mbit/s", "now"],
        "b": ["9", "2", "nan", "▁×", "50%", "-", "1.6 Mbit/s", "now"],
        "c": ["3/3", "2", "inf", "×", "50%", "-", "1.6 Mbit/s", "finished"],
    }


def test_a_missing_path_is_one_line(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    want = f"error: looked for records in {path}, which does not exist\n"
    assert call("watch", str(path)) == (2, "", want)
    want = f"error: {tmp_path} holds no records of a training yet\n"
    assert call("watch", str(tmp_path), "--once") == (2, "", want)


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([], ""),
        ([3.0], "▁"),
        ([8.0, 4.0, 1.0], "█▄▁"),
        ([7.0, 7.0, 0.0, 0.0], "█▁"),
        ([1.0, float("nan"), float("inf"), float("-inf"), 0.0, 0.0], "××▁"),
    ],
)
def test_a_sparkline_has_one_block_for_each_mean(values: list[float], want: str) -> None:
    assert sparkline(values, len(want) or 3) == want


# -- a training under way --------------------------------------------------------------------------

WRITER = """
import sys, time
path, records = sys.argv[1], sys.argv[2:]
files = [open(f"{path}.rank0.jsonl", "w")]
for number, record in enumerate(records):
    if number == 5:
        files.append(open(f"{path}.rank1.jsonl", "w"))
    for rank, file in enumerate(files):
        for part in (record[:10], record[10:].replace('"rank": 0', f'"rank": {rank}')):
            print(part, end="", file=file, flush=True)
            time.sleep(0.02)
"""


def test_a_running_training_is_watched_to_its_end(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lines are half written at times, and the file of rank 1 appears later."""
    monkeypatch.setattr(watch, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watch, "_PRINT_SECONDS", 0.0)
    records = [line(step, total_steps=20) for step in range(1, 21)]
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run"), *records]):
        code, out, err = call("watch", str(tmp_path))
    assert (code, err) == (0, "")
    tables = out.split(f"{tmp_path}: ")
    assert len(tables) > 2, "while it ran"
    cells = ["20/20", "2", "-", "-", "50%", "-", "1.6 Mbit/s", "finished"]
    assert rows(out) == {"0": cells, "1": cells}


def test_a_terminal_is_redrawn_until_ctrl_c(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C is the usual end, so the exit code is 0."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(watch, "console", console)
    steps = iter(range(1, 4))

    def write(seconds: float) -> None:
        step = next(steps, None)
        if step is None:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            with (tmp_path / "run.jsonl").open("a") as file:
                file.write(line(step, total_steps=1000, loss=1.0))

    monkeypatch.setattr(time, "sleep", write)
    with interruptible():
        assert call("watch", str(tmp_path)) == (0, "", "")
    assert "no records yet" in " ".join(screen.getvalue().split())
    shown = re.findall(r"0 +(\d)/1000 .*? \d+ s ago", screen.getvalue())
    assert [*dict.fromkeys(shown)] == ["1", "2", "3"]


# -- reading what was appended ---------------------------------------------------------------------


def test_a_new_training_in_the_same_file_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(line(step, loss=9.0) for step in (1, 2, 3, 4)))
    training = watch.Training(path)
    path.write_text("".join(line(step, loss=4.0) for step in (1, 2, 3)) + "{")
    training.read()
    assert training.table().rows[0][1:5] == ("3", "2", "4", "▁▁▁")
