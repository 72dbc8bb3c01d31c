"""The commands of virtual time and of networks: ``simulate``, ``compare --simulate``, ``plan``."""

import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offbeat import BSP, AsyncAveraging, LocalSGD, SelSync, cli, cli_network, cli_view
from offbeat.lab.recipes import RECIPES
from offbeat.strategies import STRATEGIES, parse_strategy
from offbeat.units import parse_seconds
from test_cli import APP, COMMAND, LIMIT, TORCHRUN, ended, plain, started

Call = Callable[..., tuple[int, str, str]]

PLACE = shlex.split("--workers 4 --bandwidth 200mbit --step-time 20ms")
SIMULATE = ("simulate", "digits", "--epochs", "1", *PLACE)
NETWORKED = shlex.split("plan --parameters 25M --step-time 120ms --workers 16 --bandwidth 5gbit")
TORCHRUN_2 = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "offbeat.cli"),
)
PNG = b"\x89PNG\r\n\x1a\n"


def one_line(text: str) -> str:
    """Without the breaks that the width of the screen makes."""
    return re.sub(r"\s+", " ", text)


def table(out: str) -> str:
    """Caption and table of a run, without the lines that tell of its progress."""
    start = re.search(r"^digits, target ", out, re.MULTILINE)
    assert start, out
    return out[start.start() :].partition("\ntimeline ")[0].partition("\njson ")[0].rstrip()


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """``main`` in this process, on a wide screen: exit code, output, errors."""

    def main(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["offbeat", *argv])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), plain(out), plain(err)

    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    for module in (cli, cli_view, cli_network):
        monkeypatch.setattr(module, "console", Console(width=200))
    return main


