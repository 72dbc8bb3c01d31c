"""Workloads, one small file each: model, data, optimizer, schedule, metric, target."""

from offbeat.lab.recipes import digits, mnist, stdlib_lm
from offbeat.lab.recipes.base import Recipe, Setup, Task

RECIPES: dict[str, Recipe] = {r.name: r for r in (digits.RECIPE, stdlib_lm.RECIPE, mnist.RECIPE)}


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]


__all__ = ["RECIPES", "Recipe", "Setup", "Task", "find_recipe"]
