"""The one door to matplotlib, which is an extra."""

from typing import Any


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
