"""A trial: streaming averaging whose parts are of low rank, in place of few bits.

Not of the package: it is here so that what ``docs/streaming-ablation.md`` says of such parts can be
run again (``benchmarks.ablation``), and as a strategy of one's own that overlaps.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.checkpoint import transient
from offbeat.fabric import Handle
from offbeat.strategies.base import Averages, Roll, Round, Rounds, Strategy, Vote, Worker, setting

MEMORY_STEPS = 50.0  # as of streaming averaging's outer momentum
SMOOTHED = 5  # exchanges


@dataclass
class Exchange:
    """What is under way: first the left factors, then the right ones."""

    handle: Handle[Tensor]
    step: float  # mean own step of the workers when it was launched
    exact: list[Tensor]  # u of what goes as it is
    rows: list[slice]  # of each matrix, those among it
    left: list[Tensor] = field(default_factory=list)  # P̂, once the second stage is under way
    right: list[Tensor] = field(default_factory=list)  # own Mᵀ·P̂
    mean: list[Tensor] = field(default_factory=list)  # over the workers, of ``exact``


@dataclass
class LowRankState:
    """P, v, the warm right factors, and where the worker stands."""

    base: list[Tensor]
    velocity: list[Tensor]
    right: list[Tensor]
    launched: float = 0.0
    sent_squared: float = 0.0  # mean ‖u‖², smoothed
    mean_squared: float = 0.0  # ‖D‖², likewise
    exchanges: int = 0
    under_way: Exchange | None = transient(default=None)
    pausing: bool = transient(default=False)  # not stepping until all have come


@dataclass(frozen=True, kw_only=True, repr=False)
class LowRank(Strategy):
    """The mean of x − P in a few directions, again and again; nobody waits for it.

    Each matrix M = x − P (a convolution's with its outputs as rows) travels as in PowerSGD (Vogels
    et al., 2019), in two sums that fly while the worker goes on; what has one dimension goes as it
    is. N workers; M is taken anew for the second sum:

        P̂ = orthonormal(Σ M·Q)       Q: the last right factor
        D = P̂·(Σ Mᵀ·P̂)ᵀ / N          u = P̂·(Mᵀ·P̂)ᵀ
        P ← P + Δ;  x ← x + Δ − u;  Q ← Σ Mᵀ·P̂

    So what is not in these directions stays in the model, as what rounding takes away does under
    ``StreamingAveraging``; the outer gain, and Δ, are its own. But the directions are those of the
    mean: what cancels in it is sent last, and keeps workers apart, unless exact rows take turns.

    Args:
        rank: Columns of P̂ and Q.
        slices: So many exchanges take one full turn of exact rows along, beside the factors; 0:
            there are none.
    """

    name: ClassVar[str] = "lowrank"
    averages: ClassVar[Averages] = "updates"
    rounds: ClassVar[Rounds] = "boundary"
    meets: ClassVar[bool] = False
    rank: int = setting(8, least=1)
    slices: int = setting(0, least=0)

    @override
    def start(self, worker: Worker) -> LowRankState:
        base = [_flat(p).clone() for _, p in worker.replica.parameters]
        random = torch.Generator().manual_seed(0)  # the same directions on all workers
        right = [
            torch.randn(m.shape[1], min(self.rank, *m.shape), generator=random)
            for m in base
            if m.dim() > 1
        ]
        return LowRankState(base, [torch.zeros_like(m) for m in base], right)

    @override
    def due(self, worker: Worker) -> bool:
        return worker.size > 1 and worker.state.under_way is None

    @override
    def vote(self, worker: Worker, part: int, *, stepping: bool, finishing: bool) -> Vote:
        return Vote(weight=1.0, measure=float(worker.step))

    @override
    def act(self, worker: Worker, round: Round) -> bool | None:
        if not round.done():
            return None
        self._launch(worker, round.wait().measure / worker.size)
        if worker.state.pausing:
            self._finish(worker)
        return False

    @override
    def iterated(self, worker: Worker) -> bool:
        state: LowRankState = worker.state
        state.pausing = False
        exchange = state.under_way
        return exchange is not None and exchange.handle.done() and self._go_on(worker)

    @override
    def meet(self, worker: Worker, *, finishing: bool) -> None:
        """Others start the second sum before the next roll, so it must come first here, too."""
        worker.state.pausing = True
        self._finish(worker)

    def _finish(self, worker: Worker) -> None:
        while worker.state.under_way is not None:
            self._go_on(worker)

    @torch.no_grad()
    def _launch(self, worker: Worker, step: float) -> None:
        state: LowRankState = worker.state
        factors, left = iter(state.right), []
        exact: list[Tensor] = []
        kept: list[slice] = []
        for own, base in zip(_tensors(worker), state.base, strict=True):
            difference = own - base
            if difference.dim() == 1:
                exact.append(difference)
                continue
            rows = self._rows(state.exchanges, len(difference))
            kept.append(rows)
            exact.append(difference[rows].clone())
            difference[rows] = 0
            left.append(difference @ next(factors))
        handle = worker.wire.sum(
            torch.cat([one.reshape(-1) for one in (*left, *exact)]),
            stream="left factors",
            what=f"left factors of exchange {state.exchanges + 1}",
        )
        state.under_way = Exchange(handle, step, exact, kept)

    def _rows(self, exchange: int, height: int) -> slice:
        """Those that go as they are."""
        if not self.slices:
            return slice(0, 0)
        at = exchange % self.slices
        return slice(at * height // self.slices, (at + 1) * height // self.slices)

    def _go_on(self, worker: Worker) -> bool:
        """Wait for the stage under way, and begin the next; whether the exchange has landed."""
        if worker.state.under_way.left:
            self._land(worker)
            return True
        self._second(worker)
        return False

    @torch.no_grad()
    def _second(self, worker: Worker) -> None:
        state: LowRankState = worker.state
        exchange: Exchange = state.under_way
        total = iter(exchange.handle.wait().split(self._lengths(state, exchange)))
        exchange.left = [
            torch.linalg.qr(next(total).view(len(m), -1)).Q for m in state.base if m.dim() > 1
        ]
        exchange.mean = [next(total).view_as(u) / worker.size for u in exchange.exact]
        lefts, rows = iter(exchange.left), iter(exchange.rows)
        for own, base in zip(_tensors(worker), state.base, strict=True):
            if own.dim() > 1:
                difference = own - base
                difference[next(rows)] = 0
                exchange.right.append(difference.T @ next(lefts))
        squares = sum(float(one.square().sum()) for one in (*exchange.right, *exchange.exact))
        payload = [one.reshape(-1) for one in exchange.right] + [torch.tensor([squares])]
        exchange.handle = worker.wire.sum(
            torch.cat(payload),
            stream="right factors",
            what=f"right factors of exchange {state.exchanges + 1}",
        )

    def _lengths(self, state: LowRankState, exchange: Exchange) -> list[int]:
        matrices = (m for m in state.base if m.dim() > 1)
        lefts = [len(m) * q.shape[1] for m, q in zip(matrices, state.right, strict=True)]
        return lefts + [u.numel() for u in exchange.exact]

    @torch.no_grad()
    def _land(self, worker: Worker) -> None:
        state: LowRankState = worker.state
        exchange: Exchange = state.under_way
        *factors, squares = exchange.handle.wait().split([*(q.numel() for q in state.right), 1])
        state.right = [f.view_as(q) for f, q in zip(factors, state.right, strict=True)]
        means, sent = [], []
        low = iter(zip(exchange.left, state.right, exchange.right, exchange.rows, strict=True))
        for base, exact, mean in zip(state.base, exchange.exact, exchange.mean, strict=True):
            if base.dim() == 1:
                means.append(mean)
                sent.append(exact)
                continue
            left, right, own, rows = next(low)
            means.append(left @ right.T / worker.size)
            sent.append(left @ own.T)
            means[-1][rows] += mean
            sent[-1][rows] += exact
        fade = math.exp(-max(0.0, exchange.step - state.launched) / MEMORY_STEPS)
        gain = self._gain(state, float(squares) / worker.size, means, worker.size)
        ahead = (gain - 1) * (1 - fade)
        tensors = zip(_tensors(worker), state.base, state.velocity, means, sent, strict=True)
        for own, base, velocity, mean, u in tensors:
            velocity.mul_(fade).add_(mean)
            delta = mean + ahead * velocity
            base += delta
            own += delta - u
        state.launched, state.under_way = exchange.step, None
        state.exchanges += 1
        worker.details.update(exchanges=state.exchanges, gain=gain)

    @staticmethod
    def _gain(state: LowRankState, sent: float, means: list[Tensor], workers: int) -> float:
        share = 1 / min(SMOOTHED, state.exchanges + 1)
        state.sent_squared += share * (sent - state.sent_squared)
        mean = sum(float(one.square().sum()) for one in means)
        state.mean_squared += share * (mean - state.mean_squared)
        if state.mean_squared <= 0:
            return 1.0
        gain = math.sqrt(state.sent_squared / state.mean_squared)
        return min(max(gain, 1.0), math.sqrt(workers))

    @override
    def consensus(self, worker: Worker, roll: Roll, *, final: bool) -> None:
        worker.average_all(1.0, worker.size, final=final)


def _flat(tensor: Tensor) -> Tensor:
    """A view of it as a matrix, or as it is if it has one dimension or none."""
    tensor = tensor.detach()
    return tensor.view(len(tensor), -1) if tensor.dim() > 1 else tensor.view(-1)


def _tensors(worker: Worker) -> list[Tensor]:
    """Views of the parameters; what is not contiguous has none, and ends in torch's error."""
    return [_flat(p) for _, p in worker.replica.parameters]
