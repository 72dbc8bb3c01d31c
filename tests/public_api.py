"""Public names and signatures of Offbeat, read from the source without importing it.

The public names are those that ``PAGE`` shows: ``::: PATH`` with its options. The text does not
depend on the version of Python or torch. ``make api`` writes it to tests/public_api.txt.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import yaml
from griffe import ParameterKind as Kind

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE = DOCS / "api.md"
SNAPSHOT = ROOT / "tests" / "public_api.txt"
_COLUMNS = 100
_SHOWN = re.compile(r"^::: (?P<path>[\w.]+)\n(?P<options>(?:    .*\n)*)", re.MULTILINE)


def public_api() -> str:
    """Return all public names with their signatures, in the order of the page."""
    packages = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    for package in ("offbeat", "offbeat_lab"):
        packages.load(package)
    lines: list[str] = []
    for shown in _SHOWN.finditer(PAGE.read_text(encoding="utf-8")):
        options = (yaml.safe_load(shown["options"]) or {}).get("options", {})
        path = shown["path"]
        lines += _lines(path, packages.modules_collection[path], options)
    return "\n".join(lines) + "\n"


def _lines(
    path: str, shown: griffe.Object | griffe.Alias, options: dict[str, Any]
) -> Iterator[str]:
    thing = shown.final_target if isinstance(shown, griffe.Alias) else shown
    if isinstance(thing, griffe.Function):
        yield _signature(path, thing.parameters, f" -> {thing.returns}")
    elif isinstance(thing, griffe.Attribute):
        yield path if thing.annotation is None else f"{path}: {thing.annotation}"
    if not isinstance(thing, griffe.Class | griffe.Module):
        return
    fields: set[str] = set()
    if isinstance(thing, griffe.Class):
        bases = f" [{', '.join(map(str, thing.bases))}]" if thing.bases else ""
        if options.get("merge_init_into_class", True):
            fields = {parameter.name for parameter in thing.parameters}
            yield _signature(path, thing.parameters, bases)
        else:
            yield path + bases
    chosen = options.get("members", True)
    members = thing.all_members if options.get("inherited_members") else thing.members
    for name, member in members.items():
        if chosen is False or (isinstance(chosen, list) and name not in chosen):
            continue
        if name.startswith("_") or name in fields:
            continue
        if member.is_alias and not member.inherited:  # an import
            continue
        if not (thing.is_module and member.is_attribute):
            yield from _lines(f"{path}.{name}", member, {})


def _signature(path: str, parameters: griffe.Parameters, end: str) -> str:
    """Return ``path(parameters)end``, on several lines if it is long.

    Leaves ``self`` out, and shows the default value of a ``setting(…)``.
    """
    shown: list[str] = []
    before = None
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind
        if kind is Kind.keyword_only and before not in (kind, Kind.var_positional):
            shown.append("*")
        if before is Kind.positional_only and kind is not before:
            shown.append("/")
        stars = {Kind.var_positional: "*", Kind.var_keyword: "**"}.get(kind, "")
        text = stars + parameter.name
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        default = parameter.default
        if isinstance(default, griffe.ExprCall) and str(default.function) == "setting":
            first = default.arguments[0]
            default = None if isinstance(first, griffe.ExprKeyword) else first
        shown.append(text if default is None or stars else f"{text} = {default}")
        before = kind
    line = f"{path}({', '.join(shown)}){end}"
    if len(line) <= _COLUMNS:
        return line
    return "\n".join([f"{path}(", *(f"    {one}," for one in shown), f"){end}"])


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api(), encoding="utf-8")
