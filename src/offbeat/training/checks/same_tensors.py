"""Comparison of the values of tensors between the workers, at a consensus and at the end.

Workers may differ in tensors that no training step averages. A frozen parameter is equal on all
workers after ``attach``, unless the script changes it later, as the teacher of a mean teacher. A
parameter or buffer that is created after ``attach`` is not known to the strategy: for example, a
buffer that the first forward pass fills, or a mask for pruning.
"""

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.averaging import Worker
from offbeat.averaging.flat import as_real
from offbeat.averaging.votes import UNAVERAGED, Vote
from offbeat.strategies.base import Strategy
from offbeat.training.checks.compatibility import unusable

logger = logging.getLogger("offbeat")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 2**24  # numbers whose bits are added at a time, because torch copies them to int64
_Row = list[Any]
"""Shape, dtype and checksum of a tensor."""


class TensorComparison:
    """Finds tensors that differ between the workers: those that a consensus combines, and others.

    Nothing is sent at a consensus as long as no tensor that is not averaged has changed on any
    worker. Nothing is compared if there is one worker, or ``fully_shard`` has divided the model.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._warned = worker, False
        self._start: dict[str, int] = {}

    def note_start(self) -> None:
        """Note the values, with which training starts. They are equal on all workers."""
        self._start = self._fingerprints()

    def has_changed(self) -> bool:
        """Return True if a tensor that is not averaged has changed since ``note_start``, or is new.

        Costs one pass over these tensors.
        """
        self._worker.replica.included = ()
        return not self._fingerprints().items() <= self._start.items()

    def include(self, sums: Vote) -> None:
        """Let the consensus combine the tensors that differ. A collective if one has changed.

        ``sums`` is the sum of the votes of the last round. A tensor that only some workers have, or
        with different shapes, is left out.
        """
        worker = self._worker
        worker.replica.included = ()
        (changed,) = worker.team.maximum_over_node(float(sums.has(UNAVERAGED)))
        if not changed:
            return
        rows = self._gather(self._unaveraged(), "comparison of the tensors")
        names = _differing(rows)
        worker.replica.included = included = [
            name
            for name in names
            if all(name in each and each[name][:2] == rows[0][name][:2] for each in rows)
        ]
        if included and not self._warned and worker.team.everyone.rank == 0:
            self._warned = True
            logger.warning(
                "%s: consensus() and finish() average what training does not: frozen parameters "
                "that the script changes, and tensors that were created after attach(). They "
                "differ between the workers in between. Create tensors before attach(), or attach "
                "again; keep a moving average in a module outside of the model, and give it as "
                "also=[…]",
                _listed(included),
            )

    def compare_final(self, strategy: Strategy) -> None:
        """Warn on rank 0 if the models differ after the final mean. A collective."""
        everyone, tensors = self._worker.team.everyone, self._comparable()
        what = "the end of training"
        models = everyone.gather_numbers([_checksum(tensors.values())], what=what).wait()
        if models == [models[0]] * len(models):
            return
        rows = self._gather(tensors, what)
        if everyone.rank == 0:
            logger.warning(
                "finish(): the final model of rank %s differs from that of rank 0: %s. A likely "
                "reason is that they were changed outside of optimizer.step(), which %s does not "
                "average, or created on some workers only: change them in an optimizer's step, and "
                "create them before attach()",
                ", ".join(str(rank) for rank, each in enumerate(rows) if each != rows[0]),
                _listed(_differing(rows)),
                strategy,
            )

    def _gather(self, tensors: Mapping[str, Tensor], what: str) -> list[dict[str, _Row]]:
        """Return the rows of the ``tensors`` of every worker, in rank order. A collective."""
        rows = {
            name: [list(tensor.shape), str(tensor.dtype), _checksum([tensor])]
            for name, tensor in tensors.items()
        }
        return self._worker.team.everyone.gather_values(rows, what=what)

    def _comparable(self) -> dict[str, Tensor]:
        """Return the tensors of the model, sorted by name."""
        if self._worker.team.everyone.size == 1 or self._worker.team.sharded:
            return {}
        found = sorted(self._worker.replica.saved().items())
        return {name: tensor for name, tensor in found if unusable(tensor) is None}

    def _unaveraged(self) -> dict[str, Tensor]:
        averaged = set(map(id, self._worker.replica.synchronized()))
        return {
            name: tensor
            for name, tensor in self._comparable().items()
            if id(tensor) not in averaged
            and not (tensor.is_floating_point() and tensor.itemsize == 1)  # have no sum
        }

    def _fingerprints(self) -> dict[str, int]:
        return {name: _fingerprint(tensor) for name, tensor in self._unaveraged().items()}


def _differing(rows: Sequence[Mapping[str, _Row]]) -> list[str]:
    """Return the sorted names of the tensors that differ between workers, or that some lack."""
    names = sorted(set().union(*rows))
    return [name for name in names if any(each.get(name) != rows[0].get(name) for each in rows)]


def _listed(names: Sequence[str]) -> str:
    """Return a text with the first of the ``names``, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _checksum(tensors: Iterable[Tensor]) -> int:
    """Return a CRC-32 of the values."""
    found = 0
    for tensor in tensors:
        values = as_real(tensor.detach()).contiguous().cpu()
        content: Any = values.reshape(-1).view(torch.uint8).numpy()
        found = zlib.crc32(content, found)
    return found


def _fingerprint(tensor: Tensor) -> int:
    """Return a number that is another one, most probably, after a change of ``tensor``."""
    if tensor.device.type == "cpu":
        return _checksum([tensor])
    bits = as_real(tensor.detach()).reshape(-1)  # not copied to the host, which takes long
    return sum(int(piece.sum()) for piece in bits.view(_BITS[bits.itemsize]).split(_PIECE))
