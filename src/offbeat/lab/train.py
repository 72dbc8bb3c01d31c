"""Train one recipe under one strategy on one worker, and tell what happens as events.

``python -m offbeat.lab.train JSON`` is what ``launch`` starts; ``train_worker`` is the same inside
a process group that exists already.
"""

import json
import logging
import math
import os
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from offbeat.data import DataInjection, injected_batch_size
from offbeat.errors import OffbeatError
from offbeat.fabric.wire import Precision
from offbeat.lab.reading import Batches, make_sampler, parse_injection
from offbeat.lab.recipes import Setup, Task, find_recipe
from offbeat.strategies import parse_strategy
from offbeat.training.attach import attach, require_wire
from offbeat.training.synchronizer import Synchronizer

Event = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        recipe: Name of the recipe.
        strategy: Text form of the strategy.
        workers: Number of workers.
        epochs: Passes over the data by all workers together; None is the recipe's own.
        seed: Seed of the model, the data's order and the augmentation.
        data: Directory of the data.
        evaluations: How often the consensus is evaluated, evenly spread, the end included.
        log: Where each worker's records go; see ``offbeat.attach``.
        timeout_seconds: See ``offbeat.attach``.
        wire: How means travel; see ``offbeat.attach``.
        lr_scale: Factor on the recipe's learning rate, in all of its schedule.
        partition: Who holds which samples: ``label:K`` (K labels a worker) or ``dirichlet:A``
            (concentration A); None lets every worker read all of them.
        injection: ``ALPHA,BETA``: in each step so many of the workers give all others so much of
            their batch (``offbeat.data.DataInjection``).
        sampler: Without a partition: ``seldp``, ``defdp`` or ``distributed``; see ``make_sampler``.
    """

    recipe: str
    strategy: str
    workers: int
    epochs: float | None = None
    seed: int = 0
    data: str | None = None
    evaluations: int = 24
    log: str | None = None
    timeout_seconds: float = 120.0
    lr_scale: float = 1.0
    partition: str | None = None
    sampler: str = "seldp"
    injection: str | None = None
    wire: Precision = "float32"

    def setup(self) -> Setup:
        """The recipe's part of it."""
        recipe = find_recipe(self.recipe)
        epochs = recipe.epochs if self.epochs is None else self.epochs
        return Setup(self.workers, epochs, self.seed, Path(self.data) if self.data else None)

    def check(self) -> Task:
        """Build everything once, so that mistakes show before any worker starts.

        Raises:
            ValueError, TypeError: an unknown recipe or strategy, or an impossible setting.
            FileNotFoundError: the data are not there.
        """
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be positive and finite, got {self.epochs}")
        if not 0 < self.timeout_seconds < math.inf:
            raise ValueError(f"timeout must be positive and finite, got {self.timeout_seconds}")
        if not 0 < self.lr_scale < math.inf:
            raise ValueError(f"lr-scale must be positive and finite, got {self.lr_scale}")
        require_wire(self.wire, parse_strategy(self.strategy))
        task = find_recipe(self.recipe).build(self.setup())
        self.sampler_for(task, 0)
        if self.injection is not None:
            parse_injection(self.injection)
        return task

    def sampler_for(self, task: Task, rank: int) -> Sampler[int]:
        """Which samples worker ``rank`` reads, and in which order."""
        return make_sampler(
            task,
            self.workers,
            rank,
            seed=self.seed,
            kind=self.sampler,
            partition=self.partition,
        )


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


