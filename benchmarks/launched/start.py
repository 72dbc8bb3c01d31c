"""How long workers take to start: from the start of their processes to their fifth step.

The script attaches the default strategy to a small model and takes five steps. *Alone* is the time
from its first line to the fifth step on two workers; the rest is what the launcher adds.

- *restart*: one of two workers under ``offbeat run`` is killed.
- *second start*: both are killed, so that the warm fork server starts two workers.
- *second command*: a second ``offbeat run`` after the first one, which starts a server of its own.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Result
from benchmarks.launched.training import wait_until

_LIMIT_SECONDS = 120.0
_MOST_SECONDS = 1.5  # limit on what a start of two workers takes in addition to the script
SCRIPT = """
import time
began = time.time()
import json, os, sys, torch, offbeat
name = f"{os.environ['LOCAL_RANK']}-{os.environ['OFFBEAT_RESTARTS']}"
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = offbeat.attach(model, optimizer)
first = sync.step
while not os.path.exists("end"):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if sync.step == first + 5:
        with open(f"{name}.part", "w") as file:
            json.dump({"pid": os.getpid(), "began": began, "fifth": time.time()}, file)
        os.rename(f"{name}.part", f"{name}.json")
    time.sleep(0.005)
os._exit(0)
"""


@contextmanager
def launched(folder: Path) -> Iterator[None]:
    """Run the script on two workers in ``folder``, and end it with the context."""
    (folder / "train.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "offbeat.cli", "run", "--workers", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"OMP_NUM_THREADS": "1"}
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(_LIMIT_SECONDS)


def fifth_steps(folder: Path, restarts: int, workers: tuple[int, ...] = (0, 1)) -> list[Any]:
    """Wait until workers have taken five steps, and return what they have written."""
    paths = [folder / f"{worker}-{restarts}.json" for worker in workers]
    if not wait_until(lambda: all(path.exists() for path in paths), _LIMIT_SECONDS):
        raise RuntimeError((folder / "output").read_text()[-3000:])
    return [json.loads(path.read_text()) for path in paths]


def measure() -> dict[str, tuple[float, float]]:
    """Return the seconds of each start, in all and those of the script alone."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name:
        for start in ("first command", "second command"):
            folder = Path(name, start.partition(" ")[0])
            folder.mkdir()
            began = time.time()
            with launched(folder):
                found[start] = _seconds(began, states := fifth_steps(folder, 0))
                if start == "second command":
                    continue
                began = time.time()
                for one in states:
                    os.kill(one["pid"], signal.SIGKILL)
                found["second start"] = _seconds(began, states := fifth_steps(folder, 1))
                began = time.time()
                os.kill(states[1]["pid"], signal.SIGKILL)
                found["restart"] = _seconds(began, fifth_steps(folder, 2, (1,)))
    return found


def _seconds(began: float, states: list[Any]) -> tuple[float, float]:
    return (
        max(one["fifth"] for one in states) - began,
        max(one["fifth"] for one in states) - min(one["began"] for one in states),
    )


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark: the median of three, or one."""
    repetitions = [measure() for _ in range(1 if quick else 3)]
    found = []
    for start in repetitions[0]:
        added = sorted(one[start][0] - one[start][1] for one in repetitions)[len(repetitions) // 2]
        limit = _MOST_SECONDS if start in ("second start", "restart") else 10.0
        details = {"seconds": [one[start][0] for one in repetitions]}
        details |= {"alone_seconds": [one[start][1] for one in repetitions]}
        what = f"{start}: seconds in addition to the script"
        found.append(Result("start", what, added, limit, "s", {"workers": 2}, details))
    return found
