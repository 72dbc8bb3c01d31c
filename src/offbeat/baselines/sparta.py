"""SPARTA, sparse parameter averaging: each step averages a small random subset of the parameters.

All workers draw the same subset in each step, so that only values are sent. To *launch* a subset is
to start the sum of its values over the workers. It *lands* when its mean changes the local models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.buckets import as_real, group_tensors, staging_dtype
from offbeat.averaging.model_flow import ModelFlow
from offbeat.averaging.parts.part import Part
from offbeat.averaging.votes import Round
from offbeat.strategies.base import (
    CustomFlow,
    SharedModel,
    Strategy,
    Tally,
    WorkerView,
    setting,
)
from offbeat.transport.handle import Handle

_PURPOSE = int.from_bytes(b"sparta", "big")  # part of the seed of each draw

Draw = Callable[[int, int, int], "np.ndarray[Any, np.dtype[np.int64]]"]
"""Function that returns the indices of a subset, in ascending order.

Its arguments: the number of the launch, the index of the bucket, and the elements of the bucket.
"""


@dataclass(init=False, eq=False, kw_only=True)
class RandomPart(Part):
    """A subset of the whole model, which each launch draws again. Several parts take turns.

    ``index`` is the position of this part in their order. A launch at which the model has the
    values s lands as x ← x + mean(s) − s, or with ``waits`` as x ← mean(s). Buffers are not sent.

    Attributes:
        launches: Number of launches of this part.
    """

    launches: int

    def __init__(
        self, *arguments: Any, draw: Draw, index: int, turns: int, waits: bool, **options: Any
    ) -> None:
        super().__init__(*arguments, name=f"turn {index}", **options)
        self._draw, self._index, self._turns, self._waits = draw, index, turns, waits
        self.launches = 0

    @override
    def _groups(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        # One bucket, and so one message, for each dtype and device: the subset is small.
        return group_tensors((t for t in self._find_parameters() if t.numel()), float("inf")), []

    def _chosen(self, bucket: int) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor with a drawn element, and the indices into it, of the last launch."""
        tensors = [as_real(p.detach()) for p in self.buckets[bucket].parameters]
        ends = np.cumsum([t.numel() for t in tensors])
        number = (self.launches - 1) * self._turns + self._index
        drawn = self._draw(number, bucket, int(ends[-1]))
        cuts = [0, *np.searchsorted(drawn, ends).tolist()]
        counts = np.diff(cuts)
        starts = ends - [t.numel() for t in tensors]
        local = torch.from_numpy(drawn - np.repeat(starts, counts)).to(tensors[0].device)
        pairs = zip(tensors, local.split(counts.tolist()), strict=True)
        return [(tensor, indices) for tensor, indices in pairs if indices.numel()]

    @override
    def launch(
        self, total: Handle[float], *, weight: float, step: int, what: str, **_: Any
    ) -> None:
        self._begin(total, weight, step)
        self.launches += 1
        self.own, self.sums = [], []
        for i, bucket in enumerate(self.buckets):
            values = torch.cat([torch.take(tensor, chosen) for tensor, chosen in self._chosen(i)])
            self.own.append(values.to(staging_dtype(bucket.parameters[0])))
            self.sums.append(self.own[-1] * weight)
            self._handles.append(self._team.communicator.sum(self.sums[-1], what=what))

    @override
    def _receive(self) -> None:
        self.sums = [handle.wait() for handle in self._handles]

    @override
    def _write(self, *, moved: bool, show: bool) -> None:
        self._refresh_tensors()
        for i, (own, total) in enumerate(zip(self.own, self.sums, strict=True)):
            mean, chosen = total * (1 / self.weight), self._chosen(i)
            pieces = [indices.numel() for _, indices in chosen]
            shifts = (mean if self._waits else mean - own).split(pieces)
            for (tensor, indices), shift in zip(chosen, shifts, strict=True):
                new = shift if self._waits else torch.take(tensor, indices).to(shift) + shift
                tensor.put_(indices, new.to(tensor))


class SPARTAFlow(ModelFlow):
    """Averages subsets of the model in turns, as many as may be in flight at the same time."""

    can_exclude = False
    strategy: "SPARTA"

    @override
    def make_parts(self) -> list[Part]:
        worker, turns, draw = self.worker, self.strategy.turns, self.strategy.draw
        tensors = [p for _, p in worker.replica.parameters]
        arguments = (worker.team, worker.wire, lambda: tensors)
        options: dict[str, Any] = {"turns": turns, "draw": draw, "waits": self.shared.blocking}
        options["step"] = worker.step
        return [RandomPart(*arguments, index=index, **options) for index in range(turns)]

    @property
    @override
    def unsynced(self) -> bool:
        return True  # the models of the workers always differ

    @override
    def weight(self, *, stepping: bool) -> float:
        return 1.0

    @override
    def consensus_weights(self, last: Round) -> tuple[float, float]:
        return 1.0, float(self.worker.size)


@dataclass(frozen=True, kw_only=True, repr=False)
class SPARTA(Strategy):
    """After each step the workers average a random share of the parameters.

    **Update**. x is the local model of a worker, T the step of its optimizer with the gradient g,
    and S_t the subset of step t, the same on all N workers. Index i is in S_t:

        x ← T(x, g)                         in step t
        s_i = x_i,  m_i = Σ s_i / N         at the end of step t
        x_i ← m_i                           at once                   overlap=0
        x_i ← x_i + m_i − s_i               at the end of step t + k  overlap=k

    S_t is drawn without replacement, with a seed that consists of ``seed`` and t. The local models
    never become equal, except in ``consensus`` and ``finish``, which show their mean.

    Args:
        share: Share p of the parameters in a subset, in (0, 1]. At least one parameter is averaged.
        overlap: Local steps k from launch to landing (≥ 0). An index that is in several subsets in
            flight is corrected several times, so p·k should be much smaller than 1.
        seed: Seed of the draws (≥ 0).

    *Communication*: one sum of p·M bytes in each step, where M is the model in bytes, and a vote of
    56 bytes. Workers wait for a sum that has not arrived k steps after its launch. *Memory*: the
    values of up to k subsets. *State*: the subsets in flight, and the number of launches.

    Floating-point buffers are averaged only in ``consensus`` and ``finish``. A worker without
    further data takes part with its last model.

    *Differs from the paper*: subsets have a fixed size. A late mean does not replace the parameters
    but is added, so that the local steps since the launch are kept.

    Source: Beton et al., "Improving the efficiency of distributed training using sparse parameter
    averaging", ICLR 2025 workshop MCDC.
    """

    name: ClassVar[str] = "sparta"
    share: float = setting(0.005, above=0, most=1)
    overlap: int = setting(0, least=0)
    seed: int = setting(0, least=0)

    @property
    def turns(self) -> int:
        """Number of parts that take turns: the largest number of subsets in flight."""
        return max(1, self.overlap)

    @override
    def averages(self) -> CustomFlow:
        shared = SharedModel(parts=self.turns, lands=self.overlap)
        return CustomFlow(
            lambda strategy, worker: SPARTAFlow(strategy, worker, shared), blocking=shared.blocking
        )

    @override
    def decide(self, worker: WorkerView, tally: Tally) -> float:
        return 1

    def draw(
        self, launch: int, bucket: int, elements: int
    ) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return the indices, in ascending order, that a launch averages of a bucket."""
        random = np.random.default_rng([self.seed, _PURPOSE, launch, bucket])
        count = max(1, round(self.share * elements))
        return np.sort(random.choice(elements, count, replace=False, shuffle=False))
