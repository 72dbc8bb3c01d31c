"""The commands that list what there is: ``recipes`` and ``strategies``."""

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from offbeat.arguments import range_of, types_of
from offbeat.cli.view import console, show
from offbeat.display.table import Table
from offbeat.lab.methods.registry import BASELINES
from offbeat.lab.recipes import RECIPES
from offbeat.registry import STRATEGIES


def recipes() -> None:
    """List the recipes."""
    rows = tuple(
        (
            one.name,
            one.description,
            f"{one.metric} {one.target:g}",
            f"--data DIR: {one.needs_data}" if one.needs_data else "",
        )
        for one in RECIPES.values()
    )
    show(Table(("recipe", "what", "target", "needs"), rows), texts=4)
    console.print("Your own: path/to/file.py", highlight=False)


def strategies() -> None:
    """List the strategies and their settings, and the baselines that they are compared with."""
    _show_kinds("strategy", STRATEGIES)
    console.print("As text: name:setting=value,setting=value\n", highlight=False)
    _show_kinds("baseline", BASELINES)
    console.print(
        "In train and compare, as text: name,setting=value,setting=value", highlight=False
    )


def _show_kinds(heading: str, kinds: Mapping[str, type]) -> None:
    """A table of dataclasses of settings, by name."""
    rows = []
    for name, kind in kinds.items():
        settings = [_setting(kind, one) for one in dataclasses.fields(kind)]
        shown, allowed = ("\n".join(one[i] for one in settings) for i in range(2))
        rows.append((name, _summary(kind), shown, allowed))
    show(Table((heading, "what", "setting", "allowed"), tuple(rows)), texts=4)


def _summary(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("``", "")


def _setting(kind: type, one: "dataclasses.Field[Any]") -> tuple[str, str]:
    """A setting with its default, and what it may be: ``period (required)`` and ``≥ 1``."""
    default = one.default
    with contextlib.suppress(TypeError, ValueError):  # of one that must be told something
        default = getattr(kind(), one.name)  # it may be chosen when nothing else is
    required = default is dataclasses.MISSING
    shown = f"{one.name} (required)" if required else f"{one.name}={default}"
    allowed = [*_choices(types_of(kind)[one.name]), str(range_of(one))]
    return shown, ", ".join(filter(None, allowed))


def _choices(kind: Any) -> list[str]:
    """The values of a type that has few."""
    if kind is bool:
        return ["true", "false"]
    if typing.get_origin(kind) is typing.Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    return [choice for one in typing.get_args(kind) for choice in _choices(one)]
