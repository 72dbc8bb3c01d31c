"""The evaluations of one run: when they take place, and what they evaluate.

An evaluation uses the mean of the workers' models at one step. The workers store snapshots during
the training and evaluate them afterwards.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from offbeat.extend import Replica
from offbeat_lab.evaluation import (
    Snapshot,
    average_over_workers,
    evaluate,
    evenly,
    gather,
    storable_evaluations,
)
from offbeat_lab.events import Event
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
        emit: Function that receives the evaluations.
        keep: Function that receives the snapshots. None: ``finish`` evaluates them.
    """

    def __init__(
        self,
        job: Job,
        task: Task,
        metric: str,
        device: torch.device,
        emit: Callable[[Event], None],
        keep: Callable[[Snapshot], object] | None = None,
    ) -> None:
        self._task, self._metric, self._device, self._emit = task, metric, device, emit
        self._replica = Replica(task.model, [p for p in task.model.parameters() if p.requires_grad])
        number = job.evaluations
        if number is None:
            # Snapshots of all workers share the memory of one process.
            shared = dist.get_backend() == "simulated" or keep is not None
            size = sum(tensor.nbytes for tensor in self._replica.everything())
            number = storable_evaluations(task.steps, size * (job.workers if shared else 1))
        self._steps = evenly(task.steps, number)
        self._snapshots: list[Snapshot] = []
        self._keep = keep or self._snapshots.append
        self._passed = task.position  # step up to which snapshots were stored; None: not known

    def after_step(self, method: Method) -> None:
        """Store a snapshot for each evaluation that has become due.

        ``finish`` evaluates the last step. If the workers lease their data, an evaluation is due
        when the position of the run has reached it, and several may be due after one step.
        """
        position = self._task.position_after(method.step)
        if self._passed is None:
            self._passed = position - 1
        last = min(position, self._task.steps - 1)
        for step in sorted(step for step in self._steps if self._passed < step <= last):
            self._keep(Snapshot(step, method.seconds, method.snapshot()))
        self._passed = position

    def keep_last(self, method: Method) -> None:
        """Pass the final model to ``keep``."""
        step = self._task.position_after(method.step)
        self._keep(Snapshot(step, method.seconds, self._replica.snapshot("cpu"), last=True))

    def finish(self, method: Method) -> None:
        """Evaluate snapshots and final model, and emit the evaluations. A collective.

        With ``job.max_seconds`` the workers may have taken different numbers of steps. The step of
        the final evaluation is the mean of these numbers, rounded. Snapshots that only some of the
        workers have are not evaluated.
        """
        device, replica = self._device, self._replica
        own = [(one.step, one.seconds) for one in self._snapshots]
        own.append((self._task.position_after(method.step), method.seconds))
        clocks = gather(own, device, "the training seconds of all workers")
        seconds = method.combine_seconds([clock[-1][1] for clock in clocks])
        final = replica.snapshot()
        taken = [int(clock[-1][0]) for clock in clocks]
        evaluate_at = partial(evaluate, self._task, self._metric, device=device)
        last = evaluate_at(round(statistics.mean(taken)), seconds)
        # Leased data: a slow worker passes the position up to two of its steps later. A mean model
        # of snapshots from different times has their mean time.
        combine = method.combine_seconds if self._task.position is None else statistics.mean
        ended = min(taken)  # a worker whose training ended early has no later snapshots
        for one in (one for one in self._snapshots if one.step < ended):
            average_over_workers(one.tensors, device)
            replica.restore(one.tensors)
            every = [dict(map(tuple, clock))[one.step] for clock in clocks]
            self._emit(evaluate_at(one.step, combine(every)))
        replica.restore(final)
        self._emit(last)
