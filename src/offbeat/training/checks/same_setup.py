"""Compares settings and shapes between the workers before training, and copies from rank 0.

``same_tensors`` compares values, at a consensus and at the end.
"""

import hashlib
import itertools
from collections.abc import Sequence

from offbeat.averaging import AttachedOptimizer
from offbeat.averaging.replica import Replica
from offbeat.errors import MismatchError
from offbeat.strategies.base import GlobalModel, Strategy
from offbeat.transport.communicator import Communicator

PROTOCOL = 4
"""Version of the messages between workers. A release that changes messages increases it."""


def describe(
    strategy: Strategy | None, replica: Replica, optimizers: Sequence[AttachedOptimizer]
) -> list[str]:
    """Describe strategy, optimizers and model in lines that must be equal on all workers.

    A checkpoint contains these lines, too. Tensors are described by name, shape and dtype, not by
    their values. Their order in memory must be equal if the strategy averages models, because the
    numbers are sent in this order. Without a strategy, the lines are those of optimizers and model.
    """
    lines = []
    for each in optimizers:
        groups = [len(group["params"]) for group in each.optimizer.param_groups]
        kind = type(each.optimizer).__name__
        lines.append(f"optimizer {each.index}: {kind} with groups of {groups} parameters")
    lines += replica.describe()
    if strategy is None:
        return lines
    lines.insert(0, f"strategy {strategy!r}")
    if isinstance(strategy.averages(), GlobalModel):
        lines += [
            f"parameter {name!r} with the strides {p.stride()} in memory, as channels_last has"
            for name, p in replica.parameters
            if not p.is_contiguous()
        ]
    return lines


def require_same_setup(communicator: Communicator, lines: Sequence[str]) -> None:
    """Compare ``lines`` between the workers. A collective.

    Texts are exchanged only if their hashes differ.

    Raises:
        MismatchError: a worker's lines differ from those of rank 0. Raised on every worker.
    """
    what = "comparison of the models"
    text = "\n".join(versioned(lines)).encode()
    hashes = communicator.gather_bytes(hashlib.sha512(text).digest(), what=what)
    if len(set(hashes)) > 1:
        texts = communicator.gather_bytes(text, what=what)
        all_lines = [each.decode().split("\n") for each in texts]
        for rank in range(len(all_lines)):
            if message := difference(all_lines, rank, 0):
                raise MismatchError(message)


def versioned(lines: Sequence[str]) -> list[str]:
    """Return ``lines`` after a first line with the ``PROTOCOL`` version."""
    return [f"protocol {PROTOCOL}", *lines]


def difference(lines: Sequence[Sequence[str]], rank: int, first: int) -> str:
    """Describe the first difference between the lines of the workers ``rank`` and ``first``.

    ``lines`` has the ``versioned`` lines of every worker, in rank order. The result is empty if
    there is no difference.
    """
    found = first_difference(lines[rank], lines[first])
    if found is None:
        return ""
    protocols = lines[rank][0] != lines[first][0]
    advice = "; install the same version of offbeat everywhere" if protocols else ""
    return (
        f"rank {rank} differs from rank {first}: rank {rank} has {found[0]}; rank {first} has "
        f"{found[1]}{advice}"
    )


def first_difference(lines: Sequence[str], reference: Sequence[str]) -> tuple[str, str] | None:
    """Return the first line that differs, and that of the reference. None: all are equal."""
    pairs = itertools.zip_longest(lines, reference, fillvalue="nothing more")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)
