"""Runs whose workers die and join: what the workers report, and the evaluations after the run.

Such workers cannot evaluate together. Each of them keeps snapshots of its model, and this process
evaluates the mean of the snapshots of each step after the run. Real workers keep them in files.
"""

import itertools
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat import Stats
from offbeat.extend import Replica
from offbeat_lab.evaluation import Snapshot, evaluate
from offbeat_lab.events import End, Event, Waiting, stats_of
from offbeat_lab.job import Job
from offbeat_lab.recipes import find_recipe


class WorkerFiles:
    """Snapshots and totals of one real worker, in files that are complete if it is killed.

    Args:
        folder: Folder for the files of all workers.
        rank: Rank of the process.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._path, self._numbers, self._longest = f"{folder}/{rank:04}", itertools.count(), 0
        self._totals = os.open(f"{self._path}.totals", os.O_WRONLY | os.O_CREAT)

    def keep(self, one: Snapshot) -> None:
        """Write a snapshot."""
        path = f"{self._path}-{next(self._numbers):06}"
        torch.save(vars(one), path)
        os.rename(path, f"{path}.snapshot")

    def count(self, totals: dict[str, Any]) -> None:
        """Replace the totals (``Stats.to_dict``).

        They are one write, shorter than a memory page, so a kill cannot leave half of it.
        """
        text = json.dumps(totals).ljust(self._longest)
        self._longest = len(text)
        os.pwrite(self._totals, text.encode(), 0)


def read_files(folder: str) -> tuple[list[Snapshot], list[Stats]]:
    """Return all snapshots in ``folder``, and the totals of the processes that have some."""
    snapshots = sorted(Path(folder).glob("*.snapshot"))
    texts = [path.read_text() for path in sorted(Path(folder).glob("*.totals"))]
    return (
        # Mapped files take memory only while they are evaluated.
        [Snapshot(**torch.load(path, weights_only=True, mmap=True)) for path in snapshots],
        [stats_of(json.loads(text)) for text in texts if text],
    )


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
