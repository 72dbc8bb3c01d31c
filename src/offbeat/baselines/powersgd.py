"""PowerSGD: the workers average gradients as products of two thin matrices, with error feedback.

A gradient is viewed as a matrix M. Its n rows are the first dimension of the parameter, and its m
columns all others. A complex number counts as two columns. M is *compressed* with the rank r if the
parameter has at least two dimensions and (n + m)·r < n·m. All other gradients are averaged exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.buckets import as_real, group_tensors, staging_dtype
from offbeat.averaging.gradient_flow import GradientFlow, GradientFlowState
from offbeat.averaging.gradients import GradientMean
from offbeat.averaging.norm import squared_norm
from offbeat.averaging.parts.landing import land
from offbeat.averaging.worker import AttachedOptimizer, Worker
from offbeat.strategies.base import CustomFlow, Gradients, Strategy, WorkerView, setting
from offbeat.transport.handle import Completed, Handle

_PURPOSE = int.from_bytes(b"powersgd", "big")  # part of the seed of the first Q


@dataclass
class Factors:
    """State of the compressed matrices of one optimizer.

    Attributes:
        q: Q of each matrix, m × r, equal on all workers.
        errors: e of each matrix, n × m.
    """

    q: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)


class LowRankMean(GradientMean):
    """The mean of the gradients of one optimizer, exact in the first ``strategy.start`` steps.

    ``view.launches`` is the number of previous means. ``options`` are those of ``GradientMean``.
    """

    def __init__(
        self,
        worker: Worker,
        optimizer: AttachedOptimizer,
        strategy: "PowerSGD",
        view: WorkerView,
        **options: Any,
    ) -> None:
        super().__init__(worker.team, worker.wire, optimizer.buckets, **options)
        self._start, self._view = strategy.start, view
        self._shapes: list[tuple[int, int] | None] = []  # by parameter; None if not compressed
        self.factors = Factors()
        position = {id(p): i for i, p in enumerate(optimizer.parameters)}
        for parameter in [p for bucket in self._buckets for p in bucket.parameters]:
            rows = parameter.shape[0] if parameter.dim() >= 2 else 1
            columns = as_real(parameter.detach()).numel() // rows
            if (rows + columns) * strategy.rank >= rows * columns:
                self._shapes.append(None)
                continue
            self._shapes.append((rows, columns))
            random = np.random.default_rng([_PURPOSE, optimizer.index, position[id(parameter)]])
            first = torch.from_numpy(random.standard_normal((columns, strategy.rank)))
            place: Any = {"dtype": staging_dtype(parameter), "device": parameter.device}
            self.factors.q.append(first.to(**place))
            self.factors.errors.append(torch.zeros(rows, columns, **place))

    @override
    def reduce(
        self, slots: Sequence[float], *, contribute: bool, take: bool | None = None
    ) -> list[float]:
        factors = self.factors
        if not factors.q or self._view.launches < self._start:
            return super().reduce(slots, contribute=contribute, take=take)
        matrices, others = self._stage(contribute)
        if contribute:
            for m, e in zip(matrices, factors.errors, strict=True):
                m.add_(e)
        numbers = [*slots, float(contribute), *self._presence(contribute)]
        products = [m @ q for m, q in zip(matrices, factors.q, strict=True)]
        products, numbers = self._sum_all(products, numbers)
        contributing, counts = numbers[self._slots], numbers[self._slots + 1 :]
        if not contributing:
            return numbers[: self._slots]
        # With NaN or infinity on any worker all workers get NaN, and Q and e do not change.
        finite = math.isfinite(squared_norm(products))
        bases = [torch.linalg.qr(p)[0] if finite else p * math.nan for p in products]
        projected = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
        sums, _ = self._sum_all([*projected, *others])
        means = [s.mul_(1 / contributing) for s in sums]
        exists = [n > 0 for n, shape in zip(counts, self._shapes, strict=True) if shape]
        for i, (m, p, q) in enumerate(zip(matrices, bases, means, strict=False)):
            mean = p @ q.T
            if finite and exists[i]:  # else no worker has a gradient of this parameter
                factors.q[i].copy_(q)
                if contribute:
                    torch.sub(m, mean, out=factors.errors[i])
            m.copy_(mean)
        for other, mean in zip(others, means[len(matrices) :], strict=True):
            other.copy_(mean)
        land(self._landings(float(contribute), counts), self._team.host)
        return numbers[: self._slots]

    def _stage(self, contribute: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Copy the gradients, or zeros, to the buckets. Return the compressed and all others."""
        values: list[Tensor] = []
        for bucket in self._buckets:
            bucket.handle = Completed(bucket.pack(float(contribute)))
            values += bucket.body.split([as_real(p.detach()).numel() for p in bucket.parameters])
        pairs = list(zip(values, self._shapes, strict=True))
        return [v.view(shape) for v, shape in pairs if shape], [v for v, s in pairs if not s]

    def _sum_all(
        self, tensors: Sequence[Tensor], numbers: Sequence[float] = ()
    ) -> tuple[list[Tensor], list[float]]:
        """Sum tensors and numbers over the workers, in one message for each dtype and device."""
        groups, handles = group_tensors(tensors, math.inf), list[Handle[Tensor]]()
        for group in groups:
            tail = torch.tensor([] if handles else numbers, dtype=group[0].dtype, device="cpu")
            flat = torch.cat([*(t.reshape(-1) for t in group), tail.to(group[0].device)])
            what = "low-rank mean of the gradients"
            handles.append(self._team.communicator.sum(flat, what=what, tail=len(tail)))
        sums = dict[int, Tensor]()
        arrived = [handle.wait() for handle in handles]
        for group, flat in zip(groups, arrived, strict=True):
            parts = flat[: sum(t.numel() for t in group)].split([t.numel() for t in group])
            sums.update({id(t): part.view(t.shape) for t, part in zip(group, parts, strict=True)})
        return [sums[id(t)] for t in tensors], arrived[0][-len(numbers) :].tolist()


