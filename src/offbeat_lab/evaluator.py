"""The evaluations of one run: when they take place, and what they evaluate.

An evaluation uses the mean of the workers' models at one step. The workers store snapshots during
the training and evaluate them afterwards. With ``Job.live`` they evaluate during the training, in a
*consensus*, which replaces the local models by their mean for that time.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from offbeat.extend import Replica
from offbeat_lab.evaluation import (
    MAX_EVALUATIONS,
    Snapshot,
    affordable_evaluations,
    average_over_workers,
    evaluate_together,
    evaluation_of,
    evenly,
    gather,
    storable_evaluations,
)
from offbeat_lab.events import Evaluation, EvaluationCount, Event, Waiting
from offbeat_lab.job import Job
from offbeat_lab.methods.base import Method
from offbeat_lab.recipes import Task


class Evaluator:
    """Evaluates the task of one worker.

    Args:
        job: Configuration of the run.
        task: The task, on its device.
        metric: The metric that is compared with the recipe's target.
        device: A device whose tensors the communication backend can send.
        emit: Function that receives the events, except evaluations returned by ``after_step``.
        number: Number of evaluations. None: the run chooses it.
        keep: Function that receives the snapshots. None: ``finish`` evaluates them.
    """

    def __init__(
        self,
        job: Job,
        task: Task,
        metric: str,
        device: torch.device,
        emit: Callable[[Event], None],
        number: int | None,
        keep: Callable[[Snapshot], object] | None = None,
    ) -> None:
        self._job, self._task, self._metric = job, task, metric
        self._device, self._emit = device, emit
        self._replica = Replica(task.model, [p for p in task.model.parameters() if p.requires_grad])
        self._simulated = dist.get_backend() == "simulated"
        # Number of workers whose snapshots share the memory of one process, or a disk.
        self._sharing = job.workers if self._simulated or keep is not None else 1
        self._chosen, self._most = number is not None, number or self._most_evaluations()
        self._steps = evenly(task.steps, self._most)
        self._snapshots: list[Snapshot] = []
        self._keep = keep or self._snapshots.append
        self._passed = task.position  # step up to which evaluations were made; None: not known

    def _most_evaluations(self) -> int:
        """Return the largest number of evaluations from which the run may choose."""
        if self._job.live:
            return min(MAX_EVALUATIONS, self._task.steps)
        snapshot_bytes = sum(tensor.nbytes for tensor in self._replica.everything())
        return storable_evaluations(self._task.steps, snapshot_bytes * self._sharing)

    def after_step(self, method: Method) -> Evaluation | None:
        """If an evaluation is due at this step, evaluate (``job.live``) or store a snapshot.

        A collective only if ``job.live``. ``finish`` evaluates the last step. If the workers lease
        their data, an evaluation is due when the position of the run has reached it, and several
        may be due. All but the last one are then emitted here.
        """
        position = self._task.position_after(method.step)
        if self._passed is None:
            self._passed = position - 1
        evaluation = None
        while (due := self._next_due(position)) is not None:
            if evaluation is not None:
                self._emit(evaluation)
            evaluation, self._passed = self._evaluate_at(due, method), due
        self._passed = position
        return evaluation

    def data_ended(self, method: Method) -> None:
        """Make the evaluations that are left when this worker has found no further batch.

        All workers must make the same evaluations, and this worker may have taken its last batch
        before the others.
        """
        if (evaluation := self.after_step(method)) is not None:
            self._emit(evaluation)

    def _next_due(self, position: int) -> int | None:
        """Return the first step up to ``position`` that is to be evaluated now."""
        assert self._passed is not None
        last = min(position, self._task.steps - 1)
        return min((step for step in self._steps if self._passed < step <= last), default=None)

    def _evaluate_at(self, step: int, method: Method) -> Evaluation | None:
        if self._job.live:
            return self._evaluate_live(step, method)
        self._keep(Snapshot(step, method.seconds, method.snapshot()))
        return None

    def keep_last(self, method: Method) -> None:
        """Pass the final model to ``keep``."""
        step = self._task.position_after(method.step)
        self._keep(Snapshot(step, method.seconds, self._replica.snapshot("cpu"), last=True))

    def _evaluate_live(self, step: int, method: Method) -> Evaluation:
        steps = self._task.steps
        self._emit(Waiting("evaluating"))
        start = time.perf_counter()
        with method.consensus():
            every = gather(method.seconds, self._device, "the training seconds of all workers")
            seconds = method.combine_seconds(every)
            evaluation = self._evaluate(step, seconds)
            if not self._chosen:
                whole = seconds / step * steps
                self._steps = evenly(steps, self._choose(time.perf_counter() - start, whole))
        return evaluation

    def finish(self, method: Method) -> None:
        """Evaluate snapshots and final model, and emit the evaluations. A collective.

        With ``job.max_seconds`` the workers may have taken different numbers of steps. The step of
        the final evaluation is the mean of these numbers, rounded. Snapshots that only some of the
        workers have are not evaluated.

        If the job does not set the number of evaluations, a run on real processes evaluates only as
        many snapshots as it can afford.
        """
        device, replica = self._device, self._replica
        own = [(one.step, one.seconds) for one in self._snapshots]
        own.append((self._task.position_after(method.step), method.seconds))
        clocks = gather(own, device, "the training seconds of all workers")
        seconds = method.combine_seconds([clock[-1][1] for clock in clocks])
        start = time.perf_counter()
        final = replica.snapshot()
        taken = [int(clock[-1][0]) for clock in clocks]
        last = self._evaluate(round(statistics.mean(taken)), seconds)
        # A worker whose training ended early has no later snapshots.
        ended = min(taken)
        snapshots = [one for one in self._snapshots if one.step < ended]
        if snapshots and not self._chosen and not self._simulated:  # virtual time is free
            average_over_workers(replica.snapshot("cpu"), device)  # only to measure its duration
            steps = evenly(self._task.steps, self._choose(time.perf_counter() - start, seconds))
            snapshots = [one for one in snapshots if one.step in steps]
        # Leased data: a slow worker passes the position up to two of its steps later. A mean model
        # of snapshots from different times has their mean time.
        combine = method.combine_seconds if self._task.position is None else statistics.mean
        for one in snapshots:
            average_over_workers(one.tensors, device)
            replica.restore(one.tensors)
            every = [dict(map(tuple, clock))[one.step] for clock in clocks]
            self._emit(self._evaluate(one.step, combine(every)))
        replica.restore(final)
        self._emit(last)

    def _evaluate(self, step: int, seconds: float) -> Evaluation:
        """Evaluate the model, which is the same on all workers. A collective."""
        metrics = evaluate_together(self._task.evaluate, self._task.model, self._device)
        return evaluation_of(self._task.model, metrics, self._metric, step, seconds)

    def _choose(self, evaluation_seconds: float, training_seconds: float) -> int:
        """Return the number of evaluations that rank 0 finds affordable. A collective."""
        number = affordable_evaluations(evaluation_seconds, training_seconds, self._most)
        number = int(gather(number, self._device, "the number of evaluations")[0])
        self._chosen = True
        self._emit(EvaluationCount(number, evaluation_seconds))
        return number
