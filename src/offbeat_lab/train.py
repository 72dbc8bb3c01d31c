"""The training loop of an experiment: one worker trains a recipe with a method and emits events.

A *recipe* builds the task: model, data, optimizer. A *method* is a strategy of this package or a
baseline to compare with.
"""

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from offbeat import BSP, Compute, EndedError, Strategy, Synchronizer, attach
from offbeat_lab.evaluation import Snapshot, gather
from offbeat_lab.evaluator import Evaluator
from offbeat_lab.events import (
    End,
    Event,
    Start,
    Step,
    Waiting,
    stats_of,
)
from offbeat_lab.injection import Injection, injected_batch_size
from offbeat_lab.job import LEASED, Job
from offbeat_lab.leased import leased_batches
from offbeat_lab.methods.base import Attached, Elastic, Method, Reference
from offbeat_lab.methods.ideal import SharedIdeal
from offbeat_lab.methods.registry import is_ideal, parse_method
from offbeat_lab.recipes import find_recipe
from offbeat_lab.recipes.datasets import to_device
from offbeat_lab.samplers import Batches, parse_injection
from offbeat_lab.scenario import Scenario, value_at
from offbeat_lab.timing.padding import STRAGGLERS_NEED_STEP_TIME, PaddedLoss, parse_slow
from offbeat_lab.timing.time_limit import TimeLimit


def choose_backend() -> str:
    """Return the backend to pass to ``init_process_group`` before creating a ``Worker``.

    ``"nccl"`` if torch supports NCCL and this machine has a GPU for each of its workers
    (``LOCAL_WORLD_SIZE``, by default 1); otherwise ``"gloo"``, and the workers train on the
    CPU. All machines of a run must use the same backend.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local
    return "nccl" if enough and dist.is_nccl_available() else "gloo"


def worker_device() -> torch.device:
    """Return the device of this worker: with NCCL the GPU of its local rank, otherwise the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", dist.get_node_local_rank())
    return torch.device("cpu")


