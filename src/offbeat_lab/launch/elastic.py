"""Evaluations of runs whose workers die and join.

Such workers cannot evaluate together. Each of them keeps snapshots of its model, and this process
evaluates the mean of the snapshots of each step after the run.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat import Stats
from offbeat.extend import Replica
from offbeat_lab.evaluation import Snapshot, evaluate
from offbeat_lab.events import End, Event, Waiting
from offbeat_lab.job import Job
from offbeat_lab.recipes import find_recipe


def evaluate_kept(
    job: Job, kept: Sequence[Snapshot], stats: Sequence[Stats], emit: Callable[[Event], None]
) -> None:
    """Evaluate the mean of the snapshots of each step, and emit the evaluations and ``End``.

    The time of an evaluation is the mean time of its snapshots, and at the end that of the last
    worker. ``kept`` and ``stats`` are the snapshots and the totals of all workers.
    """
    emit(Waiting("evaluating"))
    recipe = find_recipe(job.recipe)
    task = recipe.build(job.setup())
    replica = Replica(task.model, [p for p in task.model.parameters() if p.requires_grad])
    last = [one for one in kept if one.last]
    end = round(statistics.mean(one.step for one in last))
    groups: dict[int, list[Snapshot]] = defaultdict(list)
    for one in kept:
        if not one.last and one.step < end:
            groups[one.step].append(one)
    for step, group in [*sorted(groups.items()), (end, last)]:
        combine = max if group is last else statistics.mean
        seconds = combine(one.seconds for one in group)
        replica.restore([*map(_combined, *(one.tensors for one in group))])
        emit(evaluate(task, recipe.metric, step, seconds))
    emit(End(tuple(stats)))


def _combined(*tensors: Tensor) -> Tensor:
    """Return what ``average_over_workers`` computes from the workers' tensors."""
    first = tensors[0]
    if first.is_floating_point() or first.is_complex():
        wide = torch.promote_types(first.dtype, torch.float32)
        total = torch.stack([tensor.to(wide) for tensor in tensors]).sum(0)
        return (total / len(tensors)).to(first.dtype)
    return torch.stack(tensors).amax(0) if first.dtype.is_signed else first
