"""Runs on real processes whose scenario kills workers and starts new ones."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cells import nightly
from cli.commands import alive
from lab.test_cluster import needs_namespaces
from offbeat_lab.compare import run_and_record
from offbeat_lab.events import Event, Step
from offbeat_lab.job import LEASED, Job
from offbeat_lab.launch.processes import WorkerError
from offbeat_lab.launch.runners import Loopback, ShapedLinks
from offbeat_lab.scenario import Scenario, ScenarioEvent

WORKERS, EPOCHS, SAMPLES, BATCH = 3, 16, 96, 4
EVENTS = (
    ScenarioEvent(0.6, worker=1, alive=False),
    ScenarioEvent(0.8, worker=3, alive=True),
    ScenarioEvent(600.0, worker=4, alive=True),
)

RECIPE = f"""
import multiprocessing, os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from offbeat_lab import HeldOut, Task, recipe

def record(*values):
    if dist.is_initialized():  # not in the process that evaluates
        rank = multiprocessing.current_process().name
        with open(f"{{os.path.dirname(__file__)}}/{{rank}}", "a") as file:
            print(*values, file=file)

def loss(model, batch):
    time.sleep(0.02)
    record(*batch[0][:, 0].tolist())
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def scores(model, batch):
    return {{"error": (model(batch[0]) - batch[1]).square().mean(1)}}

@recipe(metric="error", target=0.0, epochs={EPOCHS}, higher_is_better=False)
def recorded(setup):
    record(os.getpid())
    data = torch.arange({SAMPLES}.0)[:, None]
    model = nn.Linear(1, 1)
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        dataset=TensorDataset(data, 2 * data),
        batch_size={BATCH},
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


def recorded(folder: Path) -> tuple[list[int], dict[int, list[float]]]:
    """Return the ids of the processes, and the samples that each one has used, by rank."""
    pids, used = list[int](), dict[int, list[float]]()
    for path in folder.glob("rank*"):
        lines = path.read_text().splitlines()
        if not lines:  # the process was killed after it had made the file
            continue
        first, *batches = lines
        pids.append(int(first))
        used[int(path.name.removeprefix("rank"))] = [float(s) for b in batches for s in b.split()]
    return pids, used


def run(job: Job, on_event: Callable[[Event], None] = lambda event: None) -> Any:
    """Run the job, and require that no process is left."""
    try:
        return run_and_record(job, on_event, Loopback())
    finally:
        pids, _ = recorded(Path(job.recipe).parent)
        assert len(pids) >= WORKERS
        assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("strategy", [*nightly(["streaming"]), "bsp"])
def test_no_sample_is_missing(strategy: str, job: Job, tmp_path: Path) -> None:
    """Only the dead worker's samples are used again. The new worker takes its share of the rest.

    The join at the end of EVENTS is not due when the training ends.
    """
    result = run(job.under(strategy))
    _, used = recorded(tmp_path)
    assert sorted(used) == [0, 1, 2, 3]
    counts = Counter(sample for own in used.values() for sample in own)
    assert len(counts) == SAMPLES
    assert min(counts.values()) == EPOCHS
    again = +Counter({sample: count - EPOCHS for sample, count in counts.items()})
    assert again <= Counter(used[1][-10 * BATCH :])
    assert [point.step for point in result.points] == [8 * (1 + i) for i in range(16)]
    steps = [stats.steps for stats in result.stats]
    for rank in (0, 2):
        assert steps[rank] == len(used[rank]) // BATCH
    assert steps[1] == pytest.approx(len(used[1]) // BATCH, abs=1)  # killed in its last step
    assert len(steps) == 4


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


@needs_namespaces
@pytest.mark.nightly  # four processes import torch
def test_workers_die_and_join_on_shaped_links(job: Job, tmp_path: Path) -> None:
    """A worker that comes back has the node that it had."""
    events = (EVENTS[0], ScenarioEvent(0.8, worker=1, alive=True))
    job = replace(job, epochs=60, scenario=str(Scenario(events)))
    with ShapedLinks(WORKERS, 1e8) as links:
        run_and_record(job, lambda event: None, links)
    _, used = recorded(tmp_path)
    assert used[3]
    counts = Counter(sample for own in used.values() for sample in own)
    assert min(counts.values()) == 60
