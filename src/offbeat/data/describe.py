"""Which worker holds how many samples of which label: a table and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat.data.partition import Labels, Share, check_parts, group_by_label
from offbeat.display.plots import new_figure

_COLUMNS = 20  # labels shown by the table; as many as fit a wide terminal
_TICKS = 30  # labels and workers named by the picture


@dataclass(frozen=True, eq=False)
class PartitionTable:
    """How many samples of each label each worker holds; ``str()`` is an aligned table.

    Args:
        counts: Samples, [workers, labels].
        labels: The different labels, in the order of the columns.
    """

    counts: npt.NDArray[np.int64]
    labels: npt.NDArray[Any]

    @property
    def skew(self) -> float:
        """How far the workers' mixes of labels are from the mix of all: 0 for IID, below 1.

        The mean over workers of ½·Σ_k |p_k(worker) − p_k(all)|: the share of a worker's samples
        that would have to be of another label. Workers without samples do not count.
        """
        own = self.counts[self.counts.sum(axis=1) > 0]
        if not own.size:
            return 0.0
        mixes = own / own.sum(axis=1, keepdims=True)
        everyone = own.sum(axis=0) / own.sum()
        return float(np.abs(mixes - everyone).sum(axis=1).mean() / 2)

    def __str__(self) -> str:
        shown = [str(label) for label in self.labels[:_COLUMNS]]
        more = len(self.labels) - len(shown)
        rows = [["worker", "samples", "labels", *shown]]
        for worker, row in enumerate(self.counts.tolist()):
            held = sum(count > 0 for count in row)
            rows.append([str(worker), str(sum(row)), str(held), *map(str, row[:_COLUMNS])])
        total = self.counts.sum(axis=0).tolist()
        held = sum(count > 0 for count in total)
        rows.append(["all", str(sum(total)), str(held), *map(str, total[:_COLUMNS])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        lines.append(f"skew {self.skew:.2f} (0: every worker has the mix of all)")
        if more:
            lines.append(f"{more} more labels are not shown")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draw the counts as a heat map, a row a worker and a column a label, as a PNG.

        Args:
            path: Where to.

        Raises:
            ImportError: matplotlib is not installed.
        """
        workers, labels = self.counts.shape
        width, height = (2.5 + 0.35 * min(labels, _TICKS), 1.5 + 0.35 * min(workers, _TICKS))
        figure, axes = new_figure(width, height, dpi=120)
        picture = axes.imshow(self.counts, aspect="auto", cmap="viridis", vmin=0)
        columns = range(0, labels, -(-labels // _TICKS))
        rows = range(0, workers, -(-workers // _TICKS))
        names = [str(self.labels[column]) for column in columns]
        axes.set_xticks(columns, names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(rows, [str(row) for row in rows])
        axes.set(xlabel="label", ylabel="worker")
        figure.colorbar(picture, ax=axes, label="samples")
        figure.savefig(path, format="png")


def describe_partition(
    parts: Sequence[Share], labels: Labels, path: str | Path | None = None
) -> PartitionTable:
    """Count the samples of each label in each part; ``print`` the result to see them.

    Args:
        parts: The samples of each worker, as ``partition_by_label`` and ``partition_dirichlet``
            return them. They need not hold all samples.
        labels: The label of each sample of the dataset, integers or strings.
        path: Also draw the table as a heat map, as PNG, to here; None draws nothing.

    Raises:
        TypeError: labels or parts of another type.
        ValueError: no parts, or parts that do not fit the labels.
        ImportError: ``path`` is given and matplotlib is not installed.
    """
    values, groups = group_by_label(labels)
    if len(parts) == 0:
        raise ValueError("parts must hold one list of indices for each worker, got none")
    column = np.empty(sum(map(len, groups)), np.int64)
    for number, samples in enumerate(groups):
        column[samples] = number
    counts = [
        np.bincount(column[part], minlength=len(values)) for part in check_parts(parts, len(column))
    ]
    table = PartitionTable(np.stack(counts), values)
    if path is not None:
        table.plot(path)
    return table
