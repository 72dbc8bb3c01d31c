"""The command line, end to end: what it prints, how it ends, and what it leaves behind."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from torch.distributed.run import get_args_parser

import offbeat
from offbeat import cli
from offbeat.lab.cluster import Cluster
from offbeat.lab.recipes import RECIPES
from offbeat.strategies import STRATEGIES, parse_strategy

COMMAND = (sys.executable, "-m", "offbeat.cli")
NO_RECIPE = f"unknown recipe 'nope'; there are {', '.join(RECIPES)}"
NO_STRATEGY = f"unknown strategy 'nope'; there are {', '.join(sorted(STRATEGIES))}"
LIMIT = 60.0  # seconds any subprocess here may take
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in TORCHRUN},
    **{"COLUMNS": "200", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
    **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
}
LONG = ("train", "digits", "--workers", "2", "--epochs", "600")  # 13,000 steps: minutes

APP: Any = typer.main.get_command(cli.app)
OPTIONS = [name for one in APP.commands["train"].params for name in one.opts if name[0] == "-"]

needs_namespaces = pytest.mark.skipif(Cluster.why_not() is not None, reason=f"{Cluster.why_not()}")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def until(condition: Callable[[], bool], what: str, seconds: float = LIMIT) -> None:
    """Poll until ``condition`` holds; fail if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def process_ids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers_writing(log: Path) -> dict[int, int]:
    """The process of each rank whose job has this ``log``."""
    found = {}
    for pid in process_ids():
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if argv[1:3] == ["-m", "offbeat.lab.train"]:
            told = json.loads(argv[3])
            if told["job"]["log"] == str(log):
                found[told["rank"]] = pid
    return found


@contextlib.contextmanager
def started(*argv: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process, killed at the end of the block."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**ENVIRONMENT, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def ended(*argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a process that ends by itself."""
    with started(*argv) as process:
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, plain(out), plain(err)


@contextlib.contextmanager
def training(log: Path) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """``LONG``, once each of its 2 workers has recorded 5 steps; and the process of each rank."""
    ranks = [log.with_suffix(f".rank{rank}.jsonl") for rank in range(2)]

    def under_way() -> bool:
        assert process.poll() is None, process.communicate()
        return all(path.exists() and path.read_bytes().count(b"\n") >= 5 for path in ranks)

    scratch = str(log.parent)  # a killed process cannot remove its temporary folder
    with started(*COMMAND, *LONG, "--records", str(log), TMPDIR=scratch) as process:
        try:
            until(under_way, "5 steps of every worker")
            pids = workers_writing(log)
            assert sorted(pids) == [0, 1]
            yield process, pids
        finally:
            for pid in workers_writing(log).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``main`` in this process, where no run may start: exit code, output, errors."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a run was started")

    def main(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["offbeat", *argv])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), plain(out), plain(err)

    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli, "console", Console(width=200))
    monkeypatch.setattr(cli.comparison, "run_job", refuse)
    return main


# What it says


def test_recipes_are_listed() -> None:
    """The installed `offbeat recipes` names every recipe, its target, and what data it needs."""
    code, out, err = ended(str(Path(sys.executable).with_name("offbeat")), "recipes")
    assert (code, err) == (0, "")
    for recipe in RECIPES.values():
        (line,) = (line for line in out.splitlines() if line.split()[:1] == [recipe.name])
        assert recipe.description in line
        assert f"{recipe.metric} {recipe.target:g}" in line
        assert ("--data" in line) == (recipe.needs_data is not None)


def test_strategies_are_listed(call: Callable[..., tuple[int, str, str]]) -> None:
    """`offbeat strategies` names every strategy and each setting it takes."""
    code, out, err = call("strategies")
    assert (code, err) == (0, "")
    for name, kind in STRATEGIES.items():
        assert re.search(rf"^ *{name} ", out, re.MULTILINE)
        for setting in dataclasses.fields(kind):
            assert re.search(rf"\b{setting.name}\b", out)
    assert "name:setting=value" in out


def test_version(call: Callable[..., tuple[int, str, str]]) -> None:
    assert call("--version") == (0, f"offbeat {offbeat.__version__}\n", "")


def test_without_a_command_the_commands_are_shown(
    call: Callable[..., tuple[int, str, str]],
) -> None:
    """`offbeat` alone names every command."""
    _, out, err = call()
    for command in ("train", "compare", "recipes", "strategies"):
        assert re.search(rf"\b{command} {{2,}}\w", out + err)


