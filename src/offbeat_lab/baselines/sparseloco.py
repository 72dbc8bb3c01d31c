"""SparseLoCo: DiLoCo with sparse, 2-bit messages, and error feedback in place of outer momentum.

P is the global model, equal on all workers, and x the local model of one worker. A flat vector of
parameters is cut into *chunks* of at most 4096 elements. Of each chunk a worker sends a few entries
with the largest absolute values. Let a be their mean absolute value. A message contains:

- for each chunk two *levels* in float32: the mean absolute value of the sent entries up to a, and
  the mean absolute value of those above a;
- for each sent entry 14 bits: its index in the chunk (12 bits), its sign, and its level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from offbeat import Strategy
from offbeat.extend import (
    All,
    CustomFlow,
    Future,
    GlobalModel,
    Message,
    Outer,
    RoundAverager,
    Section,
    Team,
    WorkerView,
    setting,
)
from offbeat_lab.methods.tunable import Axis, Tunable

_CHUNK = 4096  # largest number of elements of a chunk: an index has 12 bits
_BITS, _ENTRIES, _WORD = 14, 4, 7  # bits of an entry; entries and bytes of a word
_LEVELS = 8  # bytes of the two levels of a chunk


class SparseVectors:
    """Messages, of ``nbytes`` bytes, of vectors that are padded with zeros to equal chunks."""

    def __init__(self, elements: int, density: float) -> None:
        self._elements, self._chunks = elements, math.ceil(elements / _CHUNK)
        self._width = math.ceil(elements / self._chunks)
        self._kept = max(1, round(density * self._width))  # entries sent of each chunk
        self._words = math.ceil(self._chunks * self._kept / _ENTRIES)
        self.nbytes = _LEVELS * self._chunks + _WORD * self._words

    def encode(self, vector: Tensor) -> Tensor:
        """Return the message with the largest entries of each chunk of ``vector``."""
        padded = functional.pad(vector, (0, self._chunks * self._width - self._elements))
        values = padded.view(self._chunks, self._width)
        sizes, indices = values.abs().topk(self._kept, dim=1)
        high = sizes > sizes.mean(dim=1, keepdim=True)
        groups = torch.stack([~high, high], dim=1)
        levels = (groups * sizes.unsqueeze(1)).sum(2) / groups.sum(2).clamp(min=1)
        negative = values.gather(1, indices) < 0
        codes = (indices << 2 | negative.long() << 1 | high.long()).view(-1)
        codes = functional.pad(codes, (0, self._words * _ENTRIES - codes.numel()))
        words = (codes.view(-1, _ENTRIES) << _shifts(vector)).sum(1)
        packed = words.view(torch.uint8).view(-1, _WORD + 1)[:, :_WORD].reshape(-1)
        return torch.cat([levels.float().view(-1).view(torch.uint8), packed])

    def sum(self, messages: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the sum of the vectors in ``messages``, added in their order."""
        total = messages[0].new_zeros(self._chunks, self._width, dtype=dtype)
        for message in messages:
            levels, packed = message.split([_LEVELS * self._chunks, _WORD * self._words])
            levels = levels.clone().view(torch.float32).view(-1, 2)
            words = functional.pad(packed.view(-1, _WORD), (0, 1)).view(torch.int64)
            codes = (words >> _shifts(message) & (1 << _BITS) - 1).view(-1)
            codes = codes[: self._chunks * self._kept].view(self._chunks, self._kept)
            values = levels.gather(1, codes & 1) * (1 - (codes & 2))
            total.scatter_add_(1, codes >> 2, values.to(dtype))
        return total.view(-1)[: self._elements]


def _shifts(like: Tensor) -> Tensor:
    """Return the position of the first bit of each entry in a word."""
    return torch.arange(_ENTRIES, device=like.device) * _BITS


