"""Examples of launchers that need nothing but this machine; `make launchers` tries the others."""

import re
import sys
from pathlib import Path

import pytest

from cli.commands import ended
from offbeat.lab.launch.cluster import Cluster

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
