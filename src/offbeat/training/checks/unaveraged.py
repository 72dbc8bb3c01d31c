"""Tensors that no training step averages, but that differ between the workers nevertheless.

A frozen parameter is equal on all workers after ``attach``, unless the script changes it later, as
the teacher of a mean teacher. A parameter or buffer that is created after ``attach`` is not known
to the strategy: for example, a buffer that the first forward pass fills, or a mask for pruning.
"""

import json
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.averaging import Worker
from offbeat.averaging.flat import as_real
from offbeat.averaging.votes import UNAVERAGED, Vote
from offbeat.training.checks.model_comparison import checksum, comparable, named

logger = logging.getLogger("offbeat")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 2**24  # numbers whose bits are added at a time, because torch copies them to int64


class Unaveraged:
    """Finds such tensors at a consensus, and lets it combine those that differ.

    Nothing is sent as long as no tensor has changed on any worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._warned = worker, False
        self._start: dict[str, int] = {}

    def note(self) -> None:
        """Note the values, with which training starts. They are equal on all workers."""
        self._start = self._fingerprints()

    def changed(self) -> bool:
        """Return True if a tensor has changed since ``note``, or was created. Costs one pass."""
        self._worker.replica.included = ()
        return not self._fingerprints().items() <= self._start.items()

    def include(self, sums: Vote) -> None:
        """Let the consensus combine the tensors that differ. A collective if one has changed.

        ``sums`` is the sum of the votes of the last round. A tensor that only some workers have, or
        with different shapes, is left out.
        """
        worker, everyone = self._worker, self._worker.team.everyone
        worker.replica.included = ()
        (changed,) = worker.team.maximum_over_node(float(sums.has(UNAVERAGED)))
        if not changed:
            return
        rows = {
            name: [list(tensor.shape), str(tensor.dtype), checksum([tensor])]
            for name, tensor in self._tensors().items()
        }
        texts = everyone.gather_bytes(json.dumps(rows).encode(), what="comparison of the tensors")
        found = [json.loads(text) for text in texts]
        included = []
        for name, (*kind, _) in rows.items():
            others = [each.get(name, [None]) for each in found]
            if all(other[:-1] == kind for other in others) and others != [others[0]] * len(others):
                included.append(name)
        worker.replica.included = included
        if included and not self._warned and everyone.rank == 0:
            self._warn(included)

    def _warn(self, names: Sequence[str]) -> None:
        self._warned = True
        logger.warning(
            "%s: consensus() and finish() average what training does not: frozen parameters that "
            "the script changes, and tensors that were created after attach(). They differ between "
            "the workers in between. Create tensors before attach(), or attach again; keep a "
            "moving average in a module outside of the model, and give it as also=[…]",
            named(names),
        )

    def _tensors(self) -> dict[str, Tensor]:
        averaged = set(map(id, self._worker.replica.synchronized()))
        return {
            name: tensor
            for name, tensor in comparable(self._worker).items()
            if id(tensor) not in averaged
            and not (tensor.is_floating_point() and tensor.itemsize == 1)  # have no sum
        }

    def _fingerprints(self) -> dict[str, int]:
        return {name: _fingerprint(tensor) for name, tensor in self._tensors().items()}


def _fingerprint(tensor: Tensor) -> int:
    """Return a number that is another one, most probably, after a change of ``tensor``."""
    if tensor.device.type == "cpu":
        return checksum([tensor])
    bits = as_real(tensor.detach()).reshape(-1)  # not copied to the host, which takes long
    return sum(int(piece.sum()) for piece in bits.view(_BITS[bits.itemsize]).split(_PIECE))
