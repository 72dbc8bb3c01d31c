"""A step in which nothing is launched or lands is cheap: few calls, whatever the model's size."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from loops import attach
from offbeat import Compute, Network, simulate
from offbeat.extend import GlobalModel, WorkerView

PACKAGE = Path(offbeat.__file__).parent
SIMULATOR = PACKAGE / "simulate", PACKAGE / "arguments.py"


@dataclass(frozen=True, kw_only=True, repr=False)
class Never(offbeat.Strategy):
    """Requests no round."""

    def averages(self) -> GlobalModel:
        return GlobalModel()

    def due(self, worker: WorkerView) -> bool:
        return False


def calls_of(function: Callable[[], object]) -> Counter[str]:
    """Return the Python calls inside Offbeat, without those of the simulator, by name."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE):
            return
        if not any(map(path.is_relative_to, SIMULATOR)):
            found[f"{path.stem}.{frame.f_code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


def loop(strategy: offbeat.Strategy, layers: int = 2) -> tuple[Any, Callable[[], None]]:
    """Return the synchronizer, and a function that takes a step."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = attach(model, optimizer, strategy)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    return sync, step


@pytest.mark.parametrize(
    ("strategy", "most"),
    [(offbeat.StreamingAveraging(), 25), (offbeat.LocalSGD(period=1000), 25), (Never(), 24)],
    ids=str,
)
@pytest.mark.parametrize("layers", [2, 20])
def test_an_idle_step_makes_few_calls(strategy: offbeat.Strategy, most: int, layers: int) -> None:
    sync, step = loop(strategy, layers)
    for _ in range(3):
        step()
    found = calls_of(step)
    assert found.total() <= most, found
    assert found["hooks.StepHooks._before"] == 1, "the calls are counted"
    sync.detach()


def idle_steps() -> list[Counter[str]]:
    """Return the calls of each step in which rank 0 has launched and landed nothing."""
    sync, step = loop(offbeat.StreamingAveraging())
    idle = []
    for number in range(40):
        before = dict(sync.stats.details)
        found = calls_of(step)
        after = sync.stats.details
        same = all(before[key] == after[key] for key in ("launches", "landings"))
        if number > 5 and same:
            idle.append(found)
    sync.detach()
    return idle if dist.get_rank() == 0 else []


def test_a_step_with_a_message_in_flight_makes_few_calls() -> None:
    """The link needs many steps for a message. A worker looks at it once at the end of each."""
    run = simulate(idle_steps, workers=2, network=Network("20kbit/s"), compute=Compute("1ms"))
    idle = run.results[0]
    assert len(idle) > 20
    assert max(found.total() for found in idle) <= 36, idle[0]
