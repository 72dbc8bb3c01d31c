"""Matplotlib figures. Matplotlib is an optional dependency, which only this module imports."""

from typing import Any


def new_figure(width: float, height: float, *, dpi: int) -> tuple[Any, Any]:
    """Return an empty figure of this size in inches, and its axes.

    pyplot is not used, so a notebook keeps its plotting backend and no figure has to be closed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'offbeat[lab]'") from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    return figure, figure.subplots()
