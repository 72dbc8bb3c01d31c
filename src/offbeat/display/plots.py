"""The one door to matplotlib, which is an extra."""

import io
from typing import Any

INK = "#010203"
"""The colour of text and axes of a figure for a page: ``as_svg`` makes it that of the page."""


_TOLD = ("Date", "Creator", "Format", "Type")  # what a file says of itself, addresses among it


def new_figure(width: float, height: float, *, dpi: int) -> tuple[Any, Any]:
    """An empty figure of so many inches, and its axes.

    Made without pyplot: a notebook keeps its backend, and no figure stays open.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'offbeat[plot]'") from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    return figure, figure.subplots()


def as_svg(figure: Any) -> str:
    """A figure as an SVG element for a page: no background, and what is ``INK`` has its colour.

    Every text is drawn, so it looks alike everywhere. The same figure gives the same text.
    """
    from matplotlib import rc_context

    told = io.StringIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "offbeat"}):
        figure.savefig(told, format="svg", transparent=True, metadata=dict.fromkeys(_TOLD))
    text = told.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor").strip()
