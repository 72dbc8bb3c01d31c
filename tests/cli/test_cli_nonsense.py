"""Nonsense on the command line: one line and exit code 2, before anything runs or is written."""

import gzip
import re
import struct
from pathlib import Path

import pytest

from cli.commands import Call, plain
from offbeat.cli import checks

HUGE = "1" + 15 * "0"
NET = "plan --parameters 25M --step-time 1ms --bandwidth 1gbit"
LABELS = "-idx1-ubyte.gz must hold"


@pytest.fixture
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file, a folder, modules that fail, and data sets that do not fit."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "file").write_text("x")
    (folder / "dir").mkdir()
    (folder / "exit.py").write_text("raise SystemExit(3)\n")
    (folder / "binary.py").write_bytes(bytes(range(256)))
    (folder / "file_strategy.py").write_text("raise RuntimeError('of\\nits own')\n")
    (folder / "words").mkdir()
    (folder / "words" / "train.txt").write_text("a b c\n" * 50)
    (folder / "words" / "test.txt").write_text("a\n")
    write_mnist(folder / "counts", labels=70)
    write_mnist(folder / "sizes", side=27)
    write_mnist(folder / "labels", label=12)
    write_mnist(folder / "empty", images=0, labels=0)
    write_mnist(folder / "damaged")
    packed = folder / "damaged" / "train-images-idx3-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:10] + 20 * b"\xff" + packed.read_bytes()[30:])
    return folder