class SparseMessage(Message):
    """A message with the largest entries of each worker's update, plus what it did not send before.

    Args:
        team: The workers.
        sections: The whole model. The ``errors`` of their streams are e, the sum of what was not
            sent.
        what: Name of the operation in errors.
        density: Share of the entries that are sent.
        decay: Factor of e in each message.
    """

    def __init__(
        self, team: Team, sections: Sequence[Section], what: str, density: float, decay: float
    ) -> None:
        super().__init__(sections, what)
        self._team, self._decay, self._contributes = team, decay, True
        self._errors = [each.stream.errors for each in sections if each.stream.errors is not None]
        self._formats = [SparseVectors(each.numel(), density) for each in self._errors]
        self._sums: list[Tensor] = []

    @override
    def write(self, index: int, start: int, values: Tensor) -> None:
        error = self._errors[index][start : start + values.numel()]
        error.mul_(self._decay).add_(values)

    @override
    def clear(self) -> None:
        self._contributes = False

    @override
    def start(self, vote: Tensor | None, send: Tensor | bool = True) -> Future[Any]:
        futures: list[Future[Any]] = []
        self._sums = [torch.empty(0)] * len(self._errors)
        for index, (error, vectors) in enumerate(zip(self._errors, self._formats, strict=True)):
            message = error.new_zeros(vectors.nbytes, dtype=torch.uint8)
            if self._contributes:
                message = vectors.encode(error)
                error.sub_(vectors.sum([message], error.dtype))

            def store(
                messages: list[Tensor], index: int = index, vectors: SparseVectors = vectors
            ) -> None:
                self._sums[index] = vectors.sum(messages, self._errors[index].dtype)

            futures.append(self._team.communicator.gather(message, what=self.what).then(store))
        return All(futures)

    @override
    def read(self, index: int, start: int, total: Tensor, sent: Tensor) -> None:
        total.copy_(self._sums[index][start : start + total.numel()])
        sent.zero_()  # not used: the local model becomes the global model


class SparseLoCoFlow(RoundAverager):
    """Averages models in one ``SparseMessage``."""

    stores_shared = True
    strategy: "SparseLoCo"

    @override
    def make_errors(self) -> None:
        for space in self.spaces:
            space.stream.errors = torch.zeros(
                space.x.elements, dtype=space.x.dtype, device=space.x.device
            )

    @override
    def make_message(self, sections: Sequence[Section], what: str) -> Message:
        strategy, team = self.strategy, self.worker.team
        return SparseMessage(team, sections, what, strategy.density, strategy.decay)

    @override
    def sends_buffers(self, flight: Any) -> bool:
        return False


@dataclass(frozen=True, kw_only=True, repr=False)
class SparseLoCo(Strategy):
    """Each worker takes ``period`` steps, then sends the largest entries of its update in 2 bits.

    **Update**. P is the global model, x the local model of a worker (initially P), and T the step
    of its optimizer with the gradient g. e is the error feedback of the worker (initially 0), and
    Q the selection and quantization of the largest entries of each chunk:

        x ← T(x, g)                         H times
        e ← β·e + (x − P)
        s = Q(e);  e ← e − s
        P ← P + η_o·Σ w·s / Σ w             w = 1, or 0 for a worker without new steps
        x ← P

    Q keeps the sign of an entry and one of two levels for each chunk, see the module. The decayed
    error e replaces the outer momentum of DiLoCo. The inner optimizer is not reset.

    Args:
        period: H, steps between two launches (≥ 1).
        density: Share of the entries that are sent, in (0, 1]. At least one of each chunk is sent.
        outer_lr: Outer learning rate η_o > 0.
        decay: β in [0, 1], the factor of the error in each launch.

    *Communication*: every H steps each worker gathers the messages of all workers, by default with
    0.23 bits per parameter; blocking. *Memory*: three copies of the model for P, e and the staging.
    *State*: P and e. ``consensus`` and ``finish`` show the mean of the local models, which does not
    contain e. Only they average floating-point buffers.

    *Differs from the paper*: chunks are cut from all parameters in the order of their names, not
    from each tensor. The paper's quantizer takes its levels from the statistics of a tensor.

    Source: Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", arXiv
    2508.15706, Algorithm 1.
    """

    name: ClassVar[str] = "sparseloco"
    tunable: ClassVar[Tunable] = Tunable(
        (*(Axis("period"), Axis("density"), Axis("outer_lr")), Axis("decay", below_one=True)),
        (
            {"period": 4},
            {"period": 2, "density": 0.125},
            {"period": 2, "density": 0.25, "decay": 0.6},
        ),
    )
    period: int = setting(50, least=1)
    density: float = setting(1 / 64, above=0, most=1)
    outer_lr: float = setting(1.0, above=0)
    decay: float = setting(0.95, least=0, most=1)

    @override
    def averages(self) -> CustomFlow:
        shared = GlobalModel(outer=Outer(self.outer_lr))
        return CustomFlow(
            lambda strategy, worker: SparseLoCoFlow(strategy, worker, shared),
            blocking=True,
            models=True,
        )

    @override
    def due(self, worker: WorkerView) -> bool:
        return worker.since_launch >= self.period