class Worker:
    """One worker of a run, in an existing process group.

    Rank 0 emits these events:

    - ``Start``, a ``Step`` for each step, every ``Evaluation`` in the order of the steps, ``End``;
    - ``Waiting`` before longer work other than training, such as an evaluation.

    Args:
        job: Configuration of the run.
        emit: Function that receives the events on rank 0. Other ranks do not call it.
        rank: Number of this process, for its seed and its step times. None: its rank.
        keep: Function that receives this worker's snapshots, the last one at the end. The run then
            has no evaluations and no ``End``, and its workers may die and join. None: the workers
            evaluate together.
        count: Function that receives this worker's totals after each step and at the end.
        ideal_steps: Steps of ``SharedIdeal``, with which this worker, the only one, trains. None:
            train with the job's method.
    """

    def __init__(
        self,
        job: Job,
        emit: Callable[[Event], None],
        *,
        rank: int | None = None,
        keep: Callable[[Snapshot], object] | None = None,
        count: Callable[[dict[str, Any]], object] | None = None,
        ideal_steps: Iterator[tuple[float, int]] | None = None,
    ) -> None:
        self._rank = dist.get_rank() if rank is None else rank
        self._keep, self._count, self._ideal_steps = keep, count, ideal_steps
        self._method: Method | None = None
        self._send = emit
        self._job, self._device = job, worker_device()
        # With the reference ideal, several workers have equal shares.
        self._leases = job.partition == LEASED and not (
            is_ideal(job.strategy) and ideal_steps is None
        )
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._recipe = find_recipe(job.recipe)
        self._emit(Waiting("loading the data"))
        self._task = self._recipe.build(job.setup())
        self._task.lr_scale = job.lr_scale
        if job.max_steps is not None:  # the learning-rate schedule still covers all steps
            self._task.steps = min(self._task.steps, job.max_steps)
        self._task.model.to(self._device)
        self._padding: PaddedLoss | None = None
        self._injection: Injection | None = None
        self._read_loss_at = 0.0

    def _emit(self, event: Event) -> None:
        """Emit an event on rank 0. If that worker dies, another one gets this rank."""
        if isinstance(self._method, Elastic):
            rank = self._method.sync.rank
        else:
            rank = dist.get_rank() if self._keep is None else self._rank
        if rank == 0:
            self._send(event)

    def run(self) -> None:
        """Train and evaluate. A collective."""
        try:
            self._run()
        except EndedError:
            if self._keep is None or self._method is not None:
                raise  # otherwise this worker was to join when the others had finished

    def _run(self) -> None:
        job, task, emit = self._job, self._task, self._emit
        emit(Waiting("connecting to the other workers"))
        self._control_step_times()
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(job.seed * 1000 + self._rank)  # ranks draw different augmentation and dropout
        if self._leases:
            task.position = 0
        method = self._method = self._start_method()
        emit(Start(task.steps, sum(p.nbytes for p in task.model.parameters())))
        evaluator = Evaluator(job, task, self._recipe.metric, self._device, emit, self._keep)
        limit = self._time_limit(method)
        for batch in self._batches(method):
            method.train(batch)
            evaluator.after_step(method)
            emit(self._step(method))
            if self._count is not None:
                self._count(self._totals(method))
            if limit.is_over(method.step, method.seconds):
                break
        else:
            # All workers must store the same snapshots. With leased data, this worker may have
            # taken its last batch before the others.
            evaluator.after_step(method)
        emit(Waiting("finishing"))
        method.finish()
        if self._count is not None:
            self._count(self._totals(method))
        if self._keep is not None:
            return evaluator.keep_last(method)
        totals = gather(self._totals(method), self._device, "the totals of all workers")
        emit(Waiting("evaluating"))
        evaluator.finish(method)
        emit(End(tuple(map(stats_of, totals)), method.step_seconds))

    def _step(self, method: Method) -> Step:
        """Return the event of the step that the method has taken.

        Reading the loss may wait for a GPU, so it is read once per second.
        """
        stats, loss = method.stats, None
        if method.loss is not None and time.monotonic() >= self._read_loss_at:
            loss = float(method.loss)
            self._read_loss_at = time.monotonic() + 1
        position = self._task.position_after(method.step)
        return Step(position, method.seconds, stats.wait_seconds, stats.payload_bytes, loss)

    def _start_method(self) -> Method:
        """Attach the job's strategy, or start its reference."""
        job, task = self._job, self._task
        corrects = None if job.adam_correction is None else job.adam_correction == "on"

        def attach_strategy(strategy: Strategy) -> Synchronizer:
            return attach(
                task.model,
                task.optimizer,
                strategy,
                node_group="auto" if job.workers_per_node > 1 else None,
                wire=job.wire,
                adam_correction=corrects,
                log=job.log,
                non_finite="warn",  # a run that diverges is a result, and tuning continues after it
                timeout_seconds=job.timeout_seconds,
                min_workers=None if self._keep is None else 1,
            )

        if self._ideal_steps is not None:
            sync = attach_strategy(BSP())
            return SharedIdeal(task, sync, workers=job.workers, steps=self._ideal_steps)
        chosen = parse_method(job.strategy)
        if isinstance(chosen, Reference):
            return chosen.start(task, attach_strategy, self._batches)
        sync = attach_strategy(chosen)
        if isinstance(task.scheduler, LRScheduler):
            sync.share_state(task.scheduler.state_dict, task.load_scheduler)
        if self._keep is not None:
            if self._padding is not None:
                sync.share_state(self._padding.state, self._padding.load)
            return Elastic(task, sync)
        return Attached(task, sync)

    def _control_step_times(self) -> None:
        """If ``job`` controls the step times, let ``task.loss`` sleep on real workers."""
        job, task = self._job, self._task
        if dist.get_backend() == "simulated":  # the simulator controls the virtual time of a step
            return
        if job.step_seconds is None:
            changes = Scenario.from_json(job.scenario).slowdowns(job.workers)
            if job.jitter or job.slow or changes:
                raise ValueError(STRAGGLERS_NEED_STEP_TIME)
            return
        compute = planned_times(job, job.step_seconds)
        task.loss = self._padding = PaddedLoss(task, compute, rank=self._rank, seed=job.seed)
        if self._rank < job.workers:  # otherwise it joins, and receives what others have measured
            self._emit(Waiting("measuring a step"))
            self._padding.measure(task, self._batches)

    def _time_limit(self, method: Method) -> TimeLimit:
        """Return the limit on the training time."""
        job = self._job
        # A worker takes no step without others.
        coupled = job.injection is not None or job.workers_per_node > 1
        alone = method.ends_alone and not coupled
        return TimeLimit(job.max_seconds, self._task.steps, alone=alone, device=self._device)

    def _totals(self, method: Method) -> dict[str, Any]:
        totals = method.stats.to_dict()
        if self._injection is not None:
            totals["details"] = {**totals["details"], **self._injection.details}
            totals["wait_seconds"] += self._injection.wait_seconds
            totals["compute_seconds"] -= self._injection.wait_seconds
        if self._padding is not None:
            late = {"late_steps": self._padding.late_steps}
            totals["details"] = {**totals["details"], **late}
        return totals

    def _batches(self, method: Method | None = None) -> Iterator[Any]:
        """Iterate over this worker's batches, on its device.

        ``method`` trains on the batches, to which the job's data injection is applied. None: no
        injection.
        """
        job, task = self._job, self._task
        batches: Iterable[Any]
        if self._leases and isinstance(method, Attached):
            sync, seed = method.sync, job.seed
            batches = leased_batches(task, sync, workers=job.workers, seed=seed)
        else:
            sampler = job.sampler_for(task, dist.get_rank())
            batches = Batches(task, sampler)
            if job.injection is not None and isinstance(method, Attached):
                alpha, beta = parse_injection(job.injection)
                size = injected_batch_size(task.batch_size, alpha, beta, method.sync.size)
                loader = Batches(task, sampler, size=size)
                batches = self._injection = Injection(
                    loader, alpha, beta, seed=job.seed, device=self._device, now=method.now
                )
        for batch in batches:
            yield to_device(batch, self._device)


def planned_times(job: Job, step: float | str) -> Compute:
    """Return the compute times of the processes of ``job``, with steps of this duration."""
    scenario = Scenario.from_json(job.scenario)
    slow = scenario.by_rank(parse_slow(job.slow, job.workers), job.workers)
    changes = scenario.slowdowns(job.workers)

    def slowdown(rank: int, step: int, now: float) -> float:
        return slow.get(rank, 1.0) * value_at(changes, rank, now, 1.0)

    return Compute(step, jitter=job.jitter, slowdown=slowdown if changes else slow)