def write_mnist(
    folder: Path, images: int = 80, labels: int = 80, side: int = 28, label: int = 1
) -> None:
    """Four IDX files, gzipped; the two of each split alike."""
    folder.mkdir()
    for split in ("train", "t10k"):
        for name, shape, byte in (
            ("images-idx3", (images, side, 28), 7),
            ("labels-idx1", (labels,), label),
        ):
            head = b"\0\0\x08" + struct.pack(f">B{len(shape)}I", len(shape), *shape)
            body = bytes([byte]) * (images * side * 28 if len(shape) > 1 else labels)
            path = folder / f"{split}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(head + body))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        # where results go
        ("compare digits -s bsp -o FILES/file", "--output .*/file: it is a file; name a dir.*"),
        ("compare digits -s bsp -o FILES/file/x", "--output .*/file/x: .*/file is a file"),
        ("compare digits -s bsp --simulate -o FILES/file", "--output .*: it is a file; .*"),
        ("simulate digits --json FILES/dir", "--json .*/dir: it is a directory; name a file"),
        ("simulate digits --json FILES/file/x", "--json .*/file/x: .*/file is a file"),
        ("simulate digits --timeline FILES/dir", "--timeline .*/dir: it is a directory; .*"),
        ("simulate digits --timeline a.xyz", "--timeline a.xyz: its name must end in .png, .*"),
        ("simulate digits --timeline a.svg --json a.svg", "--timeline and --json are the same .*"),
        ("train digits --records FILES/dir", "--records .*/dir: it is a directory; name a file"),
        ("train digits --records FILES/file/x", "--records .*/file/x: .*/file is a file"),
        # numbers
        ("train digits --epochs 1e-300", "1e-300 epochs are less than one of 1,437 samples"),
        ("train digits --epochs 1e30", r"1e\+30 epochs are more than 1,000,000,000 steps"),
        ("train digits --epochs 1e308", r"epochs must be positive and finite, got 1e\+308"),
        (f"train digits -n {HUGE}", f"workers must be at most 1000, got {HUGE}"),
        (f"simulate digits -n {HUGE}", f"workers must be at most 1000, got {HUGE}"),
        (f"train digits --seed {HUGE}", f"seed must be at most 4000000, got {HUGE}"),
        (f"compare digits -s bsp --seeds {HUGE}", f"seeds must be at most 1000, got {HUGE}"),
        ("train digits --timeout 1e300", r"timeout must be .* finite, got 1e\+300"),
        ("train digits --timeout 1e-300", "timeout must be at least 0.001, got 1e-300"),
        ("train digits -s async:outer_lr=inf", "outer_lr must be positive and finite, got inf"),
        (f"train digits -s streaming:parts={HUGE}", f"parts must be at most 1024, got {HUGE}"),
        ("train digits -s async:outer_lr=1e300", r"outer_lr must be .* finite, got 1e\+300"),
        ("train digits --lr-scale 1e300", r"lr-scale must be .* finite, got 1e\+300"),
        ("train digits -s streaming:outer_gain=1e300", r"outer_gain must be .* got 1e\+300"),
        (f"train digits -s ssp:staleness={10**30}", "staleness must be an integer of 64 bits, .*"),
        ("train digits --partition dirichlet:nan", "partition 'dirichlet:nan': .*"),
        ("train digits --partition label:100", "partition 'label:100': .*"),
        ("train digits --injection nan,nan", "injection needs two numbers .*"),
        ("simulate digits --step-time 1e300s", "'1e300s' is not a duration; .*"),
        ("simulate digits --step-time 1e-300s", "'1e-300s' is not a duration; .*"),
        ("simulate digits --bandwidth 1e-300bit", "'1e-300bit' is not a bandwidth; .*"),
        ("simulate digits --bandwidth=", "'' is not a bandwidth; .*"),
        ("train digits --bandwidth 0.1bit/s", "links can be shaped to between .*, got 0.1 bit/s"),
        # things that do not go together
        ("compare digits -s bsp -s bsp", "'bsp' is given twice"),
        (
            "compare digits -s local:period=8 -s local:period=8,warmup_steps=0",
            "'local:period=8,warmup_steps=0' and 'local:period=8' are the same; leave one out, .*",
        ),
        ("compare digits -s bsp -s bsp:", "'bsp:' and 'bsp' are the same; .*"),
        ("compare digits -s bsp --step-time 1ms", "--step-time is for simulated workers; .*"),
        ("compare digits -s bsp --jitter -1", "jitter must be finite and at least 0, got -1.0"),
        (
            "compare digits -s bsp --simulate --turns",
            "--turns: speeds do not vary in virtual time, leave it out",
        ),
        ("compare digits -s bsp --slow 9=2", "slow 9=2: ranks are 0 to 3"),
        ("compare digits -s bsp --slow 1", "slow must be RANK=FACTOR, as in 1=2, got '1'"),
        ("compare digits -s bsp --slow 1=0.5", "slow 1=0.5: the factor must be at least 1 .*"),
        ("compare digits -s bsp --lr-scale 1,x", "lr-scale must be a number, or several as .*"),
        ("compare digits -s bsp --lr-scale 1,3,1", "lr-scale 1,3,1: a factor is given twice"),
        ("compare digits -s bsp --max-steps 0", "max_steps must be at least 1, got 0"),
        ("train digits --max-seconds 0", "max_seconds must be positive and finite, got 0.0"),
        ("report .", r"\. is a directory; name its results\.jsonl"),
        ("compare digits -s bsp --latency 1ms", "--latency is for simulated workers; .*"),
        ("train digits --data /nope", "data /nope: the digits recipe brings its own data"),
        ("train digits -s local:period=8,,", ".*'' is not of the form setting=value"),
        # files
        ("train FILES/exit.py", ".*exit.py, line 1: it cannot be run: SystemExit: 3"),
        ("train FILES/binary.py", ".*binary.py.*: it cannot be run: .*"),
        ("train digits -s file_strategy:A", "importing .* failed: RuntimeError: of its own"),
        ("train mnist --data FILES/counts", f".*/counts/train-labels{LABELS} .*80 labels.* 70"),
        ("train mnist --data FILES/sizes", ".*/sizes/train-images-.* 28 x 28.* 80 x 27 x 28"),
        ("train mnist --data FILES/labels", f".*/labels/train-labels{LABELS} .*, but one is 12"),
        ("train mnist --data FILES/empty", ".*/empty/train-images-.* 28 x 28, .* 0 x 28 x 28"),
        ("train mnist --data FILES/damaged", ".*/damaged/train-images-.* is not a gzip file: .*"),
        (
            "train wikitext:transformer --data FILES/words",
            ".*/words/test.txt: a text must have more than 35 words, got 2",
        ),
        # plan and probe
        (f"{NET} -n {HUGE}", f"workers must be at most 10,000, got {HUGE}"),
        (f"{NET} --parameters 1e300", "'1e300' is not a count; .*"),
        (f"{NET} --parameters=", "'' is not a count; .*"),
        (f"{NET} --step-time=", "'' is not a duration; .*"),
        (f"{NET} --bandwidth=", "'' is not a bandwidth; .*"),
        (f"{NET} --bandwidth 1e-300bit", "'1e-300bit' is not a bandwidth; .*"),
        (f"{NET} -s bsp -s bsp", "'bsp' is given twice"),
        (f"{NET} --data x", "--data is that of a recipe: .*"),
        ("probe --seconds nan", "seconds must be positive and finite, got nan"),
    ],
)
def test_nonsense_is_one_line(
    argv: str, message: str, idle_call: Call, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(files)
    told = [one.replace("FILES", str(files)) for one in argv.split()]
    code, out, err = idle_call(*told)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", err)


def test_the_same_strategy_over_two_wires_is_two(
    idle_call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the wire that it would take anyway it is the same; over another one it is not."""
    code, _, err = idle_call("compare", "digits", "-s", "bsp", "-s", "bsp --wire float32")
    assert (code, "are the same" in err) == (2, True)
    two = ("-s", "bsp --wire int8", "-s", "bsp")
    code, _, err = idle_call("compare", "digits", *two, "-s", "bsp --lr-scale=0")
    assert (code, err) == (2, "error: lr-scale must be positive and finite, got 0.0\n")


def test_files_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights are asked of the file, or of the nearest folder that exists. Root may everything."""
    locked = tmp_path / "locked"
    asked = []

    def access(path: Path, mode: int) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr(checks.os, "access", access)
    for check in (checks.require_file, checks.require_folder):
        with pytest.raises(ValueError, match=f"--x {locked}/a/b: {tmp_path} is not writable"):
            check("--x", locked / "a" / "b")
    assert asked == [tmp_path, tmp_path]


def test_a_failing_disk_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says, with the path: exit code 2; without one, of a failed run: 1."""
    for error, code in (
        (OSError(28, "No space left on device", "runs/x"), 2),
        (OSError("no route to host"), 1),
    ):

        def fail(*args: object, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr("offbeat.cli.runs.comparison.run_and_record", fail)
        got, _, err = call("train", "digits", "-n", "1")
        shown = "runs/x: No space left on device" if code == 2 else "no route to host"
        assert (got, plain(err)) == (code, f"error: {shown}\n")
