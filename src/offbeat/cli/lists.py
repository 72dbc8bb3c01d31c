"""Implementations of the commands ``recipes``, ``strategies`` and ``report``."""

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.arguments import range_of, types_of
from offbeat.cli.checks import require_file
from offbeat.cli.view import console, print_path, print_table
from offbeat.display.table import Table
from offbeat_lab.baselines import STRATEGIES
from offbeat_lab.methods.registry import BASELINES
from offbeat_lab.recipes import RECIPES
from offbeat_lab.report import page
from offbeat_lab.results import read_results, writing


def recipes() -> None:
    """List the recipes."""
    rows = tuple(
        (
            recipe.name,
            recipe.description,
            f"{recipe.metric} {recipe.target:g}",
            f"--data DIR: {recipe.needs_data}" if recipe.needs_data else "",
        )
        for recipe in RECIPES.values()
    )
    print_table(Table(("recipe", "what", "target", "needs"), rows), texts=4)
    console.print("Your own: path/to/file.py", highlight=False)


def strategies() -> None:
    """List strategies and baselines with their settings."""
    _print_kinds("strategy", STRATEGIES)
    console.print("As text: name:setting=value,setting=value\n", highlight=False)
    _print_kinds("baseline", BASELINES)
    console.print(
        "In train and compare, as text: name,setting=value,setting=value", highlight=False
    )


def _print_kinds(heading: str, kinds: Mapping[str, type]) -> None:
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


def report(results: Path, output: Path | None) -> None:
    """Write the HTML page of a comparison."""
    if results.is_dir():
        raise ValueError(f"{results} is a directory; name its results.jsonl")
    if not results.exists():
        raise FileNotFoundError(f"looked for results in {results}, which does not exist")
    path = results.with_name("report.html") if output is None else output
    require_file("--output", path)
    read = read_results(results, trials=True)
    if all(result.trial is not None for result in read):
        raise ValueError(f"{results} holds no result of a comparison")
    text = page(read)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        path.write_text(text, encoding="utf-8")
    print_path("report", path)
