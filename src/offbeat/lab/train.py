"""Train one recipe under one strategy on one worker, and tell what happens as events.

``python -m offbeat.lab.train JSON`` is what ``launch`` starts; ``train_worker`` is the same inside
a process group that exists already.
"""

import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from offbeat.attach import attach
from offbeat.data import DataInjection, injected_batch_size
from offbeat.errors import OffbeatError
from offbeat.lab.evaluation import (
    EvaluationSchedule,
    affordable,
    evaluate_together,
    expected_seconds,
    gather,
)
from offbeat.lab.events import (
    Chosen,
    End,
    Evaluation,
    Event,
    Paced,
    Start,
    Step,
    Waiting,
    stats_of,
    to_json,
)
from offbeat.lab.job import Job
from offbeat.lab.leaving import Leaving
from offbeat.lab.links import measure_links
from offbeat.lab.methods.base import Attached, Baseline, Method
from offbeat.lab.methods.registry import is_ideal, parse_method
from offbeat.lab.recipes import Task, find_recipe
from offbeat.lab.recipes.datasets import to_device
from offbeat.lab.resume import Checkpoints, History
from offbeat.lab.samplers import Batches, parse_injection
from offbeat.lab.turns import take_turn
from offbeat.lab.uneven import Uneven, parse_slow
from offbeat.strategies import Strategy
from offbeat.synchronizer import Synchronizer


def choose_backend() -> str:
    """``nccl`` where each of torchrun's processes on this machine has a GPU, else ``gloo``.

    To be given to ``init_process_group`` before ``train_worker``, which trains on the CPU under
    every backend but NCCL. All machines of a run should have as many GPUs a process.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local
    return "nccl" if enough and dist.is_nccl_available() else "gloo"


def own_device() -> torch.device:
    """Where this worker trains: under NCCL the GPU of its local rank, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", dist.get_node_local_rank())
    return torch.device("cpu")


def train_worker(job: Job, emit: Callable[[Event], None], leaving: Leaving | None = None) -> None:
    """Train on this worker. Rank 0 calls ``emit`` with the events; the others are silent.

    They are a ``Start``, a ``Step`` or an ``Evaluation`` for each step, and an ``End``; between
    them a ``Waiting`` wherever something else is done, what is measured if the job asks for it, a
    ``Chosen`` if the number of evaluations is left to the run, and a ``Resumed``, with what was
    told before, if it goes on from a checkpoint. Training seconds are the time rank 0 spent
    computing and waiting; evaluation does not count. Those of ``ideal`` are told at the end; see
    ``End``.
    A run that is asked to end early, through ``leaving``, ends with a ``Left``.
    """
    rank, device = dist.get_rank(), own_device()
    tell = History(emit if rank == 0 else (lambda event: None))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    recipe = find_recipe(job.recipe)
    tell(Waiting("loading the data"))
    task = recipe.build(job.setup())
    if job.max_steps is not None:  # the schedule stays that of the whole run
        task.steps = min(task.steps, job.max_steps)
    task.model.to(device)
    tell(Waiting("meeting the other workers"))
    _measure_links(job, tell)
    turn = _turns(_make_uneven(job, task, device, tell), device, tell)
    if not job.resume:
        turn(0)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(job.seed * 1000 + rank)  # augmentation differs between workers, the model does not
    method = _begin(job, task, device)
    tell(Start(task.steps, _bytes(task.model)))
    looks = EvaluationSchedule(task.steps, job.evaluations)
    checkpoints = Checkpoints(job, task, method, tell)
    checkpoints.resume(looks)
    if checkpoints.leaves(leaving, task.steps):
        return
    for batch in _batches(job, task, device, method):
        method.train(batch)
        metrics = None
        if method.step in looks:
            tell(Waiting("evaluating"))
            metrics = _look(job, task, method, looks, device, tell, turn)
            if looks.over:
                break
        if metrics is None:
            tell(Step(method.step, method.seconds))
        else:
            seconds = method.seconds
            tell(Evaluation(method.step, seconds, metrics[recipe.metric], metrics))
        checkpoints.step_taken(task.steps)
        if checkpoints.leaves(leaving, task.steps):
            return
    tell(Waiting("finishing"))
    method.finish()
    totals = gather(method.stats.to_dict(), device, "the totals of all workers")
    _measure_links(job, tell)
    tell(Waiting("evaluating"))
    metrics = evaluate_together(task.evaluate, task.model, device)
    tell(Evaluation(method.step, method.seconds, metrics[recipe.metric], metrics))
    turn(method.step)
    tell(End(tuple(stats_of(one) for one in totals), method.step_seconds))


def _begin(job: Job, task: Task, device: torch.device) -> Method:
    """Begin to train under the job's strategy or baseline."""

    def under(strategy: Strategy) -> Synchronizer:
        return attach(
            task.model,
            task.optimizer,
            strategy,
            node_group="auto" if job.workers_per_node > 1 else None,
            wire=job.wire,
            log=job.log,
            timeout_seconds=job.timeout_seconds,
        )

    chosen = parse_method(job.strategy)
    if isinstance(chosen, Baseline):
        return chosen.start(
            task,
            job.lr_scale,
            under,
            lambda: _batches(job, task, device),
            job.timeout_seconds,
        )
    return Attached(task, job.lr_scale, under(chosen))


