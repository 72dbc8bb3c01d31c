"""Runs on real processes whose scenario kills workers and starts new ones.

``cli/test_cli_scenario.py`` tests their results, ``data`` that no sample is missing.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from cli.commands import alive
from offbeat_lab.compare import run_and_record
from offbeat_lab.events import Event, Step
from offbeat_lab.job import LEASED, Job
from offbeat_lab.launch.processes import WorkerError
from offbeat_lab.launch.runners import Loopback
from offbeat_lab.scenario import Scenario, ScenarioEvent

WORKERS = 3
EVENTS = (
    ScenarioEvent(0.6, worker=1, alive=False),
    ScenarioEvent(0.8, worker=3, alive=True),
    ScenarioEvent(600.0, worker=4, alive=True),
)

# Each worker writes the id of its process to a file.
RECIPE = """
import multiprocessing, os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from offbeat_lab import HeldOut, Task, recipe

def loss(model, batch):
    time.sleep(0.02)
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def scores(model, batch):
    return {"error": (model(batch[0]) - batch[1]).square().mean(1)}

@recipe(metric="error", target=0.0, epochs=16, higher_is_better=False)
def recorded(setup):
    if dist.is_initialized():  # not in the process that evaluates
        folder = os.path.dirname(__file__)
        with open(f"{folder}/{multiprocessing.current_process().name}", "w") as file:
            file.write(str(os.getpid()))
    data = torch.arange(96.0)[:, None]
    model = nn.Linear(1, 1)
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        dataset=TensorDataset(data, 2 * data),
        batch_size=4,
        loss=loss,
        evaluate=HeldOut(TensorDataset(data, 2 * data), scores),
    )
"""

DIES = """
    if multiprocessing.current_process().name == "rank2":
        os.kill(os.getpid(), 9)
    time.sleep(0.02)
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "recorded.py").write_text(RECIPE)
    return Job(
        str(tmp_path / "recorded.py"),
        "streaming",
        WORKERS,
        partition=LEASED,
        evaluations=16,
        timeout_seconds=10.0,
        scenario=str(Scenario(EVENTS)),
    )


def run(job: Job, on_event: Callable[[Event], None] = lambda event: None) -> None:
    """Run the job, and require that no process is left."""
    try:
        run_and_record(job, on_event, Loopback())
    finally:
        texts = [path.read_text() for path in Path(job.recipe).parent.glob("rank*")]
        assert len(texts) >= WORKERS
        assert not [text for text in texts if text and alive(int(text))]


def test_another_death_fails(job: Job) -> None:
    """In one line, and although the scenario has a death of another worker."""
    path = Path(job.recipe)
    path.write_text(RECIPE.replace("time.sleep(0.02)", DIES))
    with pytest.raises(WorkerError, match=r"^worker 2 was ended by SIGKILL$"):
        run(job)


def test_ctrl_c_ends_all_workers(job: Job, tmp_path: Path) -> None:
    """Those that joined, too."""

    def interrupt(event: Event) -> None:
        if isinstance(event, Step) and (tmp_path / "rank3").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, interrupt)
