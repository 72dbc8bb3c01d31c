"""``offbeat train --elastic``: a lost worker comes back; all end with one model."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from cli.commands import COMMAND, LIMIT, started, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

# Every step takes at least 25 ms, so that the training outlasts the restart of a worker.
RECIPE = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from offbeat_lab import Task, accuracy, recipe, warmup_cosine

def loss(model, batch):
    time.sleep(0.025)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

@recipe(metric="accuracy", target=0.9, epochs=6)
def halves(setup):
    points = torch.randn(4000, 2)
    side = (points.sum(1) > 0).long()
    model = nn.Linear(2, 2)
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        dataset=TensorDataset(points[:3000], side[:3000]),
        batch_size=32,
        loss=loss,
        evaluate=accuracy(TensorDataset(points[3000:], side[3000:]), {"accuracy": 1}),
        scheduler=warmup_cosine,
    )
"""


@pytest.mark.nightly  # tests/launcher trains so, without the command train
def test_a_lost_worker_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halves.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    argv = ("train", "halves.py", "-n", "2", "-s", "local:period=8", "--elastic")
    told: list[str] = []
    with started(*COMMAND, *argv) as process:
        assert process.stderr is not None
        reader = threading.Thread(target=told.extend, args=(process.stderr,))
        reader.start()

        def found(pattern: str) -> list[str]:
            return re.findall(pattern, "".join(told))

        try:
            until(lambda: bool(found(r"worker 1 trains as rank [01]\n")), "the first steps")
            pid = found(r"worker 1 started \(process (\d+)\)")[0]
            os.kill(int(pid), signal.SIGKILL)
            assert process.stdout is not None
            out = process.stdout.read()
            code = process.wait(timeout=LIMIT)
        finally:
            process.kill()
            reader.join(LIMIT)
    assert code == 0, told
    assert found(r"worker 1 trains as rank 2\n"), told
    assert found(r"offbeat: the training has ended\n"), told
    results = re.findall(r"^\[(\d)\] accuracy (\S+) after (\d+) steps of this worker$", out, re.M)
    assert sorted(number for number, _, _ in results) == ["0", "1"], out
    assert results[0][1] == results[1][1], "the same model"
    assert float(results[0][1]) > 0.9
    # A worker that joins continues with the number of steps of the others.
    assert all(0 < int(steps) < 2 * 281 for _, _, steps in results), "both share the data"
