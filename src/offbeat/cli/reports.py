"""The command that makes tables and pages from results: ``offbeat report``."""

from pathlib import Path

from offbeat.cli.outputs import require_file
from offbeat.cli.view import console
from offbeat.lab.report import page
from offbeat.lab.results import read_results


def report(results: Path, output: Path | None) -> None:
    """Make the page of a comparison from its results: one HTML file that needs no other."""
    if results.is_dir():
        raise ValueError(f"{results} is a directory; name its results.jsonl")
    if not results.exists():
        raise FileNotFoundError(f"looked for results in {results}, which does not exist")
    path = results.with_name("report.html") if output is None else output
    require_file("--output", path)
    found = read_results(results)
    if not found:
        raise ValueError(f"{results} holds no result")
    text = page(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    console.print(f"report  {path}", highlight=False, soft_wrap=True)
