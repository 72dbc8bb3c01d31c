"""Tables as Markdown and HTML, and figures of matplotlib."""

import sys
from pathlib import Path

import pytest

from offbeat.display.plots import new_figure
from offbeat.display.table import Table


def test_markdown() -> None:
    """Caption, headings, and a line per row whose first cell is code."""
    table = Table(("name", "cost"), (("bsp", "1 s"), ("local:period=8", "2 s")), "what it is")
    assert table.markdown() == (
        "what it is\n\n| name | cost |\n|---|---|\n| `bsp` | 1 s |\n| `local:period=8` | 2 s |\n"
    )
    assert Table(("name",), (("bsp",),)).markdown() == "| name |\n|---|\n| `bsp` |\n"


def test_a_figure_leaves_the_backend_alone(tmp_path: Path) -> None:
    """It does not use pyplot: a notebook keeps its backend, and no figure stays open."""
    pytest.importorskip("matplotlib")
    pyplot = sys.modules.pop("matplotlib.pyplot", None)
    try:
        figure, axes = new_figure(2, 1, dpi=50)
        axes.plot([0, 1], [0, 1])
        figure.savefig(tmp_path / "plot.png", format="png")
        assert "matplotlib.pyplot" not in sys.modules
    finally:
        if pyplot is not None:
            sys.modules["matplotlib.pyplot"] = pyplot
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plots need matplotlib: pip install 'offbeat\[lab\]'"):
        new_figure(2, 1, dpi=50)
