"""Recipes: workloads for training and comparisons, one module for each data set.

A recipe has a model, data, an optimizer, a learning-rate schedule, a metric and a target.
"""

from offbeat.extend import did_you_mean
from offbeat_lab.recipes import cifar, digits, mnist, stdlib_lm, wikitext
from offbeat_lab.recipes.base import Recipe, Setup, Task
from offbeat_lab.recipes.custom import is_file_recipe, load_file_recipe

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        digits.RECIPE,
        stdlib_lm.RECIPE,
        mnist.RECIPE,
        cifar.RECIPE,
        wikitext.RECIPE,
    )
}
ALIASES = {"mnist": "mnist:cnn"}


def find_recipe(name: str) -> Recipe:
    """Return the recipe called ``name``.

    Args:
        name: Name or alias of a recipe of this package. For a custom recipe: ``path/to/file.py`` or
            ``path/to/file.py:NAME``.
    """
    if is_file_recipe(name):
        return load_file_recipe(name)
    name = ALIASES.get(name, name)
    if name not in RECIPES:
        raise ValueError(
            f"unknown recipe {name!r}{did_you_mean(name, RECIPES)}; there are "
            f"{', '.join(RECIPES)}, and your own as path/to/file.py or path/to/file.py:NAME"
        )
    return RECIPES[name]


__all__ = ["ALIASES", "RECIPES", "Recipe", "Setup", "Task", "find_recipe"]
