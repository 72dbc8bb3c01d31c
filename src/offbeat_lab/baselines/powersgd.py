"""PowerSGD: the workers average gradients as products of two thin matrices, with error feedback.

A gradient is viewed as a matrix M. Its n rows are the first dimension of the parameter, and its m
columns all others. A complex number counts as two columns. M is *compressed* with the rank r if the
parameter has at least two dimensions and (n + m)·r < n·m. All other gradients are averaged exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from offbeat import Strategy
from offbeat.extend import (
    AttachedOptimizer,
    Completed,
    CustomFlow,
    GradientFlow,
    GradientFlowState,
    GradientMean,
    as_real,
    make_flats,
    setting,
    squared_norm,
    staging_dtype,
)
from offbeat_lab.methods.tunable import Axis, Tunable

_PURPOSE = int.from_bytes(b"powersgd", "big")  # part of the seed of the first Q


class LowRankMean(GradientMean):
    """The mean of the gradients of one optimizer.

    Attributes:
        q: Q of each compressed matrix, m × r, equal on all workers.
        errors: e of each compressed matrix, n × m.
    """

    def __init__(self, flow: "PowerSGDFlow", optimizer: AttachedOptimizer) -> None:
        strategy = flow.strategy
        super().__init__(flow.worker.wire, optimizer.buckets)
        self._shapes: list[tuple[int, int] | None] = []  # by parameter; None if not compressed
        self.q, self.errors = list[Tensor](), list[Tensor]()
        position = {id(p): i for i, p in enumerate(optimizer.parameters)}
        for parameter in [p for bucket in self._buckets for p in bucket.parameters]:
            rows = parameter.shape[0] if parameter.dim() >= 2 else 1
            columns = as_real(parameter.detach()).numel() // rows
            compressed = (rows + columns) * strategy.rank < rows * columns
            self._shapes.append((rows, columns) if compressed else None)
            if compressed:
                random = np.random.default_rng([_PURPOSE, optimizer.index, position[id(parameter)]])
                q = torch.from_numpy(random.standard_normal((columns, strategy.rank)))
                self.q.append(q.to(parameter.device, staging_dtype(parameter)))
                self.errors.append(self.q[-1].new_zeros(rows, columns))

    @override
    def reduce(self, numbers: Sequence[float], *, contribute: bool) -> list[list[float]]:
        if not self.q:
            return super().reduce(numbers, contribute=contribute)
        # A step inside torch.autocast would otherwise send the products in bfloat16.
        with torch.autocast(self.q[0].device.type, enabled=False):
            return self._reduce(numbers, contribute=contribute)

    def _reduce(self, numbers: Sequence[float], *, contribute: bool) -> list[list[float]]:
        agreement = self._agree(numbers, contribute=contribute)
        matrices, others = self._stage(contribute)
        if contribute:
            for m, e in zip(matrices, self.errors, strict=True):
                m.add_(e)
        products = [m @ q for m, q in zip(matrices, self.q, strict=True)]
        self._sum(products)
        rows, contributing, kinds = agreement.wait()
        if not contributing:
            return rows
        # With NaN or infinity on any worker all workers get NaN, and Q and e do not change.
        finite = math.isfinite(squared_norm(products))
        bases = [torch.linalg.qr(p)[0] if finite else p * math.nan for p in products]
        projected = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
        self._sum([*projected, *others])
        for each in (*projected, *others):
            each.mul_(1 / contributing)
        holders = [kind for kind, shape in zip(kinds, self._shapes, strict=True) if shape]
        for i, (m, p, held) in enumerate(zip(matrices, bases, holders, strict=True)):
            mean = p @ projected[i].T
            if finite and held:  # else no worker has a gradient of this parameter
                self.q[i].copy_(projected[i])
                if contribute:
                    torch.sub(m, mean, out=self.errors[i])
            m.copy_(mean)
        self._land(float(contribute), kinds)
        return rows

    def _stage(self, contribute: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Copy the gradients, or zeros, to the buckets. Return the compressed and all others."""
        values: list[Tensor] = []
        for bucket in self._buckets:
            bucket.future = Completed(bucket.pack(contribute=contribute))
            values += bucket.flat.split(bucket.lengths)
        pairs = list(zip(values, self._shapes, strict=True))
        return [v.view(shape) for v, shape in pairs if shape], [v for v, s in pairs if not s]

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over the workers: one message for each dtype and device."""
        flats, what = make_flats(tensors), "low-rank mean of the gradients"
        futures = [self._team.communicator.sum(flat.copy(), what=what) for flat in flats]
        sums = [future.wait() for future in futures]
        for flat, values in zip(flats, sums, strict=True):
            flat.write(0, values)


@dataclass
class PowerSGDState(GradientFlowState):
    """State of a ``PowerSGDFlow``.

    Attributes:
        q: ``LowRankMean.q`` of all optimizers.
    """

    q: list[Tensor] = field(default_factory=list)


class PowerSGDFlow(GradientFlow):
    """Averages gradients after backward, with a ``LowRankMean`` for each optimizer."""

    strategy: "PowerSGD"
    state: "PowerSGDState"

    @override
    def start(self) -> None:
        super().start()
        means = cast("list[LowRankMean]", self.state.means)
        self.state = PowerSGDState(**vars(self.state), q=[q for m in means for q in m.q])

    @override
    def make_mean(self, optimizer: AttachedOptimizer) -> LowRankMean:
        return LowRankMean(self, optimizer)


@dataclass(frozen=True, kw_only=True, repr=False)
class PowerSGD(Strategy):
    """Average the gradients in every step, each as a product of two thin matrices.

    **Update** of the parameters x with the gradient g of a worker, where T is the step of its
    optimizer. For a parameter of n × m numbers, P has n × r and Q m × r. e is the error feedback of
    the worker, initially 0. Q is initially random, and equal on all workers:

        M ← g + e
        P ← orthonormal basis of the columns of mean(M·Q)
        Q ← mean(Mᵀ·P)
        e ← M − P·Qᵀ
        x ← T(x, P·Qᵀ)

    The module tells which gradients are averaged exactly. A single worker does not compress.

    Args:
        rank: r, rank of the means (≥ 1).

    *Communication*: two all-reduces in each step, one after the other, after backward. A matrix
    takes (n + m)·r numbers. *Memory*: one copy of the gradients, and e. *State*: Q and e.

    A non-finite gradient makes the mean NaN and leaves Q and e unchanged, so that a GradScaler may
    skip the step. When its scale changes, e is wrong by that factor once. Workers with different
    hardware get means that differ by rounding.

    *Differs from the paper*: P is orthogonalized by QR, not by Gram-Schmidt. The optimizer is any.
    Matrices that would not become smaller are averaged exactly.

    Source: Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed
    optimization", NeurIPS 2019, arXiv 1905.13727, Algorithms 1 and 2.
    """

    name: ClassVar[str] = "powersgd"
    tunable: ClassVar[Tunable] = Tunable((Axis("rank"),), ({"rank": 8},))
    rank: int = setting(4, least=1)

    @override
    def averages(self) -> CustomFlow:
        return CustomFlow(PowerSGDFlow, blocking=True)
