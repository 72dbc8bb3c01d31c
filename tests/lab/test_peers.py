"""Peers of other packages: values if they are installed, and one line of error if not."""

import importlib.util
import re
import warnings
from pathlib import Path

import pytest

import workers
from lab import tiny
from offbeat_lab.events import Evaluation, Event
from offbeat_lab.job import Job
from offbeat_lab.launch import processes
from offbeat_lab.methods.registry import PEERS
from offbeat_lab.train import Worker

H = 3
LOCAL = f"local:period={H}"
TEXTS = {
    "torchft": (
        LOCAL,
        f"torchft:localsgd,period={H}",
        f"torchft:diloco,period={H},outer_lr=1,outer_momentum=0",
        "torchft:diloco,period=4",
        "diloco:period=4,outer_lr=0.7,outer_momentum=0.9",
    ),
}


def train_all(rank: int, size: int, texts: tuple[str, ...]) -> list[list[float]]:
    """Return the curve of each method, run one after the other in one process."""
    tiny.install()
    warnings.simplefilter("ignore")  # theirs
    curves = []
    for text in texts:
        events: list[Event] = []
        job = Job("tiny", "bsp", size, evaluations=tiny.STEPS, timeout_seconds=20).under(text)
        Worker(job, events.append).run()
        curves.append([one.metric for one in events if isinstance(one, Evaluation)])
    return curves


@pytest.mark.parametrize("package", TEXTS)
def test_peers_have_the_values_of_strategies(package: str) -> None:
    """Local SGD equals ours, and DiLoCo equals ours with an outer step of 1 or with momentum."""
    pytest.importorskip(package)
    curves = workers.run(train_all, TEXTS[package], workers=2)[0]
    found = dict(zip(TEXTS[package], curves, strict=True))
    for text, curve in found.items():
        if "localsgd" in text or "outer_lr=1" in text:
            assert curve == pytest.approx(found[LOCAL], abs=1e-9), text
    if package == "torchft":
        ours = found["diloco:period=4,outer_lr=0.7,outer_momentum=0.9"]
        assert found["torchft:diloco,period=4"] == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize("kind", [one for one in PEERS if one.package != "torch"])
def test_a_missing_package_is_one_line(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to install the package, before anything runs."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == kind.package else find(name)
    )
    with pytest.raises(ImportError) as caught:
        Job("digits", f"{kind.name},period=4", 2).check_method()
    message = f"{kind.name} needs the package {kind.package}: pip install .*'offbeat\\[peers\\]'.*"
    assert re.fullmatch(message, str(caught.value))


def test_a_failed_worker_is_reported_by_its_error_line(tmp_path: Path) -> None:
    """A peer's threads may write further lines while the process ends."""
    text = "warning: a\nerror: rank 1 failed in batch 3\n[INFO] heartbeat failed\n"
    (tmp_path / "stderr1").write_text(text)
    (tmp_path / "stderr2").write_text("Segmentation fault\n")
    assert str(processes._failure([0, 1], tmp_path)) == "worker 1 failed: rank 1 failed in batch 3"
    assert str(processes._failure([0, 0, 1], tmp_path)) == "worker 2 failed: Segmentation fault"
