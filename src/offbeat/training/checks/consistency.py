"""Comparison of models, optimizers and settings between the workers, and copies from rank 0."""

import hashlib
import itertools
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
from offbeat.strategies.base import SharedModel, Strategy
from offbeat.transport.communicator import Communicator
from offbeat.transport.team import Team

logger = logging.getLogger("offbeat")

PROTOCOL = 3
"""Version of the messages between workers. A release that changes messages increases it."""

Settings = Mapping[str, str]
_SHOWN = 4  # largest number of differences in one warning


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
    if isinstance(strategy.averages(), SharedModel):
        lines += [
            f"parameter {name!r} with the strides {p.stride()} in memory, as channels_last has"
            for name, p in replica.parameters
            if not p.is_contiguous()
        ]
    return lines


def settings_of(model: nn.Module, optimizers: Sequence[AttachedOptimizer]) -> Settings:
    """Return settings, by name, that should be equal on all workers. Unequal ones cause a warning.

    They are the versions of offbeat and torch, the hyper-parameters of each parameter group that
    are plain values, and the mode of each module (``train()`` or ``eval()``).
    """
    settings = {"the version of offbeat": _own_version(), "the version of torch": torch.__version__}
    for each in optimizers:
        for i, group in enumerate(each.optimizer.param_groups):
            where = f"optimizer {each.index}, group {i}"
            for name, value in group.items():
                if name != "params" and _is_plain(value):
                    settings[f"{name} of {where}"] = value_text(value)
    for name, module in model.named_modules():
        shown = f"module {name!r}" if name else "the model"
        settings[f"the mode of {shown}"] = "train()" if module.training else "eval()"
    return settings


def _own_version() -> str:
    try:
        return version("offbeat")
    except PackageNotFoundError:  # imported from a source tree
        return "not installed"


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, bool | int | float | str)


def value_text(value: object) -> str:
    """Return the text of a plain value, or of a tensor with one element."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(value_text, value))})"
    if isinstance(value, Tensor):
        value = value.item()
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def require_consistency(
    communicator: Communicator, lines: Sequence[str], settings: Settings | None = None
) -> None:
    """Compare ``lines`` and ``settings`` between the workers. A collective.

    If only the settings differ, every worker warns. Texts are exchanged only if their hashes
    differ.

    Raises:
        MismatchError: a worker's lines differ from those of rank 0. Raised on every worker.
    """
    what = "comparison of the models"
    settings = settings or {}
    text = "\n".join(versioned(lines)).encode()
    settings_text = json.dumps(settings).encode()
    hashes = communicator.gather_bytes(_hash(text) + _hash(settings_text), what=what)
    if len({each[: len(_hash(text))] for each in hashes}) > 1:
        texts = communicator.gather_bytes(text, what=what)
        all_lines = [each.decode().split("\n") for each in texts]
        for rank in range(len(all_lines)):
            if message := difference(all_lines, rank, 0):
                raise MismatchError(message)
    if len(set(hashes)) > 1:
        texts = communicator.gather_bytes(settings_text, what=what)
        found = differences({rank: json.loads(each) for rank, each in enumerate(texts)})
        message = f"the workers differ, but training continues: {found}"
        if communicator.rank == 0:
            logger.warning("%s", message)
        warnings.warn(message, stacklevel=5)  # points to the line that called attach()


def versioned(lines: Sequence[str]) -> list[str]:
    """Return ``lines`` after a first line with the ``PROTOCOL`` version."""
    return [f"protocol {PROTOCOL}", *lines]


def _hash(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


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


def differences(settings: Mapping[int, Settings]) -> str:
    """Describe the settings that differ, given the settings of each rank.

    The text contains each value with the ranks that have it.
    """
    found = []
    for name in dict.fromkeys(name for each in settings.values() for name in each):
        ranks: dict[str, list[str]] = {}
        for rank, each in settings.items():
            ranks.setdefault(each.get(name, "nothing"), []).append(str(rank))
        if len(ranks) > 1:
            values = (f"{value} on rank {', '.join(where)}" for value, where in ranks.items())
            found.append(f"{name} is {' and '.join(values)}")
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def copy_rank_0(team: Team, tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values of ``tensors`` to all workers, in place. A collective."""
    if team.everyone.size == 1:
        return
    communicator = team.of_models.communicator
    for bucket in make_buckets(tensors):
        bucket.pack()
        communicator.broadcast(bucket.flat, what="copy of rank 0's model").wait()
        if communicator.rank:
            bucket.unpack()
        bucket.release()
