"""A training under ``offbeat run`` loses a worker, which comes back; all end with one model."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.commands import COMMAND, LIMIT, started, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

# Trains until the step in the file "end". Writes its state when it has trained three steps.
TRAIN = """
import json, os, time
import torch
import torch.distributed as dist
import offbeat

def write(name, **state):
    with open(f"{name}.part", "w") as file:
        json.dump(state, file)
    os.replace(f"{name}.part", name)

def last():
    if os.path.exists("end"):
        with open("end") as file:
            return int(file.read())
    return 1 << 40

dist.init_process_group("gloo")  # as in a script for torchrun
name = f"{os.environ['LOCAL_RANK']}-{os.environ['OFFBEAT_RESTARTS']}"
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sync = offbeat.attach(model, optimizer, offbeat.LocalSGD(period=4))
first = sync.step
while sync.step < last():
    x = torch.randn(16, 4)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if sync.step == first + 3:
        write(f"{name}.trains", pid=os.getpid(), time=time.time(), step=sync.step)
    time.sleep(0.005)
sync.finish()
write(f"{name}.ended", model=model.weight.tolist(), size=sync.size, rank=dist.get_rank())
"""
MARGIN = 400  # steps in which every worker looks into the file "end"


def state(name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    path = Path(name)

    def there() -> bool:
        assert path.exists() or process.poll() is None, process.communicate()
        return path.exists()

    until(there, name)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_lost_worker_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others continue meanwhile. The launcher knows that the training has ended."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    with started(*COMMAND, "run", "-n", "2", "train.py") as process:
        first = [state(f"{rank}-0.trains", process) for rank in range(2)]
        os.kill(first[1]["pid"], signal.SIGKILL)
        again = state("1-1.trains", process)
        assert again["step"] > first[1]["step"], "it begins where the others are"
        (tmp_path / "end.part").write_text(str(again["step"] + MARGIN))
        os.replace("end.part", "end")
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert "offbeat: worker 1 was ended by SIGKILL; again in 0.1 s (1 of 3)\n" in err
    assert "offbeat: worker 1 trains with identity 2\n" in err
    assert "offbeat: worker 1 finished the training\n" in err
    assert "offbeat: worker 1 ended\n" in err
    ends = [json.loads(Path(f"{name}.ended").read_text()) for name in ("0-0", "1-1")]
    assert ends[0] == ends[1], "the same model"
    assert (ends[0]["size"], ends[0]["rank"]) == (2, 0)
    # gloo of torch 2.9 reports its connections on standard output
    assert [line for line in out.splitlines() if "[Gloo] Rank" not in line] == []
