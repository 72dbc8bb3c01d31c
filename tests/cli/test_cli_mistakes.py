"""Mistakes on the command line: one line and exit code 2, before anything runs or is written."""

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from cli.commands import Call, plain
from offbeat.errors import OffbeatError
from offbeat_lab.baselines import STRATEGIES
from offbeat_lab.cli import runs
from offbeat_lab.recipes import RECIPES, Setup, Task

HUGE = "1" + 15 * "0"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file, a folder, and failing modules."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "file").write_text("x")
    (folder / "dir").mkdir()
    (folder / "exit.py").write_text("raise SystemExit(3)\n")
    (folder / "file_strategy.py").write_text("raise RuntimeError('of\\nits own')\n")
    return folder


NO_RECIPE = (
    f"unknown recipe 'nope'; there are {', '.join(RECIPES)}, and your own as path/to/file.py or "
    "path/to/file.py:NAME"
)
NO_STRATEGY = (
    f"unknown strategy 'nope'; there are {', '.join(sorted(STRATEGIES))}, and your own as "
    "package.module:Class or package.module:Class:setting=value"
)
NOT_SIMULATED = "runs its own code on real processes, not on simulated workers"
BANDWIDTH = r"'1GB/s' is not a bandwidth; write a number and a unit, like 1Gbit/s .*"
DURATION = "is not a duration; write a number and a unit, like 100us, 50ms, 1.5s or 2min"


