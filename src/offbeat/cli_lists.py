"""The commands that list what there is: ``recipes`` and ``strategies``."""

import dataclasses
import inspect
import typing

from rich.table import Table

from offbeat.cli_view import console
from offbeat.lab.recipes import RECIPES
from offbeat.strategies import STRATEGIES, Strategy


def recipes() -> None:
    """List the recipes.

    [bold]Example[/bold]

    offbeat recipes
    """
    table = Table(box=None)
    for heading in ("recipe", "what", "target", "needs"):
        table.add_column(heading)
    for one in RECIPES.values():
        needs = f"--data DIR: {one.needs_data}" if one.needs_data else ""
        table.add_row(one.name, one.description, f"{one.metric} {one.target:g}", needs)
    console.print(table)


def strategies() -> None:
    """List the strategies and their settings.

    [bold]Example[/bold]

    offbeat strategies
    """
    table = Table(box=None)
    for heading in ("strategy", "what", "settings"):
        table.add_column(heading)
    for name, kind in STRATEGIES.items():
        table.add_row(name, _summary(kind), _settings(kind))
    console.print(table)
    console.print("\nAs text: name:setting=value,setting=value")


def _summary(kind: type[Strategy]) -> str:
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("``", "")


def _settings(kind: type[Strategy]) -> str:
    """As in ``period (required), warmup_steps=0, flags=blocking|deferred``."""
    shown = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        choices = typing.get_args(hints[field.name])
        if field.default is dataclasses.MISSING:
            shown.append(f"{field.name} (required)")
        elif typing.get_origin(hints[field.name]) is typing.Literal:
            shown.append(f"{field.name}={'|'.join(choices)}")
        else:
            shown.append(f"{field.name}={field.default}")
    return ", ".join(shown)