@dataclass
class PowerSGDState(GradientFlowState):
    """State of a ``PowerSGDFlow``: adds the ``Factors`` of each optimizer."""

    factors: list[Factors] = field(default_factory=list)


class PowerSGDFlow(GradientFlow):
    """Averages gradients with one ``LowRankMean`` for each optimizer, after backward."""

    can_exclude = False
    strategy: "PowerSGD"

    def __init__(self, strategy: "PowerSGD", worker: Worker) -> None:
        super().__init__(strategy, worker, Gradients())

    @override
    def start(self, common: dict[str, Any] | None = None) -> None:
        super().start(common)
        means = [mean for mean in self.state.means if isinstance(mean, LowRankMean)]
        self.state = PowerSGDState(**vars(self.state), factors=[mean.factors for mean in means])

    @override
    def make_mean(self, optimizer: AttachedOptimizer, view: WorkerView, slots: int) -> LowRankMean:
        return LowRankMean(self.worker, optimizer, self.strategy, view, slots=slots)

    @override
    def backward_buckets(self, optimizer: AttachedOptimizer) -> Sequence[Sequence[Tensor]]:
        return []


@dataclass(frozen=True, kw_only=True, repr=False)
class PowerSGD(Strategy):
    """Average the gradients in every step, each as a product of two matrices of a low rank.

    **Update** of the parameters x with the gradient g of a worker, where T is the step of its
    optimizer. M, P and Q are matrices of n × m, n × r and m × r numbers for each parameter. e is
    the error feedback of the worker, initially 0. Q is initially random, the same on all workers:

        M ← g + e
        P ← orthonormal basis of the columns of mean(M·Q)
        Q ← mean(Mᵀ·P)
        e ← M − P·Qᵀ
        x ← T(x, P·Qᵀ)

    P·Qᵀ is the projection of mean(M) to the columns of P, and equal on all workers. Gradients that
    are not compressed (see the module) are averaged exactly. A single worker does not compress.

    Args:
        rank: r, rank of the means (≥ 1).
        start: Number of steps before the first compressed one, which average as BSP (≥ 0).

    *Communication*: two all-reduces in each step, one after the other, after backward. The first
    has P and the votes, (n + m)·r numbers for a matrix together with the second, which has Q and
    the other gradients. *Memory*: one copy of the gradients, and e. *State*: Q and e.

    If a gradient is not finite, the mean is NaN and the state does not change, so that a GradScaler
    may skip the step. e is in units of the scaled gradients: when the scale changes, it is wrong by
    that factor once. Workers with different hardware get means that differ by rounding.

    *Differs from the paper*: P is orthogonalized by a QR decomposition, not by Gram-Schmidt. The
    optimizer is any. Matrices that would not become smaller are not compressed.

    Source: Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed
    optimization", NeurIPS 2019, arXiv 1905.13727, Algorithms 1 and 2.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = setting(4, least=1)
    start: int = setting(0, least=0)

    @override
    def averages(self) -> CustomFlow:
        return CustomFlow(PowerSGDFlow)
