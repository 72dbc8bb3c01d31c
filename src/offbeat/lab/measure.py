"""The model of a recipe, and how long one of its steps takes on this machine."""

import statistics
import time
from itertools import chain, islice, repeat
from pathlib import Path

import torch

from offbeat.lab.recipes import Setup, find_recipe
from offbeat.lab.recipes.custom import try_out
from offbeat.lab.samplers import Batches, make_sampler


def measure_recipe(
    name: str, *, data: Path | None = None, steps: int = 15, warmup_steps: int = 5
) -> tuple[torch.nn.Module, float]:
    """Train a few steps alone, with as many threads as torch uses now.

    Args:
        name: Of the recipe, or the file of one's own.
        data: Directory of its data, if it needs one.
        steps: How many steps are timed (≥ 5).
        warmup_steps: How many come before them.

    Returns:
        The model, and the median of the seconds of a step: reading the batch, forward, backward,
        the optimizer.

    Raises:
        ValueError: no such recipe, a mistake in one's own, or too few steps.
        FileNotFoundError: the data are not there.
    """
    if steps < 5:
        raise ValueError(f"steps must be at least 5, got {steps}")
    recipe = find_recipe(name)
    with torch.random.fork_rng(devices=[]):
        task = recipe.build(Setup(workers=1, epochs=recipe.epochs, data=data))
        if recipe.file is not None:
            try_out(recipe, task)
        again = chain.from_iterable(
            Batches(task, make_sampler(task, 1, 0, seed=0)) for _ in repeat(None)
        )
        seconds: list[float] = []
        begin = time.perf_counter()
        for batch in islice(again, warmup_steps + steps):
            task.loss(task.model, batch).backward()
            if task.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(task.model.parameters(), task.clip_norm)
            task.optimizer.step()
            task.advance()
            begin, before = time.perf_counter(), begin
            seconds.append(begin - before)
    return task.model, statistics.median(seconds[warmup_steps:])
