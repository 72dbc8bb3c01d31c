"""Comparison of the workers: of their modules at a consensus, of their models at the end."""

import logging
import zlib
from typing import Any

import torch

from offbeat.averaging import Replica, Worker
from offbeat.averaging.flat import as_real
from offbeat.averaging.votes import Vote
from offbeat.errors import MismatchError
from offbeat.strategies.base import Strategy

logger = logging.getLogger("offbeat")


def checksum(worker: Worker, *, whole: bool = False) -> int:
    """Return a CRC-32 of the averaged parameters. 0 if the model is divided or has one worker.

    ``whole`` includes all other tensors that ``state_dict`` saves, such as frozen parameters.
    """
    found = 0
    if worker.team.everyone.size == 1 or worker.team.sharded:
        return found
    replica = worker.replica
    for tensor in replica.saved() if whole else [p for _, p in replica.parameters]:
        values = as_real(tensor.detach()).clone(memory_format=torch.contiguous_format)
        content: Any = values.cpu().reshape(-1).view(torch.uint8).numpy()
        found = zlib.crc32(content, found)
    return found


def compare_modules(worker: Worker, sums: Vote, also: Replica, *, finishing: bool) -> bool:
    """Compare the modules ``also`` before a consensus. A collective if a worker has modules.

    ``sums`` is the sum of the votes of the last round. ``finishing`` is True if this worker
    ends training. It then takes part in a consensus without modules, although it has given some
    to ``finish``. Returns True if the modules are averaged.

    Raises:
        MismatchError: the modules of two workers differ. Raised on all workers.
    """
    if not sums.also:
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
    everyone = worker.team.everyone
    own = checksum(worker, whole=True)
    models = everyone.gather_numbers([own], what="the end of training").wait()
    differing = [str(rank) for rank, model in enumerate(models) if model != models[0]]
    if differing and everyone.rank == 0:
        logger.warning(
            "finish(): the final model of rank %s differs from that of rank 0. Likely reasons are "
            "changes that %s does not average: of parameters outside of optimizer.step(), of "
            "frozen parameters, or of buffers that the model did not have in attach()",
            ", ".join(differing),
            strategy,
        )


def warn_if_not_counted(worker: Worker, start: int) -> None:
    """Warn if no step was counted, although the model's ``checksum`` at the start differs."""
    if not worker.step and checksum(worker) != start:
        logger.warning(
            "rank %d: 0 steps counted, although the model has changed: Offbeat counts "
            "optimizer.step() of the attached optimizers. Use one instead of changing parameters "
            "by hand",
            worker.rank,
        )
