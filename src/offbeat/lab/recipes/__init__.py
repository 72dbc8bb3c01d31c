"""Workloads, one small file for each data set: model, data, optimizer, schedule, metric, target."""

from offbeat.lab.recipes import cifar, digits, imagenet, mnist, stdlib_lm, wikitext
from offbeat.lab.recipes.base import Recipe, Setup, Task
from offbeat.lab.recipes.own import find_own, is_own

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        digits.RECIPE,
        stdlib_lm.RECIPE,
        mnist.RECIPE,
        cifar.CNN,
        cifar.RESNET18,
        cifar.RESNET50,
        cifar.RESNET101,
        cifar.VGG11,
        imagenet.ALEXNET,
        imagenet.GOOGLENET,
        wikitext.RECIPE,
    )
}
ALIASES = {"mnist": "mnist:cnn"}


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or that of the file ``path/to/file.py`` or ``….py:NAME``.

    Raises:
        ValueError: there is none; the message lists those there are.
        FileNotFoundError: there is no such file.
    """
    if is_own(name):
        return find_own(name)
    name = ALIASES.get(name, name)
    if name not in RECIPES:
        raise ValueError(
            f"unknown recipe {name!r}; there are {', '.join(RECIPES)}, and "
            "your own as path/to/file.py or path/to/file.py:NAME"
        )
    return RECIPES[name]


__all__ = ["ALIASES", "RECIPES", "Recipe", "Setup", "Task", "find_recipe"]
