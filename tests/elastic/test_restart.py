"""The restart from a checkpoint, with the command and the program of the documentation."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pages import DOCS, code_on

PATH = "train.py"
WORKERS = 2
KILL = """
    if (sync.rank, step) == (1, 5) and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), 9)
"""
TOLD = """
told = [p.tolist() for p in model.parameters()]
last = found.step if found else 0
Path(f"end{sync.rank}").write_text(f"{last} {os.environ['TORCHELASTIC_RESTART_COUNT']} {told}")
os._exit(0)  # quickly
"""


def documented() -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of the command on the page."""
    page = (DOCS / "failures.md").read_text(encoding="utf-8")
    (line,) = (one for one in page.splitlines() if one.endswith(f"--max-restarts 3 {PATH}"))
    words = shlex.split(line)
    named = [word.partition("=") for word in words[: words.index("torchrun")]]
    return {name: value for name, _, value in named}, words[words.index("torchrun") + 1 :]


def results_of(folder: Path, program: str) -> list[list[str]]:
    """Run the program in an empty folder. Returns what its workers have written."""
    folder.mkdir()
    (folder / PATH).write_text(f"import os\nfrom pathlib import Path\n{program}{TOLD}")
    environment, arguments = documented()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1"),
            *arguments,
        ],
        cwd=folder,
        env={
            **os.environ,
            **environment,
            **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            "PYTHONPATH": os.pathsep.join(one for one in sys.path if one),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(folder / f"end{rank}").read_text().split(" ", 2) for rank in range(WORKERS)]


@pytest.mark.nightly  # eight processes import torch
@pytest.mark.timeout(240)
def test_torchrun_restarts_what_resumes(tmp_path: Path) -> None:
    """A worker is killed once. The training continues from the checkpoint, and ends as without."""
    program = code_on("failures", "offbeat.load(")
    assert program.count("    optimizer.step()\n") == program.count("\noffbeat.load(") == 1
    program = program.replace("\noffbeat.load(", "\nfound = offbeat.load(")
    seeded = "torch.manual_seed(dist.get_rank())\nmodel = torch.nn"
    program = program.replace("model = torch.nn", seeded, 1)
    killed = program.replace("    optimizer.step()\n", f"{KILL}    optimizer.step()\n")
    found = results_of(tmp_path / "killed", killed)
    assert (tmp_path / "killed" / "killed").exists()
    assert [one[:2] for one in found] == [["4", "1"]] * WORKERS
    undisturbed = results_of(tmp_path / "undisturbed", program)
    assert [one[:2] for one in undisturbed] == [["0", "0"]] * WORKERS
    for (*_, ours), (*_, theirs) in zip(found, undisturbed, strict=True):
        for one, other in zip(json.loads(ours), json.loads(theirs), strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