def rows(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the rows with the command, for real and for simulated workers."""
    commands = ("compare digits", "compare digits --simulate")
    return [(f"{command} {argv}", message) for argv, message in rows for command in commands]


def simulation_rows(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the rows with the command, for simulated workers."""
    return [(f"compare digits --simulate {argv}", message) for argv, message in rows]


JOB = [
    ("-s nope", NO_STRATEGY),
    ("--partition labels", "partition must be label:K, dirichlet:A or leased, got .*"),
    ("--injection 0.5", "injection must be ALPHA,BETA as in 0.5,0.5, got '0.5'"),
    ("--sampler all", "sampler must be seldp, defdp or distributed, got 'all'"),
    ("--data /no/where -s local:period=0", "period must be at least 1.*, got 0"),
    ("--workers 0", "workers must be at least 1, got 0"),
    ("--bandwidth 1GB/s", BANDWIDTH),
]
SIMULATION = [
    ("--step-time 20ms --bandwidth 1GB/s", BANDWIDTH),
    ("--latency 5", f"'5' {DURATION}"),
    ("--step-time fast", f"'fast' {DURATION}"),
    ("--step-time 0s", f"'0s' {DURATION}"),
    ("--workers-per-node 3", "workers=4 do not fill nodes of workers_per_node=3"),
]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *rows(JOB),
        *simulation_rows(SIMULATION),
        ("compare nope -s bsp", NO_RECIPE),
        ("compare mnist", "the mnist recipe needs --data DIR with .*"),
        ("compare digits --timeout 0", "timeout must be positive and finite, got 0.0"),
        ("compare digits -s bsp --seeds 0", "seeds must be at least 1, got 0"),
        ("compare nope.py", "looked for the recipe nope.py in nope.py, which does not exist"),
        (
            "compare digits -s bsp -s easgd --wire int8",
            "wire='int8' with easgd: .*; to give an option to some strategies only, "
            "write it after them, as in -s 'local:period=8 --wire int8'",
        ),
        ("compare digits --simulate -s torch:ddp", f"torch:ddp {NOT_SIMULATED}"),
        # misspelled names
        ("compare digit", r"unknown recipe 'digit' \(did you mean 'digits'\?\); there are .*"),
        ("compare digits --sampler defpd", r"sampler .*, got 'defpd' \(did you mean 'defdp'\?\)"),
        ("compare digits --wire in8", r".* '--wire'.* 'in8' .*'int2'\."),
        # where results go
        ("compare digits -s bsp -o FILES/file", "--output .*/file: name a directory, .*"),
        ("compare digits -s bsp --simulate -o FILES/new.jsonl", "--output .*: name a directory.*"),
        # creating a file in /proc fails even for root
        (
            "compare digits -s bsp --simulate --step-time 1ms -o /proc",
            "--output: cannot write to /proc: .*",
        ),
        (
            "compare digits -s bsp -s async --records a",
            "--records is for a single run: give one .*",
        ),
        ("compare digits --seeds 2 --records a", "--records is for a single run: give one .*"),
        ("compare digits --records FILES/dir", "--records .*/dir: it is a directory; name a file"),
        # numbers
        ("compare digits --epochs 1e-300", "1e-300 epochs are less than one of 1,437 samples"),
        ("compare digits --epochs 1e30", r"1e\+30 epochs are more than 1,000,000,000 steps"),
        (f"compare digits -n {HUGE}", f"workers must be at most 1000, got {HUGE}"),
        (f"compare digits --seed {HUGE}", f"seed must be at most 4000000, got {HUGE}"),
        (f"compare digits -s bsp --seeds {HUGE}", f"seeds must be at most 1000, got {HUGE}"),
        (
            f"compare digits -s ssp:staleness={10**30}",
            "staleness must be an integer of 64 bits, .*",
        ),
        ("compare digits --bandwidth 0.1bit/s", "links can be shaped to between .*, got 0.1 bit/s"),
        # things that do not go together
        ("compare digits -s bsp -s bsp", "'bsp' is given twice"),
        ("compare digits -s bsp -s 'bsp --wire float32'", ".* are the same; leave one out, .*"),
        (
            "compare digits -s local:period=8 -s local:period=8,warmup_steps=0",
            "'local:period=8,warmup_steps=0' and 'local:period=8' are the same; leave one out, .*",
        ),
        (
            "compare digits -s bsp --slow 0=2",
            "--jitter, --slow and speeds .* change the step time: .*",
        ),
        ("compare digits -s bsp --slow 1", "slow must be RANK=FACTOR, as in 1=2, got '1'"),
        ("compare digits -s bsp --tune 2", "tune must be at least 3, got 2"),
        (
            "compare digits -s bsp --tune 3 --lr-scale 2",
            "--lr-scale 2: --tune chooses the learning rate; leave it out, or fix it for .*",
        ),
        ("compare digits -s ssp --tune 3 -s ssp:staleness=4", "'ssp:staleness=4' is given twice"),
        ("compare digits -s bsp --tune 3 --wire int8", "--wire int8: ideal cannot honour it, .*"),
        ("report .", r"\. is a directory; name its results\.jsonl"),
        # options given twice
        ("compare digits --simulate -n 2 -n 4", "--workers is given twice: give it once"),
        ("report a -o b -o c", "--output is given twice: give it once"),
        ("compare digits -s 'bsp --sampler defdp' --partition label:2", "sampler 'defdp' with .*"),
        (
            "compare digits --partition leased --sampler defdp",
            "--.* leased with --sampler defdp: .*",
        ),
        # methods that cannot train this recipe with so many workers
        ("compare digits -s bsp -s fedavg:period=2,weights=1/2", "weights .* 4 workers, got 2: .*"),
        ("compare digits -s 'local:period=2 --adam-correction on'", "adam_correction with SGD: .*"),
        ("compare digits --data /nope", "data /nope: the digits recipe brings its own data"),
        # files
        ("compare FILES/exit.py", ".*exit.py, line 1: it cannot be run: SystemExit: 3"),
        ("compare digits -s file_strategy:A", "importing .* failed: RuntimeError: of its own"),
        (
            "compare digits -s offbeat.strategies:A",
            "offbeat.strategies has no strategy class 'A'; .*",
        ),
        ("compare digits -s no_such_module:A", "cannot import 'no_such_module' .* current dir.*"),
        # the parser
        ("plan --bandwidth 5gbit --step-time 1ms", "Missing option '--parameters'."),
        ("compare", "Missing argument 'recipe'."),
        ("nope", "No such command 'nope'."),
        # run and store
        ("run FILES/exit.py", "Missing option .*--workers.*"),
        ("run -n 2 no.py --lr 1", "there is no script no.py"),
        ("run -n 2 FILES", ".* is a directory; name a script, or a module with -m"),
        ("run -n 2 -m no_such.train", "there is no module no_such, here or among the .*"),
        ("run -n 4:2 FILES/exit.py", "--workers: give a number of workers .* got '4:2'"),
        ("run -n 2 --here 3 FILES/exit.py", "--here 3: there are --workers 2 in all"),
        ("run -n 2:4 --here 2 FILES/exit.py", "--here 2 of 4: the other machines need a store. .*"),
        ("run -n 2 --store a:1 FILES/exit.py", "--store needs --here, the number of workers .*"),
        (
            "run -n 2 --here 1 --store x FILES/exit.py",
            "the address of a store is host:port, .* got 'x'",
        ),
        (
            "run -n 2 --here 1 --store file://FILES FILES/exit.py",
            "file://.* is a directory; name a file .*",
        ),
        (
            "run -n 2 --here 1 --store file:///no/x FILES/exit.py",
            ".*: the directory /no does not exist",
        ),
    ],
)
def test_a_mistake_is_one_line(
    argv: str, message: str, idle_call: Call, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line shows the right form."""
    monkeypatch.syspath_prepend(files)
    code, out, err = idle_call(*(word.replace("FILES", str(files)) for word in shlex.split(argv)))
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", err)


def test_a_recipe_is_built_once_to_be_checked(
    idle_call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the data may take long, so several strategies share one task."""
    built: list[Setup] = []
    digits = RECIPES["digits"]

    def build(setup: Setup) -> Task:
        built.append(setup)
        return digits.build(setup)

    monkeypatch.setitem(RECIPES, "digits", replace(digits, build=build))
    argv = ("-s", "bsp", "-s", "local:period=8", "-s", "bsp --sampler all")
    code, _, err = idle_call("compare", "digits", *argv)
    assert (code, err) == (2, "error: sampler must be seldp, defdp or distributed, got 'all'\n")
    assert len(built) == 1


def test_shaped_links_are_refused_where_they_cannot_be(
    idle_call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--bandwidth without root is exit code 1 and one line that says what is missing."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, out, err = idle_call("compare", "digits", "--bandwidth", "200Mbit/s")
    assert (code, out) == (1, "")
    assert re.fullmatch(
        "error: no shaped links here: network namespaces need .*; simulate .* --simulate.*\n", err
    )


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_of_a_launcher_is_a_mistake(
    name: str, idle_call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process would otherwise train alone."""
    monkeypatch.setenv(name, "1")
    code, out, err = idle_call("compare", "digits")
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: {name} is set and (RANK|WORLD_SIZE) is not: set both, .*\n", err)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("compare digits --bandwidth 200Mbit/s", "--bandwidth .*"),
        ("compare digits -n 8", "--workers 8: the launcher has started 2, leave the option out"),
        ("compare digits -s bsp --simulate", ".* simulates all workers in one process: .*"),
    ],
)
def test_torchrun_has_its_own_workers_and_links(
    argv: str, message: str, idle_call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = idle_call(*argv.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", err)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (OffbeatError("worker 1 failed: out of luck"), 1, "error: worker 1 failed: out of luck"),
        (OSError(28, "No space left on device", "a/x"), 2, "error: a/x: No space left on device"),
        (OSError("no route to host"), 1, "error: no route to host"),
    ],
    ids=repr,
)
def test_the_error_of_a_run_is_one_line(
    error: Exception, code: int, text: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(runs.comparison, "run_and_record", fail)
    found, _, err = call("compare", "digits", "-n", "1")
    assert (found, plain(err)) == (code, f"{text}\n")
