"""What must be alike on all workers before they train together."""

import hashlib
from collections.abc import Iterable, Sequence

from torch import Tensor

from offbeat.errors import MismatchError
from offbeat.fabric import Communicator
from offbeat.means.replica import Replica, make_buckets
from offbeat.strategies.base import Part, Strategy


def describe(strategy: Strategy, replica: Replica, parts: Sequence[Part]) -> list[str]:
    """What must be alike on all workers: strategy, optimizers, tensors; one line each."""
    optimizers = [
        f"optimizer {p.index}: {type(p.optimizer).__name__} with {len(p.parameters)} parameters"
        for p in parts
    ]
    return [f"strategy {strategy!r}", *optimizers, *replica.describe()]


def require_agreement(fabric: Communicator, lines: Sequence[str]) -> None:
    """Compare ``lines`` between the workers, first by hash, then line by line.

    Raises:
        MismatchError: on every worker, naming the rank that differs from rank 0 and how.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    if len(set(fabric.gather_bytes(digest, what="comparison of the models"))) == 1:
        return
    text = "\n".join(lines).encode()
    others = [
        other.decode().split("\n")
        for other in fabric.gather_bytes(text, what="comparison of the models")
    ]
    for rank, other in enumerate(others):
        for i in range(max(len(other), len(others[0]))):
            theirs = other[i] if i < len(other) else "nothing more"
            ours = others[0][i] if i < len(others[0]) else "nothing more"
            if theirs != ours:
                raise MismatchError(
                    f"rank {rank} differs from rank 0: rank {rank} has {theirs}; rank 0 has {ours}"
                )


def copy_rank_0(fabric: Communicator, tensors: Iterable[Tensor]) -> None:
    """All workers start from rank 0's values of ``tensors``, in place."""
    if fabric.size == 1:
        return
    for bucket in make_buckets(tensors):
        bucket.pack()
        fabric.broadcast(bucket.flat, what="copy of rank 0's model").wait()
        if fabric.rank != 0:
            bucket.unpack()
