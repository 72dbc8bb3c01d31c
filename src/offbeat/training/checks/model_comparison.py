"""Compares modules between the workers before a consensus, and models at the end of training."""

import json
import logging
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.averaging import Replica, Worker
from offbeat.averaging.flat import as_real
from offbeat.averaging.votes import ALSO, Vote
from offbeat.errors import MismatchError
from offbeat.strategies.base import Strategy
from offbeat.training.checks.compatibility import unusable

logger = logging.getLogger("offbeat")


def comparable(worker: Worker) -> dict[str, Tensor]:
    """Return the tensors of the model that workers can compare, sorted by name.

    Empty if there is one worker, or ``fully_shard`` has divided the model.
    """
    if _incomparable(worker):
        return {}
    found = sorted(worker.replica.saved().items())
    return {name: tensor for name, tensor in found if unusable(tensor) is None}


def _incomparable(worker: Worker) -> bool:
    return worker.team.everyone.size == 1 or worker.team.sharded


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a CRC-32 of the values."""
    found = 0
    for tensor in tensors:
        values = as_real(tensor.detach()).contiguous().cpu()
        content: Any = values.reshape(-1).view(torch.uint8).numpy()
        found = zlib.crc32(content, found)
    return found


def model_checksum(worker: Worker) -> int:
    """Return the checksum of the averaged parameters, 0 if the workers cannot be compared."""
    return 0 if _incomparable(worker) else checksum(p for _, p in worker.replica.parameters)


def named(names: Sequence[str]) -> str:
    """Return a text with the first of the ``names`` of tensors, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def compare_modules(worker: Worker, sums: Vote, also: Replica, *, finishing: bool) -> bool:
    """Compare the modules ``also`` before a consensus. A collective if a worker has modules.

    ``sums`` is the sum of the votes of the last round. ``finishing`` is True if this worker
    ends training. It then takes part in a consensus without modules, although it has given some
    to ``finish``. Returns True if the modules are averaged.

    Raises:
        MismatchError: the modules of two workers differ. Raised on all workers.
    """
    if not sums.has(ALSO):
        return False
    text = "\n".join(also.describe())
    digest = (zlib.crc32(text.encode()) or 1) if text else 0
    reports = worker.team.everyone.gather_numbers(
        [finishing, digest], what="comparison of the modules"
    ).wait()
    digests = [each for _, each in reports]
    asking = [each for ended, each in reports if not ended] or digests
    given = next((each for each in asking if each), 0)
    if given and len(set(digests)) > 1:
        first = digests.index(given)
        rank = next(rank for rank, each in enumerate(digests) if each != given)
        raise MismatchError(
            f"rank {rank} has other modules in consensus(also=…) or finish(also=…) than rank "
            f"{first}: give modules with equal names and shapes to both calls on every rank"
        )
    return bool(given)


def compare_final(worker: Worker, strategy: Strategy) -> None:
    """Compare the models after the final mean. A collective."""
    everyone, tensors = worker.team.everyone, comparable(worker)
    what = "the end of training"
    models = everyone.gather_numbers([checksum(tensors.values())], what=what).wait()
    if models == [models[0]] * len(models):
        return
    sums = {name: checksum([tensor]) for name, tensor in tensors.items()}
    texts = everyone.gather_bytes(json.dumps(sums).encode(), what=what)
    if everyone.rank == 0:
        found = [json.loads(text) for text in texts]
        names = sorted(set().union(*found))
        logger.warning(
            "finish(): the final model of rank %s differs from that of rank 0: %s. A likely reason "
            "is that they were changed outside of optimizer.step(), which %s does not average, or "
            "created on some workers only: change them in an optimizer's step, and create them "
            "before attach()",
            ", ".join(str(rank) for rank, each in enumerate(found) if each != found[0]),
            named([name for name in names if len({each.get(name) for each in found}) > 1]),
            strategy,
        )


def warn_if_not_counted(worker: Worker, start: int) -> None:
    """Warn if no step was counted, although the model's ``checksum`` at the start differs."""
    if not worker.step and model_checksum(worker) != start:
        logger.warning(
            "rank %d: 0 steps counted, although the model has changed: Offbeat counts "
            "optimizer.step() of the attached optimizers. Use one instead of changing parameters "
            "by hand",
            worker.rank,
        )
