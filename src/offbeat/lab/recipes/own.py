"""Recipes of the user's own: a function in a file, found by its path."""

import importlib.util
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from offbeat.arguments import POSITIVE, require_number
from offbeat.lab.recipes.base import Recipe, Setup, Task
from offbeat.lab.recipes.samples import Batch, Samples

SUFFIX = ".py"


def recipe(
    *, metric: str, target: float, epochs: float, higher_is_better: bool = True
) -> Callable[[Callable[[Setup], Task]], Recipe]:
    """Make a function ``f(setup) -> Task`` a recipe, which commands take by ``path/to/file.py``.

    It is called on every worker, with all random generators seeded alike before, so that all build
    the same model. The first line of its docstring describes it.

    Args:
        metric: Which metric of ``Task.evaluate`` is compared with the target.
        target: The value whose time of arrival is compared.
        epochs: Passes over the training set by all workers together (> 0), unless ``--epochs`` says
            otherwise.
        higher_is_better: Whether a larger metric is better.

    Raises:
        TypeError, ValueError: target or epochs is no number, or epochs is not positive.
    """
    require_number("target", target)
    require_number("epochs", epochs, POSITIVE)

    def make(function: Callable[[Setup], Task]) -> Recipe:
        file = Path(function.__code__.co_filename)
        name = function.__name__

        @wraps(function)
        def build(setup: Setup) -> Task:
            for seed in (torch.manual_seed, np.random.seed, random.seed):
                seed(setup.seed)
            with mistakes_in(file, name):
                task = function(setup)
                if not isinstance(task, Task):
                    raise TypeError(f"it must return an offbeat.lab.Task, got {task!r}")
                task.complete(setup)
            return task

        return Recipe(
            name=name,
            description=(function.__doc__ or name).strip().partition("\n")[0],
            metric=metric,
            higher_is_better=higher_is_better,
            target=target,
            epochs=epochs,
            build=build,
            file=file,
        )

    return make


@contextmanager
def mistakes_in(file: Path, what: str) -> Iterator[None]:
    """Inside, whatever is raised becomes one line that names the last line of ``file`` in it.

    Raises:
        ValueError: for any exception.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame.lineno for frame in frames if frame.filename == str(file)]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            inside = [error.lineno]
        place = f"{file}, line {inside[-1]}" if inside else str(file)
        text = " ".join(str(error).split())
        raise ValueError(f"{place}: {what}: {type(error).__name__}: {text}") from error


def is_own(name: str) -> bool:
    """Whether ``name`` is ``path/to/file.py`` or ``path/to/file.py:NAME``."""
    return name.endswith(SUFFIX) or f"{SUFFIX}:" in name


def find_own(text: str) -> Recipe:
    """The recipe of ``path/to/file.py:NAME``; without a name, the only one of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be run, or has no such recipe, or several.
    """
    head, _, name = text.removesuffix(SUFFIX).partition(f"{SUFFIX}:")
    path = Path(f"{head}{SUFFIX}")
    if not path.is_file():
        raise FileNotFoundError(f"looked for the recipe {text} in {path}, which does not exist")
    found = _run(path.resolve(), path.stat().st_mtime_ns)
    names = ", ".join(found)
    if not found:
        raise ValueError(
            f"{path} has no recipe: mark a function f(setup) with @offbeat.lab.recipe(metric=…, "
            "target=…, epochs=…)"
        )
    if not name and len(found) > 1:
        raise ValueError(f"{path} has {names}: name one, as in {path}:{next(iter(found))}")
    if name and name not in found:
        raise ValueError(f"{path} has no recipe {name!r}; it has {names}")
    return found[name] if name else next(iter(found.values()))


@cache
def _run(path: Path, changed: int) -> dict[str, Recipe]:
    """Run a file, once for each time that it was changed; the recipes in it by name."""
    if str(path.parent) not in sys.path:  # as for a script, for what it imports from beside it
        sys.path.insert(0, str(path.parent))
    name = f"offbeat_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look there
    with mistakes_in(path, "it cannot be run"):
        spec.loader.exec_module(module)
    return {one.name: one for one in vars(module).values() if isinstance(one, Recipe) and one.file}


class First(Samples):
    """The first ``count`` of ``samples``."""

    def __init__(self, samples: Samples, count: int) -> None:
        self._samples, self._count = samples, min(count, len(samples))

    def __len__(self) -> int:
        return self._count

    @override
    def batch(self, indices: list[int]) -> Batch:
        return self._samples.batch(indices)


def try_out(own: Recipe, task: Task) -> None:
    """Compute the loss and the scores of two samples, so that mistakes show before a run.

    Raises:
        ValueError: they cannot be computed, or are not what a run needs.
    """
    assert own.file is not None
    samples, held_out = task.samples, task.evaluate
    with torch.random.fork_rng(devices=[]):
        with mistakes_in(own.file, "loss"):
            first = First(samples, 2)
            loss = task.loss(task.model, first.batch([*range(len(first))]))
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise TypeError(f"it must be a tensor of one number with a gradient, got {loss!r}")
            loss.backward()
            task.optimizer.zero_grad()
        with mistakes_in(own.file, "evaluate"):
            metrics = replace(held_out, dataset=First(held_out.samples, 2))(task.model)
    if own.metric not in metrics:
        raise ValueError(
            f"{own.file}: evaluate gives {', '.join(metrics) or 'no metric'}, but the metric of "
            f"{own.name} is {own.metric!r}"
        )
