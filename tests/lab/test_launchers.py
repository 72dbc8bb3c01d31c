"""Examples of launchers that need nothing but this machine; `make launchers` tries the others."""

import re
import sys
from pathlib import Path

import pytest

from cli.commands import ended, started
from offbeat_lab.launch.cluster import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples" / "launchers"


@pytest.mark.nightly  # four processes import torch
@pytest.mark.skipif(Cluster.why_not() is not None, reason=f"{Cluster.why_not()}")
def test_torchrun_on_two_machines() -> None:
    """Two namespaces, a torchrun in each: one training, whose bytes have gone over the links."""
    code, out, err = ended(sys.executable, str(EXAMPLES / "torchrun" / "two_machines.py"))
    assert code == 0, err
    accuracy = re.findall(r"^rank \d: test accuracy (\S+), .* ([\d.]+) MB sent$", out, re.MULTILINE)
    assert len(accuracy) == 2
    assert accuracy[0] == accuracy[1]
    links = re.search(r"^over the links: ([\d.]+) MB and ([\d.]+) MB$", out, re.MULTILINE)
    assert links is not None
    payload = float(accuracy[0][1])
    assert all(payload < float(one) for one in links.groups())


@pytest.mark.nightly
def test_ray_restarts_an_actor() -> None:
    """The killed worker comes back, continues with the steps of the other, and has its model."""
    pytest.importorskip("ray")
    argv = str(EXAMPLES / "ray" / "elastic.py"), "--kill", "10", "--epochs", "12"
    # Ray would let its processes wait for all others of a busy machine.
    with started(sys.executable, *argv, RAY_worker_niceness="0") as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = re.findall(r"^worker (\d): steps (\d+) to \d+, accuracy (\S+)$", out, re.MULTILINE)
    assert [number for number, _, _ in found] == ["0", "1"], out
    assert found[0][1] == "0"
    assert int(found[1][1]) > 0
    assert found[0][2] == found[1][2]
