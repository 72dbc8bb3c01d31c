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
STEPS, PERIOD, WORKERS = 8, 2, 2
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


def reference() -> list[list[float]]:
    """Local SGD of the page's problem, step by step, from rank 0's model."""
    torch.manual_seed(0)
    weights = [torch.nn.Linear(4, 1).state_dict()] * WORKERS
    models = [torch.nn.Linear(4, 1) for _ in range(WORKERS)]
    for model, own in zip(models, weights, strict=True):
        model.load_state_dict(own)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1000 * rank + step))
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        if (step + 1) % PERIOD == 0:
            with torch.no_grad():
                for parts in zip(*(m.parameters() for m in models), strict=True):
                    mean = sum(parts) / WORKERS
                    for part in parts:
                        part.copy_(mean)
    return [p.flatten().tolist() for p in models[0].parameters()]


def documented() -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of the command on the page."""
    page = (DOCS / "failures.md").read_text(encoding="utf-8")
    (line,) = (one for one in page.splitlines() if one.endswith(f"--max-restarts 3 {PATH}"))
    words = shlex.split(line)
    named = [word.partition("=") for word in words[: words.index("torchrun")]]
    return {name: value for name, _, value in named}, words[words.index("torchrun") + 1 :]


@pytest.mark.nightly  # five processes import torch one after the other
def test_torchrun_restarts_what_resumes(tmp_path: Path) -> None:
    """A worker that is killed once: the run goes on from the checkpoint, and ends as without."""
    program = code_on("failures", "offbeat.load(")
    assert program.count("    optimizer.step()\n") == program.count("\noffbeat.load(") == 1
    program = program.replace("\noffbeat.load(", "\nfound = offbeat.load(")
    program = program.replace("    optimizer.step()\n", f"{KILL}    optimizer.step()\n")
    seeded = "torch.manual_seed(dist.get_rank())\nmodel = torch.nn"
    program = program.replace("model = torch.nn", seeded, 1)
    (tmp_path / PATH).write_text(f"import os\nfrom pathlib import Path\n{program}{TOLD}")
    environment, arguments = documented()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1"),
            *arguments,
        ],
        cwd=tmp_path,
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
    assert (tmp_path / "killed").exists()
    for rank in range(WORKERS):
        last, restarts, told = (tmp_path / f"end{rank}").read_text().split(" ", 2)
        assert (last, restarts) == ("4", "1")
        found = [torch.tensor(p).flatten() for p in json.loads(told)]
        for ours, theirs in zip(found, reference(), strict=True):
            torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-5, atol=1e-6)
