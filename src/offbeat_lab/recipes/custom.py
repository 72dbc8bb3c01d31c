"""Custom recipes: functions in a Python file of the user, marked with the decorator ``recipe``.

On the command line such a recipe is named ``path/to/file.py``, or ``path/to/file.py:NAME`` if the
file has several.
"""

import importlib.util
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from offbeat.extend import POSITIVE, require_number
from offbeat_lab.recipes.base import Recipe, Setup, Task
from offbeat_lab.recipes.datasets import Samples, as_samples

SUFFIX = ".py"


def recipe(
    *, metric: str, target: float, epochs: float, higher_is_better: bool = True
) -> Callable[[Callable[[Setup], Task]], Recipe]:
    """Return a decorator that turns a function ``f(setup) -> Task`` into a recipe.

    Every worker calls the function. Before the call, the generators of torch, NumPy and ``random``
    are seeded with ``setup.seed``, so that all workers build the same model. The first line of the
    function's docstring becomes the description of the recipe.

    Args:
        metric: Name of the metric of ``Task.evaluate`` that is compared with the target.
        target: Value of the metric. Runs are compared by the time until they reach it.
        epochs: Default number of passes over the training set, by all workers together (> 0).
        higher_is_better: True if larger values of the metric are better.

    Raises:
        TypeError: ``target`` or ``epochs`` is not a number.
        ValueError: ``epochs`` is not positive.
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
            with explain_errors(file, name):
                task = function(setup)
                if not isinstance(task, Task):
                    raise TypeError(f"it must return an offbeat_lab.Task, got {task!r}")
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
def explain_errors(file: Path, what: str) -> Iterator[None]:
    """Convert any error inside the context to a ``ValueError`` with the line of ``file``.

    The message begins with the file, the line and ``what``. ``SystemExit`` is converted, too.
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


def is_file_recipe(name: str) -> bool:
    """Return True if ``name`` is ``path/to/file.py`` or ``path/to/file.py:NAME``."""
    return name.endswith(SUFFIX) or f"{SUFFIX}:" in name


def load_file_recipe(text: str) -> Recipe:
    """Return the recipe in a Python file.

    Args:
        text: ``path/to/file.py:NAME``, or ``path/to/file.py`` if the file has only one recipe.
    """
    head, _, name = text.removesuffix(SUFFIX).partition(f"{SUFFIX}:")
    path = Path(f"{head}{SUFFIX}")
    if not path.is_file():
        raise FileNotFoundError(f"looked for the recipe {text} in {path}, which does not exist")
    recipes = _run(path.resolve(), path.stat().st_mtime_ns)
    names = ", ".join(recipes)
    if not recipes:
        raise ValueError(
            f"{path} has no recipe: mark a function f(setup) with @offbeat_lab.recipe(metric=…, "
            "target=…, epochs=…)"
        )
    if not name and len(recipes) > 1:
        raise ValueError(f"{path} has {names}: name one, as in {path}:{next(iter(recipes))}")
    if name and name not in recipes:
        raise ValueError(f"{path} has no recipe {name!r}; it has {names}")
    return recipes[name] if name else next(iter(recipes.values()))


@cache
def _run(path: Path, modified: int) -> dict[str, Recipe]:
    """Execute a file and return its recipes by name.

    ``modified`` is its time of modification, a part of the cache's key.
    """
    if str(path.parent) not in sys.path:  # the file may import modules of its directory
        sys.path.insert(0, str(path.parent))
    name = f"offbeat_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for classes here
    with explain_errors(path, "it cannot be run"):
        spec.loader.exec_module(module)
    values = vars(module).values()
    return {value.name: value for value in values if isinstance(value, Recipe) and value.file}


def first_samples(dataset: Dataset[Any], count: int) -> Samples:
    """Return the first ``count`` samples of a data set, or all if it has fewer."""
    return as_samples(Subset(dataset, range(min(count, len(dataset)))))  # type: ignore[arg-type]


def try_out(recipe: Recipe, task: Task) -> None:
    """Compute loss, gradient and metrics of two samples, to find errors before a run starts."""
    assert recipe.file is not None
    with torch.random.fork_rng(devices=[]):
        with explain_errors(recipe.file, "loss"):
            first = first_samples(task.dataset, 2)
            loss = task.loss(task.model, first.batch([*range(len(first))]))
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise TypeError(f"it must be a tensor of one number with a gradient, got {loss!r}")
            loss.backward()
            task.optimizer.zero_grad()
        with explain_errors(recipe.file, "evaluate"):
            two = first_samples(task.evaluate.dataset, 2)
            metrics = replace(task.evaluate, dataset=two)(task.model)
    if recipe.metric not in metrics:
        raise ValueError(
            f"{recipe.file}: evaluate gives {', '.join(metrics) or 'no metric'}, but the metric of "
            f"{recipe.name} is {recipe.metric!r}"
        )