def train_worker(job: Job, emit: Callable[[Event], None]) -> None:
    """Train on this worker. Rank 0 calls ``emit`` with the events; the others are silent.

    Events: ``start`` (steps), ``step`` (step, training seconds), ``evaluation`` (the same, the
    recipe's metric and all metrics by name) and ``end`` (the totals of every rank). Training
    seconds are the time rank 0 spent computing and waiting; evaluation does not count.
    """
    rank, device = dist.get_rank(), own_device()
    tell = emit if rank == 0 else (lambda event: None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    recipe = find_recipe(job.recipe)
    task = recipe.build(job.setup())
    task.model.to(device)
    _scale_lr(task, job.lr_scale)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(job.seed * 1000 + rank)  # augmentation differs between workers, the model does not
    sync = attach(
        task.model,
        task.optimizer,
        parse_strategy(job.strategy),
        wire=job.wire,
        log=job.log,
        timeout_seconds=job.timeout_seconds,
    )
    tell({"event": "start", "steps": task.steps, "model_bytes": _bytes(task.model)})
    looks = {round(task.steps * (i + 1) / job.evaluations) for i in range(job.evaluations)}
    readers = task.readers if device.type == "cuda" else 0
    for batch in _batches(job, task, sync, readers):
        loss = task.loss(task.model, tuple(tensor.to(device) for tensor in batch))
        loss.backward()
        if task.clip_norm is not None:
            sync.clip_grad_norm_(task.clip_norm)
        sync.record(loss=loss.detach())
        task.optimizer.step()
        task.optimizer.zero_grad()
        task.scheduler.step()
        stats = sync.stats
        now = {"step": sync.step, "seconds": stats.compute_seconds + stats.wait_seconds}
        if sync.step in looks and sync.step < task.steps:
            with sync.consensus():
                metrics = task.evaluate(task.model) if rank == 0 else {}
                dist.barrier()  # the others wait here, where the clock stands still
            if rank == 0:
                emit(_evaluation(now, recipe.metric, metrics))
        else:
            tell({"event": "step", **now})
    sync.finish()
    totals = _gather(sync.stats.to_dict(), device)
    if rank == 0:
        seconds = sync.stats.compute_seconds + sync.stats.wait_seconds
        now = {"step": sync.step, "seconds": seconds}
        emit(_evaluation(now, recipe.metric, task.evaluate(task.model)))
        emit({"event": "end", "stats": totals})


def _batches(
    job: Job, task: Task, sync: Synchronizer, readers: int
) -> Iterable[tuple[Tensor, ...]]:
    """What this worker trains on, step by step."""
    sampler = job.sampler_for(task, sync.rank)
    if job.injection is None:
        return Batches(task, sampler, readers=readers)
    alpha, beta = parse_injection(job.injection)
    own = injected_batch_size(task.batch_size, alpha, beta, sync.size)
    loader = Batches(task, sampler, size=own, readers=readers)
    return DataInjection(loader, alpha, beta, sync=sync, seed=job.seed)


def _scale_lr(task: Task, factor: float) -> None:
    """Multiply the learning rate now and in everything the schedule derives from it."""
    task.scheduler.base_lrs = [lr * factor for lr in task.scheduler.base_lrs]
    for group in task.optimizer.param_groups:
        group["lr"] *= factor
        group["initial_lr"] = group.get("initial_lr", group["lr"]) * factor


def _evaluation(now: Event, metric: str, metrics: dict[str, float]) -> Event:
    return {"event": "evaluation", **now, "metric": metrics[metric], "metrics": metrics}


def _gather(value: Any, device: torch.device) -> list[Any]:
    """Every worker's plain value, in rank order, by way of ``device``."""
    data = bytearray(json.dumps(value).encode())
    text = torch.frombuffer(data, dtype=torch.uint8).to(device)
    lengths = [torch.zeros_like(text[:1], dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device))
    longest = max(int(length) for length in lengths)
    texts = [text.new_zeros(longest) for _ in lengths]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))))
    return [
        json.loads(text[: int(length)].cpu().numpy().tobytes())
        for text, length in zip(texts, lengths, strict=True)
    ]


def share_cores(workers: int) -> None:
    """Let each of the ``workers`` processes of this machine use its share of the cores."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _bytes(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def encode(job: Job, rank: int, rendezvous: str) -> str:
    """The argument of ``python -m offbeat.lab.train`` for one worker."""
    return json.dumps({"job": asdict(job), "rank": rank, "rendezvous": rendezvous})


def main() -> None:
    """Run one worker as told by the JSON argument; errors are one line on standard error."""
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
        share_cores(job.workers)
        train_worker(job, lambda event: print(json.dumps(event), flush=True))  # noqa: T201 - the pipe
    except (OffbeatError, ValueError, TypeError, OSError, ImportError) as error:
        sys.stderr.write(f"error: {error}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's destructors would wait for workers that have died


if __name__ == "__main__":
    main()
