"""Checkpoints of a run.

An *event* reports the progress of a run, for example an evaluation. A checkpoint contains the
evaluations of the run so far. A resumed run emits them again and then continues from the
checkpoint.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from offbeat.checkpoint.save_load import load, save
from offbeat.errors import CheckpointError
from offbeat.synchronizer import Synchronizer
from offbeat_lab.events import (
    Evaluation,
    EvaluationCount,
    Event,
    Resumed,
    from_json,
    to_json,
)
from offbeat_lab.job import Job
from offbeat_lab.methods.base import Attached, Method
from offbeat_lab.recipes import Task

_MAY_DIFFER = {
    *("checkpoints", "save_every", "resume", "log", "data"),
    *("timeout_seconds", "max_seconds", "evaluations"),
}
"""Fields of a job that a resumed run may change."""


class EventLog:
    """Passes each event of a run to ``emit``, and stores those that a resumed run emits again.

    Attributes:
        lines: Stored events, as JSON: evaluations and their chosen number.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self.lines: list[str] = []

    def __call__(self, event: Event) -> None:
        """Pass on an event, and store it if a resumed run must emit it again."""
        if isinstance(event, EvaluationCount | Evaluation):
            self.lines.append(to_json(event))
        self._emit(event)


class RunCheckpoints:
    """Saves and loads the checkpoints of one worker's run.

    Each checkpoint also contains ``job`` and the events stored in ``log``. The class does nothing
    if ``method`` has no ``Synchronizer``, for example torch's DDP.
    """

    def __init__(self, job: Job, task: Task, method: Method, log: EventLog) -> None:
        self._job, self._log = job, log
        self._sync = method.sync if isinstance(method, Attached) else None
        self._scheduler = task.scheduler if isinstance(task.scheduler, LRScheduler) else None

    def resume(self) -> int | None:
        """If ``job.resume``, load the newest checkpoint and emit its events. A collective.

        Returns:
            The number of evaluations that the saved run chose. None if it has not chosen one, or
            if ``job.evaluations`` replaces it.

        Raises:
            CheckpointError: there is no checkpoint, or it belongs to a run whose options differ in
                a field outside ``_MAY_DIFFER``.
        """
        if not self._job.resume or self._sync is None:
            return None
        folder = Path(str(self._job.checkpoints))
        loaded = load(folder, self._sync, scheduler=self._scheduler)
        if loaded is None:
            raise CheckpointError(f"{folder} holds no checkpoint that --resume could continue from")
        if not isinstance(loaded.extra, dict) or not loaded.extra.get("job"):
            raise CheckpointError(f"{loaded.path} was not saved by offbeat train")
        self._require_same_run(loaded.extra["job"])
        self._log(Resumed(loaded.step))
        chosen = None
        for event in map(from_json, loaded.extra["events"]):
            if isinstance(event, EvaluationCount):
                if self._job.evaluations is not None:
                    continue  # --evaluations replaces the number
                chosen = event.evaluations
            self._log(event)
        return chosen

    def _require_same_run(self, saved: dict[str, Any]) -> None:
        current = asdict(self._job)
        for name in current.keys() - _MAY_DIFFER:
            value = saved.get(name, getattr(Job, name, None))  # an older version lacks new fields
            if current[name] != value:
                raise CheckpointError(
                    f"the checkpoint is that of a run with {name}={value!r}, this one "
                    f"has {name}={current[name]!r}: resume with the same options"
                )

    def save_if_due(self, last: int) -> None:
        """Save a checkpoint if one is due after this step. A collective if one is due.

        If ``job.checkpoints`` is set, one is due every ``job.save_every`` steps or, if that is
        None, only after step ``last``, the last one of the run.
        """
        job, sync = self._job, self._sync
        if job.checkpoints is None or sync is None:
            return
        due = sync.step == last if job.save_every is None else sync.step % job.save_every == 0
        if due:
            self._save(sync)

    def _save(self, sync: Synchronizer) -> None:
        extra = {"job": asdict(self._job), "events": self._log.lines}
        save(str(self._job.checkpoints), sync, scheduler=self._scheduler, extra=extra)
