"""Counts of the labels in each part of a partition, as a table.

A *partition* of a dataset is a list of parts. Part n holds the sample indices of worker n.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat.data.partition import Labels, Part, check_parts, group_by_label

_COLUMNS = 20  # largest number of label columns in the table


@dataclass(frozen=True, eq=False)
class PartitionTable:
    """Number of samples of each label on each worker. ``str()`` formats it as a table.

    Args:
        counts: Numbers of samples: one row per worker, one column per label.
        labels: The distinct labels, in the order of the columns.
    """

    counts: npt.NDArray[np.int64]
    labels: npt.NDArray[Any]

    @property
    def skew(self) -> float:
        """Label skew: mean distance of the workers' label distributions from the overall one.

        The distance of one worker is the total variation ½·Σ_k |p_k(worker) − p_k(all)|, where
        p_k is the share of label k. The skew is in [0, 1). It is 0 if all workers have the same
        distribution of labels. It is ½ for two equally frequent labels if worker 0 has all samples
        of one and worker 1 all samples of the other. Workers without samples do not count.
        """
        counts = self.counts[self.counts.sum(axis=1) > 0]
        if not counts.size:
            return 0.0
        distributions = counts / counts.sum(axis=1, keepdims=True)
        overall = counts.sum(axis=0) / counts.sum()
        return float(np.abs(distributions - overall).sum(axis=1).mean() / 2)

    def __str__(self) -> str:
        shown = [str(label) for label in self.labels[:_COLUMNS]]
        more = len(self.labels) - len(shown)
        rows = [["worker", "samples", "labels", *shown]]
        named = {str(worker): row for worker, row in enumerate(self.counts)}
        for name, row in {**named, "all": self.counts.sum(axis=0)}.items():
            totals = row.sum(), np.count_nonzero(row)
            rows.append([name, *map(str, totals), *map(str, row[:_COLUMNS])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        lines.append(f"skew {self.skew:.2f} (0: every worker has the mix of all)")
        if more:
            lines.append(f"{more} more labels are not shown")
        return "\n".join(lines)


def describe_partition(parts: Sequence[Part], labels: Labels) -> PartitionTable:
    """Count the samples of each label in each part. The result prints as a table.

    Args:
        parts: Sample indices of each worker, for example from ``partition_by_label`` or
            ``partition_dirichlet``. Samples that are in no part are not counted.
        labels: Label of each sample of the dataset, integers or strings.

    Raises:
        TypeError: ``labels`` or ``parts`` has the wrong type.
        ValueError: There are no parts or no labels, an index has no label, or an index occurs
            twice.
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
    return PartitionTable(np.stack(counts), values)
