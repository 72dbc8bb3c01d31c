"""Result tables on a narrow screen."""

import re
from pathlib import Path

import pytest

from lab.test_report import make
from offbeat.cli import view
from offbeat.lab import report

NAMES = (
    "local:period=8 --sampler defdp --wire int8",
    "selsync:target_lssr=0.9,window=5,max_interval=32",
    "torch:ddp,hook=powersgd,rank=2",
    "async:schedule=eager,staleness=16,outer_momentum=0.9",
)


@pytest.mark.parametrize("with_ideal", [False, True])
def test_names_are_not_broken_in_80_columns(
    with_ideal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line ends after a comma, colon or space."""
    monkeypatch.setattr(view.console, "width", 80)
    results = [make(name, [(100, 0.5)]) for name in NAMES]
    if with_ideal:
        results.append(make("ideal", [(100, 0.99)]))
    view.print_narrow_table(report.table(results, ranges=False), rest="table.md has them")
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    for name in NAMES:
        assert all(piece in out for piece in re.split("[,: ]", name)), out
    assert "Not shown" not in out


def test_a_path_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets and colons are no markup."""
    view.print_path("report", Path("runs/[lr]:x:[/y]/report.html"))
    assert capsys.readouterr().out == "report runs/[lr]:x:[/y]/report.html\n"
