"""A run's checkpoints: what it needs to go on as if nothing had happened, events included."""

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from offbeat.checkpoint.save_load import load, save
from offbeat.errors import CheckpointError
from offbeat.lab.evaluation import EvaluationSchedule
from offbeat.lab.events import Chosen, Evaluation, Event, Left, Resumed, Turn, from_json, to_json
from offbeat.lab.job import Job
from offbeat.lab.leaving import Leaving
from offbeat.lab.methods.base import Attached, Method
from offbeat.lab.recipes import Task
from offbeat.synchronizer import Synchronizer

_FREE = {"checkpoints", "save_every", "resume", "log", "timeout_seconds", "evaluations", "data"}


class History:
    """Tells of a run, and keeps what a resumed run has to tell again.

    Args:
        emit: Called with each event.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self.kept: list[str] = []

    def __call__(self, event: Event) -> None:
        """Tell it."""
        if isinstance(event, Chosen | Evaluation | Turn):
            self.kept.append(to_json(event))
        self._emit(event)


class Checkpoints:
    """Of one worker's run.

    Args:
        job: What is run.
        task: What it trains.
        method: What trains it.
        history: What was told.
    """

    def __init__(self, job: Job, task: Task, method: Method, history: History) -> None:
        self._job, self._history = job, history
        self._sync = method.sync if isinstance(method, Attached) else None
        self._scheduler = task.scheduler if isinstance(task.scheduler, LRScheduler) else None

    def resume(self, looks: EvaluationSchedule) -> None:
        """Go on from the newest, if the job says so, and tell what was told before.

        Raises:
            CheckpointError: there is none, or it is that of another run.
        """
        if not self._job.resume or self._sync is None:
            return
        folder = Path(str(self._job.checkpoints))
        found = load(folder, self._sync, scheduler=self._scheduler)
        if found is None:
            raise CheckpointError(f"{folder} holds no checkpoint that --resume could go on from")
        self._require_same_run(found.extra["job"])
        self._history(Resumed(found.step))
        for line in found.extra["events"]:
            event = from_json(line)
            if isinstance(event, Chosen):
                looks.choose(event.evaluations)
            self._history(event)

    def _require_same_run(self, saved: dict[str, Any]) -> None:
        here = asdict(self._job)
        # Of a version that did not know a field it is as if it were not given.
        there = {one.name: one.default for one in fields(self._job)} | saved
        for name in here.keys() - _FREE:
            if here[name] != there[name]:
                raise CheckpointError(
                    f"the checkpoint is that of a run with {name}={there[name]!r}, this one "
                    f"has {name}={here[name]!r}: resume with the same options"
                )

    def step_taken(self, last: int) -> None:
        """Save, if it is time: every so often, or after the ``last`` step."""
        job, sync = self._job, self._sync
        if job.checkpoints is None or sync is None:
            return
        due = sync.step == last if job.save_every is None else sync.step % job.save_every == 0
        if due:
            self._save(sync)

    def leaves(self, leaving: Leaving | None, last: int) -> bool:
        """Whether the run is asked to end here, before its ``last`` step; all have saved then.

        A collective where it does.
        """
        sync = self._sync
        if leaving is None or sync is None:
            return False
        seconds = self._job.timeout_seconds
        if leaving.goes_on(sync.rank, sync.step, last=last, seconds=seconds):
            return False
        every = self._job.save_every
        if every is None or sync.step % every:
            self._save(sync)
        self._history(Left(sync.step, str(self._job.checkpoints)))
        leaving.saved(sync.rank, seconds)
        sync.detach()
        return True

    def _save(self, sync: Synchronizer) -> None:
        extra = {"job": asdict(self._job), "events": self._history.kept}
        save(str(self._job.checkpoints), sync, scheduler=self._scheduler, extra=extra)