@pytest.fixture
def idle_call(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """The same in an empty folder, where nothing may run, be measured or be written."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("something was started")

    def main(*argv: str) -> tuple[int, str, str]:
        answer = call(*argv)
        assert not list(tmp_path.iterdir())
        return answer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.comparison, "run_and_record", refuse)
    monkeypatch.setattr(cli_network, "measure_recipe", refuse)
    monkeypatch.setattr(cli_network.probing, "probe", refuse)
    return main


# simulate


@pytest.mark.slow
def test_simulate_twice(tmp_path: Path) -> None:
    """Two processes: 0, a table that says what it is, the same table and JSON, and a timeline."""
    told = []
    for name in ("first", "second"):
        files = ("--timeline", str(tmp_path / f"{name}.png"), "--json", str(tmp_path / name))
        code, out, err = ended(*COMMAND, *SIMULATE, *files)
        assert (code, err) == (0, "")
        assert f"timeline {tmp_path / name}.png\n" in out
        assert f"json     {tmp_path / name}\n" in out
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
        told.append((table(out), (tmp_path / name).read_bytes()))
    assert told[0] == told[1]
    shown = one_line(told[0][0])
    assert "4 workers (simulated), 200 Mbit/s, 100 us latency, 20 ms a step, virtual time" in shown
    assert "real processes" not in shown
    assert re.search(r"^bsp +not reached .* 0\.\d{4} +\d+\.\d s ", told[0][0], re.MULTILINE)
    values = json.loads(told[0][1])
    assert values["simulated"] is True
    assert values["configuration"]["workers"] == len(values["stats"]) == 4
    assert values["configuration"]["network"]["bandwidth"] == 2e8
    assert values["configuration"]["compute"]["step"] == 0.02
    assert [one["steps"] for one in values["stats"]] == [12] * 4  # 1437 images, 4 x 32 a step
    assert {span["kind"] for span in values["timeline"]} == {"compute", "wait", "transfer"}


def test_without_a_step_time_it_is_measured(call: Call) -> None:
    """What it measured is told before, and is the step time of the run."""
    code, out, err = call("simulate", "digits", "--epochs", "0.1", "--workers", "2")
    assert (code, err) == (0, "")
    first, _, rest = out.partition("\n")
    measured = re.fullmatch(r"a step of digits takes (\S+ \S+) here", first)
    assert measured
    assert parse_seconds(measured[1]) > 0
    assert f"{measured[1]} a step, virtual time" in one_line(rest)


def test_the_timeline_says_simulated(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Title and axis of the picture say that nobody measured these seconds."""
    shown = drawn_texts(monkeypatch)
    argv = ("simulate", "digits", "--epochs", "0.1", *PLACE)
    code, _, err = call(*argv, "--timeline", str(tmp_path / "timeline.png"))
    assert (code, err) == (0, "")
    assert shown == [("simulated", "virtual seconds")]


def drawn_texts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Title and horizontal label of each figure saved from now on."""
    from matplotlib.figure import Figure

    texts: list[tuple[str, str]] = []
    save = Figure.savefig

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        (axes,) = self.axes
        texts.append((axes.get_title() or axes.get_title(loc="left"), axes.get_xlabel()))
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return texts


def test_files_in_a_new_folder(call: Call, tmp_path: Path) -> None:
    """--timeline and --json make their folder, as --records of `train` does."""
    picture, values = tmp_path / "new" / "timeline.png", tmp_path / "other" / "run.json"
    argv = ("simulate", "digits", "--epochs", "0.1", *PLACE)
    code, _, err = call(*argv, "--timeline", str(picture), "--json", str(values))
    assert (code, err) == (0, "")
    assert picture.exists()
    assert values.exists()


def test_ctrl_c_ends_a_simulation() -> None:
    """SIGINT in the middle: exit code 130 and one line, within seconds."""
    argv = ["simulate", "digits", "--workers", "2", "--epochs", "100", "--step-time", "20ms"]
    with started(*COMMAND, *argv) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("bsp  step ")
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        out, err = process.communicate(timeout=LIMIT)
        taken = time.monotonic() - sent
    assert process.returncode == 130
    assert err == "interrupted; all workers have been ended\n"
    assert "Traceback" not in out
    assert taken < 10


# compare --simulate


def test_compare_in_virtual_time(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The files of a real comparison, and every one says that it is simulated."""
    shown = drawn_texts(monkeypatch)
    strategies = ("-s", "bsp", "-s", "local:period=8")
    argv = ("compare", "digits", *strategies, "--simulate", "--epochs", "1", *PLACE)
    code, out, err = call(*argv, "--output", str(tmp_path))
    assert (code, err) == (0, "")
    names = ["plot.png", "report.html", "results.jsonl", "table.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    caption = "4 workers (simulated), 200 Mbit/s, 100 us latency, 20 ms a step, virtual time"
    assert caption in one_line(table(out))

    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert [one["strategy"] for one in results] == ["bsp", "local:period=8"]
    for one in results:
        assert one["simulated"] is True
        assert one["machine"] == "virtual time"
    bsp, local = results
    assert local["seconds"] < bsp["seconds"]
    assert bsp["stats"][0]["compute_seconds"] == pytest.approx(12 * 0.02)

    assert caption in (tmp_path / "table.md").read_text()
    page = (tmp_path / "report.html").read_text()
    assert caption in page
    assert "real processes" not in page
    ((title, axis),) = shown
    assert caption in one_line(title)
    assert axis == "training seconds (simulated)"
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


# Mistakes

BANDWIDTH = r"'1GB/s' is not a bandwidth; write a number and a unit, like 1Gbit/s .*"
DURATION = "is not a duration; write a number and a unit, like 100us, 50ms, 1.5s or 2min"
ONE_OF = f"there are {', '.join(sorted(STRATEGIES))}"
SUGGESTED = {BSP, LocalSGD, SelSync, AsyncAveraging}  # by plan, if none is given


@pytest.mark.parametrize("command", ["simulate digits", "compare digits -s bsp --simulate"])
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--step-time 20ms --bandwidth 1GB/s", BANDWIDTH),
        ("--bandwidth 1GB/s", BANDWIDTH),
        ("--latency 5", f"'5' {DURATION}"),
        ("--step-time fast", f"'fast' {DURATION}"),
        ("--step-time 0s", f"'0s' {DURATION}"),
        ("--step-time 20ms --jitter -1", "jitter must be finite and at least 0, got -1.0"),
        ("--jitter -1", "jitter must be finite and at least 0, got -1.0"),
        ("--step-time 20ms --seed -1", ".*seed.* -1.*"),
        ("--workers 0", "workers must be at least 1, got 0"),
        ("--epochs 0", "epochs must be positive and finite, got 0.0"),
        ("-s nope", f"unknown strategy 'nope'; {ONE_OF}"),
        ("-s local:perod=8", "local has no setting 'perod'; it has .*"),
        ("--data /no/where -s local:period=0", "period must be at least 1.*, got 0"),
    ],
)
def test_mistakes_are_one_line(argv: str, message: str, command: str, idle_call: Call) -> None:
    """Exit code 2 and one line that shows the right form, before anything runs."""
    code, out, err = idle_call(*command.split(), *argv.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", err)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("simulate nope", f"unknown recipe 'nope'; there are {', '.join(RECIPES)}"),
        ("simulate mnist", "the mnist recipe needs --data DIR with .*"),
        ("simulate mnist --data /no/where", "looked for .* in /no/where, which does not exist"),
        ("compare nope -s bsp --simulate", "unknown recipe 'nope'; there are .*"),
        ("compare digits -s bsp --simulate --seeds 0", "seeds must be at least 1, got 0"),
        ("plan", "plan needs --bandwidth, like 5Gbit/s, or --probe under torchrun"),
        ("plan --parameters 25M --step-time 1ms", "plan needs --bandwidth, like 5Gbit/s, .*"),
        ("plan --bandwidth 5gbit", "plan needs --parameters and --step-time, like .*"),
        ("plan --bandwidth 5gbit --parameters 25M", "plan needs .* --step-time, like .*"),
        ("plan --bandwidth 5gbit --step-time 1ms", "plan needs --parameters .*, like .*"),
        ("plan --parameters 25M --step-time 1ms --bandwidth 1GB/s", BANDWIDTH),
        ("plan --parameters 25M --step-time 1 --bandwidth 1gbit", f"'1' {DURATION}"),
        ("plan --parameters 25M --step-time 1s --bandwidth 1gbit --latency 5", f"'5' {DURATION}"),
        ("plan --parameters 5X --step-time 1s --bandwidth 1gbit", "'5X' is not a count; .* 25M .*"),
        ("plan --parameters 5 --step-time 1s --bandwidth 1gbit --lssr 2", "lssr must be .*"),
        ("plan --parameters 5 --step-time 1s --bandwidth 1gbit -n 0", "workers must be .*, got 0"),
    ],
)
def test_other_mistakes_are_one_line(argv: str, message: str, idle_call: Call) -> None:
    code, out, err = idle_call(*argv.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", err)


@pytest.mark.parametrize(
    "argv",
    [
        "plan --model digits --bandwidth 1GB/s",
        "plan --model digits --bandwidth 1gbit --latency 5",
        "plan --model digits --bandwidth 1gbit --jitter 2",
        "plan --model digits --bandwidth 1gbit --workers 0",
    ],
)
def test_plan_measures_nothing_after_a_mistake(argv: str, idle_call: Call) -> None:
    """A wrong option is told at once, not after the recipe has been measured."""
    code, out, err = idle_call(*argv.split())
    assert (code, out) == (2, "")
    assert re.fullmatch("error: .*\n", err)


def test_plan_probes_nothing_after_a_mistake(
    idle_call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun a missing --model is told at once, not after the network was measured."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("the network was measured")

    monkeypatch.setattr(cli_network, "_measure_network", refuse)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = idle_call("plan", "--probe")
    assert (code, out) == (2, "")
    assert re.fullmatch("error: plan needs --parameters and --step-time, .*\n", err)


@pytest.mark.parametrize(
    "argv", ["probe", "probe --seconds 5 --json", "plan --model digits --probe"]
)
def test_probing_needs_torchrun(argv: str, idle_call: Call) -> None:
    """Without torchrun there is one line, which shows how to start it."""
    code, out, err = idle_call(*argv.split())
    assert (code, out) == (1, "")
    assert re.fullmatch("error: .*: torchrun --nproc-per-node 2 -m offbeat.cli probe\n", err)


# plan


def test_plan(call: Call) -> None:
    """Every suggestion has a row and a note; one of them is recommended, with its reason."""
    code, out, err = call(*NETWORKED)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("25,000,000 parameters (100.0 MB), 120 ms a step, 16 workers")
    assert "predicted, not measured" in lines[0]
    (advice,) = (line for line in lines if line.startswith("Try "))
    chosen, reason = re.fullmatch(r"Try (\S+) first: (.+)\.", advice).groups()  # type: ignore[union-attr]
    rows = [line.split()[0] for line in lines if re.match(r"[\w:=,.]+ {2,}\d", line)]
    assert {type(parse_strategy(row)) for row in rows} == SUGGESTED
    assert chosen in rows
    assert re.search(r"wait.* \d+ %", reason)
    for row in rows:
        assert any(line.startswith(f"{row}: ") for line in lines)


def test_plan_as_json(call: Call) -> None:
    """--json is JSON and nothing else, with the same strategies and recommendation."""
    code, out, err = call(*NETWORKED, "--json")
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert values["workers"] == 16
    assert values["model_bytes"] == 1e8
    kinds = {type(parse_strategy(row["strategy"])) for row in values["rows"]}
    assert kinds == SUGGESTED
    assert values["recommendation"] in values["rows"]
    assert values["reason"]


def test_plan_of_strategies_over_a_wire(call: Call) -> None:
    """-s forecasts what is asked for, --wire how it would travel."""
    argv = (*NETWORKED, "--json", "-s", "fedavg:period=8", "-s", "local:period=8")
    exact, lossy = (json.loads(call(*argv, *wire)[1]) for wire in ((), ("--wire", "int8")))
    assert [row["strategy"] for row in exact["rows"]] == ["fedavg:period=8", "local:period=8"]
    assert 0.25 < lossy["rows"][0]["payload_bytes"] / exact["rows"][0]["payload_bytes"] < 0.28
    assert lossy["recommendation"]["strategy"] == "local:period=8"
    code, out, err = call(*NETWORKED, "--wire", "int8", "-s", "easgd")
    assert (code, out) == (2, "")
    assert "EASGD pushes to a parameter server" in err


def test_plan_of_a_recipe(call: Call) -> None:
    """--model measures parameters and step time; a step time that is given counts instead."""
    argv = ("plan", "--model", "digits", "--bandwidth", "100Mbit/s")
    code, out, err = call(*argv)
    assert (code, err) == (0, "")
    assert re.match(r"[\d,]+ parameters \(606\.8 kB\), \S+ \w+ a step, 4 workers, 100 Mbit/s", out)
    assert re.search(r"^Try \S+ first: ", out, re.MULTILINE)
    code, out, err = call(*argv, "--step-time", "7ms", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["step_seconds"] == 0.007


# Under torchrun


@pytest.mark.slow
def test_probe_prints_once() -> None:
    """Rank 0 alone prints, one table with a row for each rank."""
    code, out, err = ended(*TORCHRUN_2, "probe", "--seconds", "2")
    assert code == 0, err
    assert "Traceback" not in err
    lines = out.splitlines()
    assert re.fullmatch(r"2 workers on 1 host, gloo, all 2 ordered pairs, \S+ s", lines[0])
    assert sum(line.startswith("rank ") for line in lines) == 1
    ranks = [line for line in lines if re.match(r"\d {2,}", line)]
    assert [line.split()[0] for line in ranks] == ["0", "1"]
    assert all(re.search(r"\d (us|ms) +[\d.]+ \wbit/s +[\d.]+ \wbit/s *$", row) for row in ranks)
    assert sum(line.startswith("all-reduce: ") for line in lines) == 1


@pytest.mark.slow
def test_plan_with_a_probe_prints_once() -> None:
    """The network is the measured one, and the plan is printed by rank 0 alone."""
    code, out, err = ended(*TORCHRUN_2, "plan", "--model", "digits", "--probe")
    assert code == 0, err
    assert "Traceback" not in err
    assert out.count("predicted, not measured") == 1
    assert one_line(out).count(" 2 workers, ") == 1
    assert sum(line.startswith("Try ") for line in out.splitlines()) == 1


# Help


def examples(command: str, call: Call) -> list[str]:
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    start = re.compile(rf"(torchrun .* -m offbeat\.cli|offbeat) {command}\b")
    return [line.strip() for line in out.splitlines() if start.match(line.strip())]


@pytest.mark.parametrize("command", ["simulate", "compare", "plan", "probe"])
def test_examples_of_the_help_are_accepted(command: str, call: Call) -> None:
    """The help of each command has examples, and they parse."""
    found = examples(command, call)
    assert found
    for example in found:
        words = shlex.split(example)
        argv = words[words.index(command) + 1 :]
        told = APP.commands[command].make_context(command, argv).params
        recipe = told.get("recipe") or told.get("model")
        assert recipe is None or recipe in RECIPES
        texts = told.get("strategy") or ()
        for text in [texts] if isinstance(texts, str) else texts:
            parse_strategy(text)
        assert ("torchrun" in words) == (command == "probe" or bool(told.get("probe")))


def test_an_example_of_compare_is_simulated(call: Call) -> None:
    assert any("--simulate" in example for example in examples("compare", call))
