"""The command ``compare``: its output, its files, and its end."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.commands import (
    COMMAND,
    LIMIT,
    PNG,
    Call,
    alive,
    ended,
    one_line,
    plain,
    started,
    training,
    until,
)
from offbeat.cli import INTERRUPTED
from offbeat_lab.cli import progress, runs
from offbeat_lab.launch.cluster import Cluster, run_cleanup
from pages import code_on

needs_namespaces = pytest.mark.skipif(Cluster.why_not() is not None, reason=f"{Cluster.why_not()}")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

SHORT = ("--workers", "2", "--epochs", "0.2")  # 5 steps: 1437 images, 2 x 32 a step
PLACE = ("--bandwidth", "200mbit", "--step-time", "20ms")
ON_PLACE = "2 workers (simulated), 200 Mbit/s, 100 us latency, 20 ms a step, virtual time"


SET_BY = "a step of digits takes 7.1 ms here, as measured now; --step-time sets another time"


def table(out: str) -> str:
    """Return caption and table of a run, without the lines of its progress."""
    start = re.search(r"^digits, target ", out, re.MULTILINE)
    assert start, out
    return re.split(r"\n(table) ", out[start.start() :])[0].rstrip()


def test_nodes_are_simulated(call: Call, tmp_path: Path) -> None:
    """Two nodes of two train as two workers of twice the batch, and the result says so.

    A single simulated run has a timeline, labelled simulated, and its totals as JSON.
    """
    folder = tmp_path / "new" / "folder"
    argv = ("compare", "digits", "-s", "local:period=2", "--workers", "4", "--epochs", "0.2")
    nodes = ("--simulate", "--workers-per-node", "2", "-o", str(folder))
    code, out, err = call(*argv, *PLACE, *nodes, "--jitter", "0.1")
    assert (code, err) == (0, "")
    assert "steps varying by 10 %" in one_line(table(out))
    place = (
        "4 workers (simulated), 200 Mbit/s between nodes of 2 (100 Gbit/s, 10 us latency), 100 us"
    )
    assert place in one_line(table(out))
    assert (folder / "timeline.png").read_bytes().startswith(PNG)
    run = json.loads((folder / "simulation.json").read_text())
    assert run["simulated"] is True
    assert run["configuration"]["network"]["inside"] == 1e11
    stats = run["stats"]
    assert stats[0]["payload_bytes"] == stats[1]["payload_bytes"] > 0
    assert any(span["inside"] and "gradients" in span["what"] for span in run["timeline"])


# Worker processes


def test_a_single_run(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run ends with 0, a row of totals, and the records of both workers, without a report.

    Variables for scripts, and the name of the temporary folder, make no difference.
    """
    monkeypatch.setenv("OFFBEAT_STORE", "127.0.0.1:1")
    monkeypatch.setenv("OFFBEAT_WORKERS", "2")
    (tmp_path / "a #1").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a #1"))
    log = tmp_path / "deep" / "run.jsonl"
    argv = ("compare", "digits", *SHORT, "-s", "local:period=4", "--records", str(log))
    code, out, err = call(*argv)
    assert (code, err) == (0, "")
    caption = "digits, target test accuracy 0.985, 2 workers (real processes), loopback"
    assert caption in one_line(table(out))
    rows = [line for line in out.splitlines() if line.startswith("local:period=4 not reached")]
    (row,) = rows
    assert re.search(r"\b0\.\d{4}\b", row)
    assert re.search(r"\b\d+\.\d [kM]B\b", row)
    for rank in range(2):
        lines = (tmp_path / "deep" / f"run.rank{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["step"] for record in records] == list(range(1, 6))
        assert {record["rank"] for record in records} == {rank}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a #1", "deep"]


def test_no_thread_of_gloo_is_left_when_a_launched_process_exits() -> None:
    """Also if the training imports the module whose default arguments are the process group."""
    program = """
import os
import torch
from offbeat_lab.cli.workers import real_workers
from offbeat_lab.job import Job

with real_workers(Job("digits", workers=1), None):
    import torch.distributed.nn.functional
print([open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")])
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    code, out, err = ended(
        *(sys.executable, "-c", program),
        **{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    )
    assert code == 0, err
    assert "gloo" not in out.splitlines()[-1]


def test_a_run_is_told_while_it_trains(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines with loss, waiting and sent data."""
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    code, out, err = call("compare", "digits", *SHORT, "--evaluations", "1", "-s", "bsp")
    assert (code, err) == (0, "")
    line = r"bsp  step \d of 5, loss \S+, waiting \d+%, sending \S+ [kM]bit/s$"
    assert re.search(line, out, re.MULTILINE)


@needs_proc
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)]
)
def test_a_signal_ends_every_worker(tmp_path: Path, number: signal.Signals) -> None:
    """Exit code 130 or 143, no traceback, and no worker is left."""
    with training(tmp_path / "run.jsonl") as (process, pids):
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
        assert not [pid for pid in pids.values() if alive(pid)]
    assert process.returncode == 128 + number
    assert plain(err) == f"{INTERRUPTED}\n"
    assert "Traceback" not in out
    assert not list(tmp_path.glob("offbeat-*")), "its temporary folder"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handle Ctrl-C as a shell's foreground job does; a background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def offbeat_namespaces(pid: int) -> list[str]:
    """Return the namespaces that the process has made."""
    return re.findall(rf"offbeat-{pid}-\S+", ended("ip", "netns", "list")[1])


