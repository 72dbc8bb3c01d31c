"""Matplotlib figures. Matplotlib is an optional dependency, which only this module imports."""

import io
from typing import Any

INK = "#010203"
"""Placeholder colour for text and axes. ``as_svg`` replaces it by the page's text colour."""

_METADATA = ("Date", "Creator", "Format", "Type")  # left out, so that equal figures give equal text


def new_figure(width: float, height: float, *, dpi: int) -> tuple[Any, Any]:
    """Return an empty figure of this size in inches, and its axes.

    pyplot is not used, so a notebook keeps its plotting backend and no figure has to be closed.

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
    """Return a figure as an SVG element for an HTML page.

    The background is transparent, and ``INK`` becomes the text colour of the page. Letters are
    drawn as paths, so they do not depend on fonts. Equal figures give equal SVG text.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "offbeat"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor").strip()
