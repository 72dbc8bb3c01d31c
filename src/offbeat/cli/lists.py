"""Implementation of the command ``strategies``, and the table of strategies and their settings."""

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from offbeat.arguments import range_of, types_of
from offbeat.cli.view import console, print_table
from offbeat.display.table import Table
from offbeat.strategies.registry import STRATEGIES


def strategies() -> None:
    """List the strategies with their settings."""
    print_kinds("strategy", STRATEGIES)
    console.print("As text: name:setting=value,setting=value", highlight=False)


def print_kinds(heading: str, kinds: Mapping[str, type]) -> None:
    """Print a table of the dataclasses ``kinds``: summary, settings, defaults and ranges."""
    rows = []
    for name, kind in kinds.items():
        settings = [_describe(kind, field) for field in dataclasses.fields(kind)]
        shown, allowed = ("\n".join(setting[i] for setting in settings) for i in range(2))
        summary = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("``", "")
        rows.append((name, summary, shown, allowed))
    print_table(Table((heading, "what", "setting", "allowed"), tuple(rows)), texts=4)


def _describe(kind: type, field: "dataclasses.Field[Any]") -> tuple[str, str]:
    """Return a setting with its default, such as ``period=8``, and its range, such as ``≥ 1``."""
    default = field.default
    with contextlib.suppress(TypeError, ValueError):  # kind() raises if it has required settings
        default = getattr(kind(), field.name)  # the constructor may replace a default
    required = default is dataclasses.MISSING
    shown = f"{field.name} (required)" if required else f"{field.name}={default}"
    allowed = [*_choices(types_of(kind)[field.name]), str(range_of(field))]
    return shown, ", ".join(filter(None, allowed))


def _choices(kind: Any) -> list[str]:
    """Return the possible values of bool and Literal types; none for other types."""
    if kind is bool:
        return ["true", "false"]
    if typing.get_origin(kind) is typing.Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    return [choice for part in typing.get_args(kind) for choice in _choices(part)]
