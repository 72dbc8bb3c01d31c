"""What must be alike on all workers before they train together."""

import hashlib
import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn

from offbeat.averaging import AttachedOptimizer
from offbeat.averaging.buckets import make_buckets
from offbeat.averaging.replica import Replica
from offbeat.errors import MismatchError
from offbeat.strategies.base import Strategy
from offbeat.transport.communicator import Communicator
from offbeat.transport.team import Team

logger = logging.getLogger("offbeat")

PROTOCOL = 1
"""Raised by a version of Offbeat whose workers say something else than those of the one before."""

Settings = Mapping[str, str]
_SHOWN = 4  # differences in one warning


def describe(
    strategy: Strategy, replica: Replica, optimizers: Sequence[AttachedOptimizer]
) -> list[str]:
    """What must be equal on all workers: strategy, optimizers and tensors, one line each."""
    lines = [
        f"optimizer {one.index}: {type(one.optimizer).__name__} with {len(one.parameters)} "
        "parameters"
        for one in optimizers
    ]
    return [f"strategy {strategy!r}", *lines, *replica.describe()]


def settings_of(model: nn.Module, optimizers: Sequence[AttachedOptimizer]) -> Settings:
    """Settings that may differ between workers and rarely should, by name."""
    found = {"the version of offbeat": _own_version(), "the version of torch": torch.__version__}
    for one in optimizers:
        for i, group in enumerate(one.optimizer.param_groups):
            where = f"optimizer {one.index}, group {i}"
            found[f"the number of parameters of {where}"] = str(len(group["params"]))
            for name, value in group.items():
                if name != "params" and _is_plain(value):
                    found[f"{name} of {where}"] = _shown(value)
    for name, module in model.named_modules():
        which = f"module {name!r}" if name else "the model"
        found[f"the mode of {which}"] = "train()" if module.training else "eval()"
    return found


def _own_version() -> str:
    try:
        return version("offbeat")
    except PackageNotFoundError:  # imported from where it was not installed
        return "not installed"


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, bool | int | float | str)


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, Tensor):
        value = value.item()
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def require_agreement(
    communicator: Communicator, lines: Sequence[str], settings: Settings | None = None
) -> None:
    """Compare ``lines`` between the workers, first by hash, then line by line.

    Different ``settings`` are allowed, but each worker warns of them.

    Raises:
        MismatchError: on every worker, naming the rank that differs from rank 0 and how.
    """
    what = "comparison of the models"
    settings = settings or {}
    text = "\n".join(versioned(lines)).encode()
    more = json.dumps(settings).encode()
    hashes = communicator.gather_bytes(_hash(text) + _hash(more), what=what)
    if len({one[: len(_hash(text))] for one in hashes}) > 1:
        others = [one.decode().split("\n") for one in communicator.gather_bytes(text, what=what)]
        _raise_difference(others)
    if len(set(hashes)) > 1:
        told = [json.loads(one) for one in communicator.gather_bytes(more, what=what)]
        message = f"the workers are not alike, and train all the same: {_differences(told)}"
        if communicator.rank == 0:
            logger.warning("%s", message)
        warnings.warn(message, stacklevel=4)  # in the line that called attach()


def versioned(lines: Sequence[str]) -> list[str]:
    """The lines after that of the protocol, which must be alike, too."""
    return [f"protocol {PROTOCOL}", *lines]


def _hash(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _raise_difference(others: Sequence[Sequence[str]]) -> None:
    for rank in range(len(others)):
        if text := difference(others, rank, 0):
            raise MismatchError(text)


def difference(lines: Sequence[Sequence[str]], rank: int, first: int) -> str:
    """How the lines of ``rank`` differ from those of rank ``first``; empty if they do not."""
    other, one = lines[rank], lines[first]
    for i in range(max(len(other), len(one))):
        theirs = other[i] if i < len(other) else "nothing more"
        ours = one[i] if i < len(one) else "nothing more"
        if theirs != ours:
            advice = "; install the same version of offbeat everywhere" if i == 0 else ""
            return (
                f"rank {rank} differs from rank {first}: rank {rank} has {theirs}; rank {first} "
                f"has {ours}{advice}"
            )
    return ""


def _differences(told: Sequence[Settings]) -> str:
    """Which settings differ, with the ranks that have each value."""
    shown = []
    for name in dict.fromkeys(name for one in told for name in one):
        ranks: dict[str, list[str]] = {}
        for rank, one in enumerate(told):
            ranks.setdefault(one.get(name, "nothing"), []).append(str(rank))
        if len(ranks) > 1:
            values = (f"{value} on rank {', '.join(of)}" for value, of in ranks.items())
            shown.append(f"{name} is {' and '.join(values)}")
    more = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return "; ".join(shown[:_SHOWN]) + more


def copy_rank_0(team: Team, tensors: Iterable[Tensor]) -> None:
    """All processes start from rank 0's values of ``tensors``, in place."""
    if team.everyone.size == 1:
        return
    for bucket in make_buckets(tensors):
        bucket.pack()
        team.communicator.broadcast(bucket.flat, what="copy of rank 0's model").wait()
        bucket.unpack()  # on rank 0 as well, which may be a node of several workers
