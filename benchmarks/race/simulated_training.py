"""Training in virtual time whose evaluations do not use the links.

``offbeat simulate`` evaluates a consensus, which uses the links: the training clock stops
meanwhile, and parts that were in flight land. On slow links this favours methods with much in
flight. Here every worker copies its model at the steps to evaluate, and the mean of the copies is
evaluated after the run.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat.lab.evaluation import evenly
from offbeat.lab.job import Job
from offbeat.lab.methods.base import Attached
from offbeat.lab.methods.registry import is_ideal, parse_method
from offbeat.lab.recipes import Task, find_recipe
from offbeat.lab.samplers import Batches
from offbeat.simulate import Compute, Network, simulate
from offbeat.strategies import Strategy

_IDEAL_NETWORK = Network(1e30, latency=0.0)


@dataclass(frozen=True)
class Run:
    """Results of a run.

    Attributes:
        points: Training seconds and metric of each evaluation, the last of the final model.
        steps: Steps of each worker.
        payload_bytes: Bytes handed to collectives, mean over the workers.
        idle: Share of the training time spent waiting, mean over the workers.
        details: Statistics that only this strategy has, of rank 0.
    """

    points: tuple[tuple[float, float], ...]
    steps: int
    payload_bytes: float
    idle: float
    details: dict[str, object]


@dataclass
class _Copies:
    """Copies that the workers take of their models, by step, one entry for each worker."""

    states: dict[int, list[dict[str, Tensor]]] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    computed: dict[int, list[float]] = field(default_factory=dict)

    def add(self, run: Attached, task: Task) -> None:
        state = {name: one.detach().clone() for name, one in task.model.state_dict().items()}
        self.states.setdefault(run.step, []).append(state)
        self.seconds.setdefault(run.step, []).append(run.seconds if dist.get_rank() == 0 else 0.0)
        self.computed.setdefault(run.step, []).append(run.stats.compute_seconds)


def train(job: Job, network: Network, compute: Compute, evaluations: int) -> Run:
    """Run ``job``, with so many evaluations before its end.

    The clock is that of the lab: rank 0's computing and waiting. For the ideal network (BSP
    without communication time) it is the mean computing time of the workers.
    """
    ideal, copies, ends = is_ideal(job.strategy), _Copies(), {}
    strategy = parse_method("bsp" if ideal else job.strategy)
    assert isinstance(strategy, Strategy)
    result = simulate(
        lambda: _work(job, strategy, evaluations, copies, ends),
        workers=job.workers,
        network=_IDEAL_NETWORK if ideal else network,
        compute=compute,
        seed=job.seed,
    )
    task, evaluate = _task(job), _evaluator(job)
    points = []
    for step, states in copies.states.items():
        task.model.load_state_dict(mean_of(states))
        seconds = fmean(copies.computed[step]) if ideal else sum(copies.seconds[step])
        points.append((seconds, evaluate(task)))
    stats = [one for one in result.stats if one is not None]
    task.model.load_state_dict(ends.pop("state"))
    last = fmean(one.compute_seconds for one in stats) if ideal else ends["seconds"]
    points.append((last, evaluate(task)))
    return Run(
        tuple(points),
        stats[0].steps,
        fmean(one.payload_bytes for one in stats),
        fmean(one.idle for one in stats),
        stats[0].details,
    )


def _task(job: Job) -> Task:
    return find_recipe(job.recipe).build(job.setup())


def _evaluator(job: Job) -> Callable[[Task], float]:
    metric = find_recipe(job.recipe).metric
    return lambda task: task.evaluate(task.model)[metric]


def _work(
    job: Job, strategy: Strategy, evaluations: int, copies: _Copies, ends: dict[str, object]
) -> None:
    """Train one worker as ``lab.train`` does."""
    rank, task = dist.get_rank(), _task(job)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(job.seed * 1000 + rank)
    sync = offbeat.attach(task.model, task.optimizer, strategy, wire=job.wire)
    run = Attached(task, job.lr_scale, sync)
    at = evenly(task.steps, evaluations)
    for batch in Batches(task, job.sampler_for(task, rank)):
        run.train(batch)
        if run.step in at:
            copies.add(run, task)
    run.finish()
    if rank == 0:
        ends.update(state=task.model.state_dict(), seconds=run.seconds)


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean over the workers; integer tensors (counters) are the first worker's."""
    first, *others = states
    return {
        name: torch.stack([one, *(other[name] for other in others)]).mean(0)
        if one.is_floating_point()
        else one
        for name, one in first.items()
    }
