"""A worker under ``offbeat run`` that gets SIGTERM leaves without a lost or repeated sample."""

import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.launched.training import Training, wait_until

from cells import some

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

SAMPLES, EPOCHS, LIMIT = 800, 2, 60.0


@pytest.mark.parametrize("strategy", some(["streaming", "local:period=8", "bsp"], 0))
def test_every_sample_is_used_once(strategy: str, tmp_path: Path) -> None:
    """Worker 1 of three gets SIGTERM in the middle of a chunk, and is started again."""
    settings = {
        **{"epochs": EPOCHS, "samples": SAMPLES, "batch": 4, "strategy": strategy},
        **{"step_seconds": 0.03, "timeout_seconds": 30, "save_every": 0, "last_save": 0},
    }
    training = Training(tmp_path / "training", settings, (3,))
    launcher = training.launchers[0]
    try:
        assert wait_until(training.is_whole, LIMIT), training.output()
        (victim,) = (each for each in training.trains() if each.slot == "0:1")
        victim.send(signal.SIGTERM)
        assert wait_until(lambda: not victim.lives(), 10), training.output()
        assert wait_until(lambda: launcher.poll() is not None, LIMIT), training.output()
        output, processes = training.output(), training.processes()
    finally:
        training.close()
    assert launcher.returncode == 0, output
    assert re.findall(r"worker (\d) was ended by SIGTERM; again", output) == ["1"]
    uses = Counter((step["epoch"], s) for p in processes for step in p.steps for s in step["batch"])
    every = ((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES))
    assert uses == Counter(every), output
    ends = [event for p in processes for event in p.events if event["event"] == "ended"]
    assert [end["missing"] for end in ends] == [0, 0, 0], "the model has all samples"
    assert max(step["repeated"] for p in processes for step in p.steps) == 0