@needs_namespaces
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)]
)
def test_a_signal_while_links_are_shaped_leaves_no_namespace(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    """No temporary folder or traceback is left, either."""
    shape = Cluster._shape
    made = []

    def interrupt(cluster: Cluster, namespace: str, *arguments: Any) -> None:
        if namespace.endswith("-2"):
            made.extend(offbeat_namespaces(os.getpid()))
            os.kill(os.getpid(), number)
        shape(cluster, namespace, *arguments)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Cluster, "_shape", interrupt)
    with interruptible():
        code, _, err = call("compare", "digits", "--workers", "4", "--bandwidth", "1Gbit/s")
    assert len(made) == 4, "the switch and three nodes"
    assert not offbeat_namespaces(os.getpid())
    assert (code, err) == (128 + number, f"{INTERRUPTED}\n")
    assert not list(tmp_path.iterdir())


STUBBORN = """
import sys, time
from offbeat import cli

def sleep():  # a signal just before a single long sleep would be handled after it
    for _ in range(6000):
        time.sleep(0.1)

def app(standalone_mode):
    try:
        print("at work", flush=True)
        sleep()
    finally:
        print("cleaning up", flush=True)
        sleep()

cli.app = app
cli.main()
"""


@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)]
)
def test_a_second_signal_ends_at_once(first: signal.Signals, second: signal.Signals) -> None:
    """Cleanup may take long. The first signal is answered before."""
    with started(sys.executable, "-c", STUBBORN) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line, number in (("at work\n", first), ("cleaning up\n", second)):
            assert process.stdout.readline() == line
            process.send_signal(number)
        assert process.stderr.readline() == f"{INTERRUPTED}\n"
        process.wait(timeout=LIMIT)  # both sleeps take longer
    assert process.returncode == 128 + second


def test_cleanup_is_repeated_after_one_interrupt() -> None:
    """A cleanup is interrupted once and then completed."""
    calls = []

    def clean() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cleanup(clean)
    assert calls == [0, 1]
    run_cleanup(clean)
    assert calls == [0, 1, 2]


@needs_proc
def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL of the command, which then cannot clean up, ends the workers, too."""
    with training(tmp_path / "run.jsonl") as (process, pids):
        process.kill()
        process.communicate(timeout=LIMIT)
        until(lambda: not any(map(alive, pids.values())), "the end of every worker", 10)


# Simulated workers


def test_without_a_step_time_it_is_measured(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step time is printed first and is that of the run. A warning follows if steps differ."""
    for high, warned in ((0.017, False), (0.019, True)):
        steps = (0.006, 0.0071, high)
        monkeypatch.setattr(runs, "measure_recipe", lambda *_, steps=steps, **__: steps)
        code, out, err = call("compare", "digits", "--simulate", *SHORT)
        first, _, rest = out.partition("\n")
        assert (code, first) == (0, SET_BY)
        assert "7.1 ms a step, virtual time" in one_line(rest)
        told = "warning: measured steps took 6 ms to 19 ms (10 % and 90 % quantiles), "
        assert err.startswith(told) if warned else err == ""


@pytest.mark.nightly
def test_ctrl_c_ends_a_simulation() -> None:
    """SIGINT in the middle: exit code 130 and one line."""
    argv = ["compare", "digits", "--simulate", "-n", "2", "--epochs", "100", "--step-time", "20ms"]
    with started(*COMMAND, *argv) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("streaming  step ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert err == f"{INTERRUPTED}\n"
    assert "Traceback" not in out


# Comparisons


def test_compare(call: Call, tmp_path: Path) -> None:
    """The files of a comparison in virtual time are labelled simulated and agree."""
    folder = tmp_path / "a" / "b"
    strategies = ("-s", "bsp", "-s", "local:period=2")
    argv = ("compare", "digits", *strategies, "--simulate", *SHORT, *PLACE)
    code, out, err = call(*argv, "--output", str(folder))
    assert (code, err) == (0, "")
    names = {"plot": "plot.png", "report": "report.html", "table": "table.md"}
    assert {path.name for path in folder.iterdir()} == {"results.jsonl", *names.values()}
    told = dict(line.split() for line in out.splitlines()[-3:])
    assert told == {what: str(folder / name) for what, name in names.items()}
    assert ON_PLACE in one_line(table(out))

    lines = (folder / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert [one["strategy"] for one in results] == ["bsp", "local:period=2"]
    for one in results:
        assert one["simulated"] is True
        assert one["machine"] == "virtual time"
    bsp, local = results
    assert local["seconds"] < bsp["seconds"]
    assert bsp["stats"][0]["compute_seconds"] == pytest.approx(5 * 0.02)

    assert ON_PLACE in (folder / "table.md").read_text()
    page = (folder / "report.html").read_text()
    assert ON_PLACE in page
    assert "real processes" not in page
    assert (folder / "plot.png").read_bytes().startswith(PNG)


# Strategies of one's own

OWN = "growing_period:GrowingPeriod:most=2"


@pytest.fixture
def own_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the page's module into the current directory, outside Python's path."""
    (tmp_path / "growing_period.py").write_text(code_on("extending", "class GrowingPeriod"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as with a console script, for worker processes
    monkeypatch.delitem(sys.modules, "growing_period", raising=False)


@pytest.mark.usefixtures("own_strategy")
def test_a_custom_strategy(call: Call, tmp_path: Path) -> None:
    """A class of a module in the current directory can be simulated, compared and trained."""
    # Means after step 1 of 5, then after two more each: LSSR 2/5.
    code, out, err = call("compare", "digits", "-s", OWN, *SHORT)
    assert (code, err) == (0, "")
    assert re.search(rf"^{OWN} not reached .* 0\.40 ", table(out), re.MULTILINE)
    argv = ("compare", "digits", "-s", "bsp", "-s", OWN, "--simulate", *SHORT, *PLACE)
    code, _, err = call(*argv, "--output", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    assert f"| `{OWN}` |" in (tmp_path / "out" / "table.md").read_text()
