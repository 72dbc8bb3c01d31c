"""One small picture, to be read on a telephone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import RESULTS


@contextmanager
def sketch(name: str, x: str, y: str, *, of: int = 1) -> Iterator[Any]:
    """Axes to draw on, side by side if several, saved as ``results/NAME.png``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, of, figsize=(4.8 * of, 3.6), layout="constrained")
    every = [axes] if of == 1 else list(axes)
    for one in every:
        one.set(xlabel=x, ylabel=y)
        one.grid(alpha=0.3)
    yield axes
    for one in every:
        if one.get_legend_handles_labels()[0]:
            one.legend(fontsize="small")
    figure.savefig(RESULTS / f"{name}.png", dpi=100)
    plt.close(figure)
