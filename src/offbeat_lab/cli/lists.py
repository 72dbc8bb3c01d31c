"""Implementations of the commands ``recipes`` and ``report``."""

from pathlib import Path

from offbeat.extend import Table, console, print_kinds, print_table
from offbeat_lab.baselines import PUBLISHED
from offbeat_lab.methods.registry import REFERENCES
from offbeat_lab.recipes import RECIPES
from offbeat_lab.report import page
from offbeat_lab.results import read_results, writing


def recipes() -> None:
    """List the recipes, and strategies and references to compare with, with their settings."""
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
    console.print("Your own: path/to/file.py\n", highlight=False)
    print_kinds("strategy", PUBLISHED)
    console.print("As text: name:setting=value,setting=value\n", highlight=False)
    print_kinds("reference", REFERENCES)
    console.print("As text: name,setting=value,setting=value", highlight=False)


def report(results: Path, output: Path | None) -> None:
    """Write the HTML page of a comparison."""
    if results.is_dir():
        raise ValueError(f"{results} is a directory; name its results.jsonl")
    if not results.exists():
        raise FileNotFoundError(f"looked for results in {results}, which does not exist")
    path = results.with_name("report.html") if output is None else output
    if path.is_dir():
        raise ValueError(f"--output {path}: it is a directory; name a file")
    read = read_results(results, trials=True)
    if all(result.trial is not None for result in read):
        raise ValueError(f"{results} holds no result of a comparison")
    text = page(read)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        path.write_text(text, encoding="utf-8")
    console.print(f"report {path}", highlight=False, soft_wrap=True)
