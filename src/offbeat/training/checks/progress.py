"""Comparison of the workers' progress at a consensus and at the end of training."""

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch

from offbeat.averaging import Replica, Worker
from offbeat.averaging.votes import Sums
from offbeat.checkpoint.state import digest
from offbeat.errors import MismatchError
from offbeat.strategies.base import Strategy
from offbeat.training.checks.consistency import differences, value_text

logger = logging.getLogger("offbeat")


@dataclass(frozen=True)
class _Report:
    """A worker's progress.

    ``rates`` is a checksum of the learning rates. 0: not to be compared, for example after a
    warning. ``digest`` is a checksum that must be equal on all workers: before a consensus of the
    modules in ``also`` (0: none), and after the final mean of the model.
    """

    finishing: int
    step: int
    consensuses: int
    rates: int
    digest: int


class Progress:
    """Compares steps, learning rates and models, and logs warnings.

    Attributes:
        consensuses: Number of calls of ``Synchronizer.consensus``.
    """

    def __init__(self, worker: Worker, strategy: Strategy) -> None:
        self._worker, self._strategy, self.consensuses = worker, strategy, 0
        self._warned = False
        self._start = 0

    def note_start(self) -> None:
        """Store a checksum of the model from which training starts."""
        self._start = self._checksum()

    def _checksum(self) -> int:
        team = self._worker.team
        if team.everyone.size == 1 or team.sharded:
            return 0
        return digest([p for _, p in self._worker.replica.parameters])

    # -- comparison ------------------------------------------------------------------------------

    def compare(self, sums: Sums, also: Replica, *, finishing: bool) -> bool:
        """Compare the workers before a consensus. A collective.

        ``sums`` is the tally of the last round. ``also`` are the tensors of the modules that this
        worker averages, too. ``finishing`` is True if this worker ends training.

        Returns True if ``also`` is averaged in this consensus. A worker that ends training takes
        part in a consensus without modules, although it has given some to ``finish``.

        Raises:
            MismatchError: a worker has called ``consensus`` or ``finish`` with other modules. Or
                one worker has called ``consensus``, and all others end training after at least
                twice as many steps, and have never called it. Raised on all workers. In other cases
                workers may have stopped early, which is allowed.
        """
        what = "comparison of the progress"
        lines = "\n".join(also.describe())
        digest = (zlib.crc32(lines.encode()) or 1) if lines else 0
        reports = self._gather(what, finishing=finishing, digest=digest)
        self._refuse_one_sided(sums, reports)
        return _averages_also(reports)

    def _refuse_one_sided(self, sums: Sums, reports: Sequence[_Report]) -> None:
        if not 0 < sums.finishing < self._worker.size:
            return
        rank, *more = (rank for rank, each in enumerate(reports) if not each.finishing)
        steps, ended = reports[rank].step, [each for each in reports if each.finishing]
        if not more and all(not e.consensuses and e.step >= max(1, 2 * steps) for e in ended):
            other = int(rank == 0)
            raise MismatchError(
                f"rank {rank} called consensus() after {steps} steps, and rank {other} called "
                f"finish() after {reports[other].step} steps without any consensus(): every rank "
                f"must call consensus(), not only rank {rank}. The other ranks have trained "
                "without it meanwhile"
            )

    def compare_final(self) -> None:
        """Compare the models after the final mean. A collective."""
        reports = self._gather("the end of training", finishing=True, digest=self._checksum())
        differing = [str(i) for i, each in enumerate(reports) if each.digest != reports[0].digest]
        if differing and self._worker.team.everyone.rank == 0:
            logger.warning(
                "finish(): the final model of rank %s differs from that of rank 0. A likely reason "
                "is that parameters were changed outside of optimizer.step(), which %s does not "
                "average: change them in an optimizer's step",
                ", ".join(differing),
                self._strategy,
            )

    def warn_if_not_counted(self) -> None:
        """Warn if a replicated model has changed since the start although no step was counted."""
        worker = self._worker
        if not worker.step and self._checksum() != self._start:
            logger.warning(
                "rank %d: 0 steps counted, although the model has changed: Offbeat counts "
                "optimizer.step() of the attached optimizers. Use one instead of changing "
                "parameters by hand",
                worker.rank,
            )

    def _gather(self, what: str, *, finishing: bool, digest: int) -> list[_Report]:
        worker = self._worker
        communicator, rates = worker.team.everyone, self._rates()
        text = json.dumps(rates).encode()
        own = _Report(
            finishing,
            worker.step,
            self.consensuses,
            0 if self._warned or worker.leases_data else zlib.crc32(text) or 1,
            digest,
        )
        if communicator.size == 1:
            return [own]
        numbers = torch.tensor(astuple(own), dtype=torch.int64, device=communicator.control_device)
        gathered = communicator.gather(numbers, what=what).wait()
        reports = [_Report(*each.tolist()) for each in gathered]
        # All workers must take the same branch. A worker that joined later has not warned yet.
        if all(each.rates for each in reports) and _drifted(reports):
            texts = communicator.gather_bytes(text, what=what)
            self._warn(reports, [json.loads(each) for each in texts])
        return reports

    def _rates(self) -> dict[str, str]:
        return {
            f"the learning rate of optimizer {each.index}, group {i}": value_text(group["lr"])
            for each in self._worker.optimizers
            for i, group in enumerate(each.optimizer.param_groups)
            if "lr" in group
        }

    def _warn(self, reports: Sequence[_Report], rates: Sequence[Mapping[str, str]]) -> None:
        self._warned = True
        if self._worker.team.everyone.rank:
            return
        step = next(a.step for a in reports if _drifted([b for b in reports if b.step == a.step]))
        same = {rank: each for rank, each in enumerate(rates) if reports[rank].step == step}
        logger.warning(
            "after %d steps %s. Give each scheduler the same values on all ranks, such as the mean "
            "loss in consensus()",
            step,
            differences(same),
        )


def _averages_also(reports: Sequence[_Report]) -> bool:
    """Return True if the workers have given modules as ``also``. Raise if these differ."""
    digests = [each.digest for each in reports]
    asking = [each.digest for each in reports if not each.finishing] or digests
    given = next((digest for digest in asking if digest), 0)
    if given and min(digests) != max(digests):
        first = digests.index(given)
        rank = next(rank for rank, each in enumerate(digests) if each != given)
        raise MismatchError(
            f"rank {rank} has other modules in consensus(also=…) or finish(also=…) than rank "
            f"{first}: give modules with equal names and shapes to both calls on every rank"
        )
    return bool(given)


def _drifted(reports: Sequence[_Report]) -> bool:
    """Return True if workers with equally many steps have different learning rates."""
    pairs = {(each.step, each.rates) for each in reports}
    return len(pairs) > len({each.step for each in reports})