def examples(command: str, call: Callable[..., tuple[int, str, str]]) -> list[str]:
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    start = re.compile(rf"(torchrun .* -m offbeat\.cli|offbeat) {command}\b")
    return [line.strip() for line in out.splitlines() if start.match(line.strip())]


@pytest.mark.parametrize("command", ["train", "compare", "recipes", "strategies"])
def test_help_shows_an_example(command: str, call: Callable[..., tuple[int, str, str]]) -> None:
    """The help of each command has a line that can be copied."""
    assert examples(command, call)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_examples_of_the_help_are_accepted(
    command: str, call: Callable[..., tuple[int, str, str]]
) -> None:
    """Every example in a help text parses, and names a recipe and strategies that exist."""
    for example in examples(command, call):
        words = shlex.split(example)
        argv = words[words.index(command) + 1 :]
        told = APP.commands[command].make_context(command, argv).params
        assert told["recipe"] in RECIPES
        assert (told["data"] is not None) == (RECIPES[told["recipe"]].needs_data is not None)
        texts = [told["strategy"]] if command == "train" else told["strategy"]
        for text in texts:
            parse_strategy(text)


# A user's mistakes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("train nope", NO_RECIPE),
        ("train digits -s nope", NO_STRATEGY),
        ("train digits --partition labels", "partition must be label:K or dirichlet:A, got .*"),
        ("train digits --injection 0.5", "injection must be ALPHA,BETA as in 0.5,0.5, got '0.5'"),
        ("train digits --lr-scale 0", "lr-scale must be positive and finite, got 0.0"),
        ("train digits --sampler all", "sampler must be seldp, defdp or distributed, got 'all'"),
        ("train digits -s selsync:delta=-1", "delta must be at least 0 .*, got -1"),
        ("train digits -s selsync:delta=high", "delta must be a number, got 'high'"),
        ("train digits -s selsync:dleta=1", "selsync has no setting 'dleta'; it has delta, .*"),
        ("train digits -s selsync:delta", ".*'delta' is not of the form setting=value"),
        ("train digits -s local", ".*period.*"),
        ("train mnist", "the mnist recipe needs --data DIR with .*"),
        ("train mnist --data /no/where", "looked for .* in /no/where, which does not exist"),
        ("train digits --workers 0", "workers must be at least 1, got 0"),
        ("train digits --epochs 0", "epochs must be positive and finite, got 0.0"),
        ("train digits --epochs nan", "epochs must be positive and finite, got nan"),
        ("train digits --epochs inf", "epochs must be .*, got inf"),
        ("train digits --timeout 0", "timeout.* must be positive.*, got 0.*"),
        ("train digits --timeout -1", "timeout.* must be positive.*, got -1.*"),
        ("train digits --bandwidth fast", "'fast' is not a bandwidth; write a number and a .*"),
        ("train digits --bandwidth 0Mbit/s", ".*0Mbit/s.*"),
        ("compare nope -s bsp", NO_RECIPE),
        ("compare digits -s bsp -s nope", "unknown strategy 'nope'; there are .*"),
        ("compare digits -s bsp --seeds 0", "seeds must be at least 1, got 0"),
        ("compare digits -s bsp --bandwidth 5", "'5' is not a bandwidth; write .*"),
    ],
)
def test_mistakes_are_one_line(
    argv: str,
    message: str,
    call: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mistake is exit code 2 and one line, before any worker starts or any file is written."""
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*argv.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("train", "recipe"),
        ("train digits --workers two", "--workers"),
        ("train digits --nope", "--nope"),
        ("compare digits", "--strategy"),
        ("nope", "nope"),
    ],
)
def test_mistakes_in_options_name_the_option(
    argv: str, words: str, call: Callable[..., tuple[int, str, str]]
) -> None:
    """What the parser refuses is exit code 2, and the message names it."""
    code, out, err = call(*argv.split())
    assert (code, out) == (2, "")
    assert words in err.lower()
    assert "Traceback" not in err


def test_a_mistake_of_a_real_process() -> None:
    """The process itself ends with 2 and prints one line."""
    code, out, err = ended(*COMMAND, "train", "nope")
    assert (code, out) == (2, "")
    assert err == f"error: {NO_RECIPE}\n"


def test_shaped_links_are_refused_where_they_cannot_be(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--bandwidth without root is exit code 1 and one line that says what is missing."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, out, err = call("train", "digits", "--bandwidth", "200Mbit/s")
    assert (code, out) == (1, "")
    assert re.fullmatch("error: no shaped links here: network namespaces need .*\n", err)


def test_torchrun_has_its_own_links(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--bandwidth is refused for processes that torchrun started."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = call("train", "digits", "--bandwidth", "200Mbit/s")
    assert (code, out) == (2, "")
    assert re.fullmatch("error: --bandwidth .*\n", err)


def test_ctrl_c_is_told(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run is exit code 130 and one line."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.comparison, "run_job", interrupt)
    code, _, err = call("train", "digits")
    assert code == 130
    assert err.strip() == "interrupted; all workers have been ended"


# Runs


def test_train(tmp_path: Path) -> None:
    """A short run ends with 0, a row of totals, and the records of both workers."""
    log = tmp_path / "deep" / "run.jsonl"
    argv = ("train", "digits", "-n", "2", "--epochs", "0.5", "-s", "local:period=4")
    code, out, err = ended(*COMMAND, *argv, "--records", str(log))
    assert (code, err) == (0, "")
    assert "digits, target test accuracy 0.985, 2 workers (real processes), loopback" in re.sub(
        r"\s+", " ", out
    )
    (row,) = (
        line for line in out.splitlines() if "local:period=4" in line and "not reached" in line
    )
    assert re.search(r"\b0\.\d{4}\b", row)
    assert re.search(r"\b\d+\.\d MB\b", row)
    for rank in range(2):
        lines = (tmp_path / "deep" / f"run.rank{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["step"] for record in records] == list(range(1, 13))
        assert {record["rank"] for record in records} == {rank}


def test_train_joins_torchrun() -> None:
    """Under torchrun each process is one worker, whatever --workers says; rank 0 alone prints."""
    code, out, err = ended(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "offbeat.cli", "train", "digits", "-s", "selsync:delta=0.3", "--workers", "7"),
        *("--epochs", "0.5"),
    )
    assert code == 0, err
    assert "Traceback" not in err
    lines = out.splitlines()
    steps = [int(line.split()[1]) for line in lines if line.startswith("step ")]
    assert steps == list(range(1, 13))  # half of 1437 images, 32 a step and worker, 2 workers
    assert sum("LSSR" in line for line in lines) == 1


@pytest.mark.parametrize("option", OPTIONS)
def test_torchrun_leaves_our_options_alone(option: str) -> None:
    """Each option of `offbeat train` goes through torchrun, which knows options of its own."""
    ours = ["train", "digits", option, "1"]
    parsed = get_args_parser().parse_args(["--nproc-per-node", "2", "-m", "offbeat.cli", *ours])
    assert parsed.training_script_args == ours
    assert parsed.nproc_per_node == "2"


@needs_namespaces
def test_train_on_shaped_links() -> None:
    """--bandwidth is told with the result, and its namespaces are gone afterwards."""
    with started(
        *COMMAND, "train", "digits", "-n", "2", "--epochs", "0.2", "--bandwidth", "100Mbit/s"
    ) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (0, "")
    assert "100 Mbit/s shaped links" in re.sub(r"\s+", " ", out)
    shown = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=10
    )
    assert f"offbeat-{process.pid}-" not in shown.stdout


@needs_proc
def test_ctrl_c_ends_every_worker(tmp_path: Path) -> None:
    """SIGINT in the middle: exit code 130, no traceback, and no worker is left at that time."""
    with training(tmp_path / "run.jsonl") as (process, pids):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
        assert not [pid for pid in pids.values() if alive(pid)]
    assert process.returncode == 130
    assert "Traceback" not in out + err


@needs_proc
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_named(tmp_path: Path, victim: int) -> None:
    """A worker killed in the middle: exit code 1, one line with its rank, no worker left."""
    with training(tmp_path / "run.jsonl") as (process, pids):
        os.kill(pids[victim], signal.SIGKILL)
        _, err = process.communicate(timeout=LIMIT)
        assert not [pid for pid in pids.values() if alive(pid)]
    assert process.returncode == 1
    assert plain(err) == f"error: worker {victim} was ended by SIGKILL\n"


@needs_proc
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL of the command itself, which can clean up nothing, ends the workers too."""
    with training(tmp_path / "run.jsonl") as (process, pids):
        process.kill()
        process.communicate(timeout=LIMIT)
        until(lambda: not any(map(alive, pids.values())), "the end of every worker", 10)
