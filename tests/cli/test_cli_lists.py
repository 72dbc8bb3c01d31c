"""``offbeat recipes`` and ``offbeat strategies`` list everything with its range."""

import dataclasses
import re

import pytest

from cli.commands import Call
from offbeat.arguments import range_of
from offbeat.extend import STRATEGIES, console
from offbeat_lab.baselines import PUBLISHED
from offbeat_lab.methods.registry import REFERENCES
from offbeat_lab.recipes import RECIPES


def test_recipes_are_listed(call: Call) -> None:
    """`offbeat recipes` names every recipe, its target, and what data it needs."""
    code, out, err = call("recipes")
    assert (code, err) == (0, "")
    for recipe in RECIPES.values():
        (line,) = (line for line in out.splitlines() if line.split()[:1] == [recipe.name])
        assert recipe.description in line
        assert f"{recipe.metric} {recipe.target:g}" in line
        assert ("--data" in line) == (recipe.needs_data is not None)


def settings_in(out: str) -> dict[str, dict[str, str]]:
    """Return the printed range of each setting of each strategy."""
    found: dict[str, dict[str, str]] = {}
    lines = iter(out.splitlines())
    heading = next(line for line in lines if line.startswith("strategy "))
    setting, allowed = heading.index("setting"), heading.index("allowed")
    for line in lines:
        if line.startswith("As text"):
            return found
        if line[:1].strip():
            strategy = line.split()[0]
            found[strategy] = {}
        if line[setting:].strip():
            found[strategy][line[setting:allowed].strip()] = line[allowed:].strip()
    raise AssertionError(out)


def test_strategies_are_listed(call: Call) -> None:
    """Every strategy, each setting with its default, and its range.

    `offbeat strategies` lists those to train with, and `offbeat recipes` those to compare with.
    """
    found: dict[str, dict[str, str]] = {}
    for command in ("strategies", "recipes"):
        code, out, err = call(command)
        assert (code, err) == (0, "")
        assert "name:setting=value" in out
        found |= settings_in(out)
    assert list(found) == [*STRATEGIES, *PUBLISHED]
    # Where neither delta nor target_lssr is given.
    chosen = {(name, "target_lssr"): 0.9 for name in ("selsync", "selsync_gradients")}
    for name, kind in (STRATEGIES | PUBLISHED).items():
        fields = dataclasses.fields(kind)
        assert len(found[name]) == len(fields)
        for one in fields:
            required = one.default is dataclasses.MISSING
            default = chosen.get((name, one.name), one.default)
            shown = f"{one.name} (required)" if required else f"{one.name}={default}"
            assert str(range_of(one)) in found[name][shown]


def test_references_are_listed(call: Call) -> None:
    """Below the recipes, with their settings and how they are written."""
    below = call("recipes")[1].partition("Your own: path/to/file.py")[2]
    assert "As text: name,setting=value" in below
    lines = below.partition("\nreference ")[2].splitlines()
    names = [line.split()[0] for line in lines if re.match(r"ideal|\w+:", line)]
    assert names == list(REFERENCES)
    assert re.search(r"^ +warmup_steps=0 +≥ 0 *$", below, re.MULTILINE)
    assert re.search(r"period \(required\) +≥ 2 *$", below, re.MULTILINE)


def test_ranges_are_those_that_are_checked(call: Call) -> None:
    """One of each kind: a bound, an interval, choices."""
    found = settings_in(call("strategies")[1])
    assert found["local"]["period (required)"] == "≥ 1"
    assert found["async"]["outer_lr=1.0"] == "> 0"
    assert found["async"]["outer_momentum=0.0"] == "[0, 1)"
    assert found["async"]["schedule=cyclic"] == "cyclic, eager"
    found = settings_in(call("recipes")[1])
    assert re.fullmatch(r"\(0, 1\]", found["fedavg"]["fraction=1.0"])


def test_a_path_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets and colons are no markup."""
    console.print("report runs/[lr]:x:[/y]/report.html")
    assert capsys.readouterr().out == "report runs/[lr]:x:[/y]/report.html\n"