def _make_uneven(job: Job, task: Task, device: torch.device, tell: Callable[[Event], None]) -> Job:
    """Let this worker compute as unevenly as the job says; the job, with what the sleeps are of."""
    if not (job.jitter or job.slow) or dist.get_backend() == "simulated":  # whose clock does it
        return job
    if job.alone_seconds is None:
        tell(Waiting("measuring a step"))
    task.loss = uneven = Uneven(
        task,
        lambda: _batches(job, task, device),
        slowdown=parse_slow(job.slow, job.workers).get(dist.get_rank(), 1.0),
        jitter=job.jitter,
        seed=job.seed,
        step_seconds=job.alone_seconds,
    )
    tell(Paced(uneven.step_seconds))
    return replace(job, alone_seconds=uneven.step_seconds)


def _turns(job: Job, device: torch.device, tell: Callable[[Event], None]) -> Callable[[int], None]:
    """What trains alone after a step and tells of it; nothing, if the job does not ask for it."""
    if not job.measure_alone or dist.get_backend() == "simulated":  # where no speed varies
        return lambda step: None
    task = find_recipe(job.recipe).build(job.setup())
    task.model.to(device)
    _make_uneven(job, task, device, lambda event: None)  # as the workers are, with draws of its own

    def take(step: int) -> None:
        tell(Waiting("training alone"))
        tell(take_turn(step, task, job.lr_scale, lambda: _batches(job, task, device)))

    return take


def _measure_links(job: Job, tell: Callable[[Event], None]) -> None:
    """Tell how fast the links are, if the job asks for it; virtual ones are as they are said."""
    if job.measure_links and job.workers > 1 and dist.get_backend() == "gloo":
        if is_ideal(job.strategy):  # it has none
            return
        tell(Waiting("measuring the links"))
        tell(measure_links())


def _look(
    job: Job,
    task: Task,
    method: Method,
    looks: EvaluationSchedule,
    device: torch.device,
    tell: Callable[[Event], None],
    turn: Callable[[int], None],
) -> dict[str, float] | None:
    """The metrics of the consensus, and a turn alone.

    At the first time perhaps how often there will be some is chosen; None if not now, then. None,
    too, where the run has taken the seconds that it may: that ends it.
    """
    began = time.perf_counter()
    with method.consensus():  # what happens inside does not count as training
        if job.max_seconds is not None:
            taken = gather(method.seconds, device, "the training seconds of all workers")
            looks.over = max(taken) >= job.max_seconds
            if looks.over:
                return None
        if looks.open:
            met = time.perf_counter() - began
            cost = met + expected_seconds(task.evaluate, task.model)
            own = affordable(cost, method.seconds / method.step * task.steps)
            number = int(gather(own, device, "the number of evaluations")[0])
            looks.choose(number)
            tell(Chosen(number, cost))
            if method.step not in looks:
                return None
        metrics = evaluate_together(task.evaluate, task.model, device)
        turn(method.step)
        return metrics


def _batches(
    job: Job, task: Task, device: torch.device, method: Method | None = None
) -> Iterator[Any]:
    """What this worker trains on, step by step; data are injected where ``method`` meets others."""
    sampler = job.sampler_for(task, dist.get_rank())
    readers = task.readers if device.type == "cuda" else 0
    done = 0 if method is None else method.step
    batches: Iterable[Any] = Batches(task, sampler, readers=readers, done=done)
    if job.injection is not None and isinstance(method, Attached):
        alpha, beta = parse_injection(job.injection)
        own = injected_batch_size(task.batch_size, alpha, beta, method.sync.size)
        loader = Batches(task, sampler, size=own, readers=readers)
        batches = DataInjection(loader, alpha, beta, sync=method.sync, seed=job.seed)
    for batch in batches:
        yield to_device(batch, device)


def share_cores(workers: int, rank: int | None = None) -> None:
    """Let each of the ``workers`` processes of this machine use its share of the cores.

    Args:
        workers: Processes.
        rank: Of this one: it keeps to cores of its own, or shares one with as many as every other.
            The scheduler lets one of several that never wait run twice as fast as another for
            seconds. None, or numbers that do not divide: any core.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    torch.set_num_threads(max(1, (len(cores) or os.cpu_count() or 1) // workers))
    if rank is None or not cores or (workers % len(cores) and len(cores) % workers):
        return
    each = max(1, len(cores) // workers)
    first = rank * each % len(cores)
    os.sched_setaffinity(0, cores[first : first + each])


def _bytes(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def find_own_modules() -> None:
    """Let strategies of the user's own be imported from the current directory.

    As ``python -m`` does; a console script and ``python -P`` leave it out.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def encode(job: Job, rank: int, rendezvous: str, leaving: str | None = None) -> str:
    """The argument of ``python -m offbeat.lab.train`` for one worker."""
    told = {"job": asdict(job), "rank": rank, "rendezvous": rendezvous, "leaving": leaving}
    return json.dumps(told)


def main() -> None:
    """Run one worker as told by the JSON argument; errors are one line on standard error."""
    find_own_modules()
    told = json.loads(sys.argv[1])
    job = Job(**told["job"])
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    code = 0
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{told['rendezvous']}",
            rank=told["rank"],
            world_size=job.workers,
            timeout=timedelta(seconds=job.timeout_seconds),
        )
        share_cores(job.workers, told["rank"])
        path = told["leaving"]
        train_worker(
            job,
            lambda event: print(to_json(event), flush=True),  # noqa: T201 - the pipe
            None if path is None else Leaving(path, job.workers),
        )
    except (OffbeatError, ValueError, TypeError, OSError, ImportError) as error:
        sys.stderr.write(f"error: {error}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's destructors would wait for workers that have died


if __name__ == "__main__":
    main()
