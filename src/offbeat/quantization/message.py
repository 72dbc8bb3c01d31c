"""Messages: sections of vectors, summed over the workers.

Each worker sends its update u of each section, and some numbers about itself, its *vote*. The
update is a change of the model, or a gradient. ``read`` decodes the sum of the updates piece by
piece, when it is needed. Two kinds of messages have the same interface:

- ``QuantizedMessage``: u is quantized.
- ``ExactMessage``: u is sent as it is.

A quantized sum takes two stages:

1. All-to-all: of N workers, worker k owns the blocks k, k + N, k + 2N, …, and receives the updates
   of these blocks from all workers.
2. All-gather: worker k adds the received blocks in float32, quantizes the sum, and sends it to all
   workers.

So each number is quantized twice, and all workers decode the same bytes. A background thread
starts the second stages, in the order in which the sums were started (``transport/stages.py``).
They run on a second communicator (``Wire.duplicate``), so that their order is independent of other
collectives.

Two workers that average models need a single stage, in which each receives the update of the other.
A single stage sends equally many bytes, and saves one operation and one quantization.

The quantization errors of both stages are added to the next sum of the same tensor (*error
feedback*). If models are averaged, the errors of the first stage stay in the local model. All other
errors are in the ``Stream``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS, pieces
from offbeat.quantization.gpu import triton_kernels
from offbeat.quantization.kernels import to_device
from offbeat.quantization.wire import Wire
from offbeat.transport.future import Future
from offbeat.transport.team import Team

SINGLE_STAGE_WORKERS = 2
"""Largest number of workers whose models are averaged in a single stage."""

Squares = NDArray[np.float64]
"""‖D‖² and ‖u‖², summed over pieces."""


class Stream:
    """A vector of parameters or gradients, whose sections are summed over and over in training.

    Args:
        elements: Number of elements of the vector.
        dtype: Dtype of the elements in an exact message.
        device: Device of the elements.

    Attributes:
        errors: Quantization errors of the second stage, for this worker's blocks: float32, 1-D.
            None if sums take a single stage.
        residual: Quantization errors of the first stage: float32, 1-D, whole blocks. None if they
            stay in the model.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.elements, self.dtype, self.device = elements, dtype, device
        self.errors: Tensor | None = None
        self.residual: Tensor | None = None
        self._memory: Tensor | None = None

    def make_errors(self, workers: int, *, residual: bool = False) -> None:
        """Allocate ``errors``, and ``residual`` if it is True, for quantized sums in two stages."""
        blocks = -(-self.elements // BLOCK)
        self.errors = self._zeros(-(-blocks // workers))
        if residual:
            self.residual = self._zeros(blocks)

    def _zeros(self, blocks: int) -> Tensor:
        return torch.zeros(blocks * BLOCK, dtype=torch.float32, device=self.device)

    def memory(self, elements: int) -> Tensor:
        """Return memory for an exact message. All messages of the whole vector share one memory."""
        if elements < self.elements:
            return torch.empty(elements, dtype=self.dtype, device=self.device)
        if self._memory is None:
            self._memory = torch.empty(elements, dtype=self.dtype, device=self.device)
        return self._memory


class Section(NamedTuple):
    """The numbers from ``start`` to ``stop`` of a stream, which a message contains.

    In a quantized sum of two stages over N workers, ``start`` is a multiple of N blocks.
    """

    stream: Stream
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Message(ABC):
    """One message. The methods are called in this order: ``write``, ``start``, ``read``.

    Args:
        sections: Sections to sum.
        what: Name of the operation in errors.

    Attributes:
        votes: The vote of each worker, by rank, once the message has arrived.
        quantized: True if the updates are quantized.
    """

    quantized = False

    def __init__(self, sections: Sequence[Section], what: str) -> None:
        self.sections, self.what = sections, what
        self.votes: list[list[float]] = []

    @abstractmethod
    def write(self, index: int, start: int, values: Tensor) -> None:
        """Put numbers of this worker's update into the message.

        Args:
            index: Index of the section.
            start: Position of the first number in the section, a multiple of ``BLOCK``.
            values: The numbers, 1-D. Overwritten.
        """

    def finite(self) -> Tensor | bool:
        """Return False if the encoded update is known to contain NaN or infinity.

        A tensor has one element, on the device of the update, so that the host need not wait.
        """
        return True

    @abstractmethod
    def clear(self) -> None:
        """Make the update zero. A later message contains the errors of earlier sums."""

    @abstractmethod
    def start(self, vote: Tensor | None, send: Tensor | bool = True) -> Future[Any]:
        """Send the message. The future sets ``votes``.

        Args:
            vote: Numbers about this worker: float64, 1-D. None: none are sent, by any worker.
            send: If False, or a tensor of one element that is False, zero is sent in place of the
                update.
        """

    @abstractmethod
    def read(self, index: int, start: int, total: Tensor, sent: Tensor) -> None:
        """total ← the sum of the updates, and sent ← this worker's update, from ``start`` on.

        The arguments are those of ``write``. The tensors have any floating-point dtype.
        """


class ExactMessage(Message):
    """A message whose updates are sent as they are.

    Args:
        keep: True if ``read`` writes ``sent``: the message then keeps a copy of the update.
    """

    def __init__(self, team: Team, sections: Sequence[Section], what: str, *, keep: bool) -> None:
        super().__init__(sections, what)
        self._team = team
        self._sums = [each.stream.memory(each.elements) for each in sections]
        self._sent: list[Tensor] = []
        self._keep = keep

    @override
    def write(self, index: int, start: int, values: Tensor) -> None:
        self._sums[index][start : start + values.numel()].copy_(values)

    @override
    def clear(self) -> None:
        for each in self._sums:
            each.zero_()

    @override
    def start(self, vote: Tensor | None, send: Tensor | bool = True) -> Future[Any]:
        team, what = self._team, self.what
        if send is False:
            self.clear()
        elif isinstance(send, Tensor):
            for each in self._sums:
                each.masked_fill_(~send, 0.0)
        if self._keep:
            self._sent = [each.clone() for each in self._sums]
        futures: list[Future[Any]] = []
        for index, each in enumerate(self._sums):

            def store(result: Tensor, index: int = index) -> None:
                self._sums[index] = result

            futures.append(team.communicator.sum(each, what=what).then(store))
        if vote is not None:

            def keep_votes(votes: list[Tensor]) -> None:
                self.votes = [each.tolist() for each in votes]

            gathering = team.communicator.gather(vote, what=f"votes of {what}")
            futures.append(gathering.then(keep_votes))
        return All(futures)

    @override
    def read(self, index: int, start: int, total: Tensor, sent: Tensor) -> None:
        numbers = slice(start, start + total.numel())
        total.copy_(self._sums[index][numbers])
        if self._keep:
            sent.copy_(self._sent[index][numbers])


class QuantizedMessage(Message):
    """A message whose updates are quantized. All sections have one device.

    The encoded blocks of the sections follow each other. With two stages, each section is filled up
    to a multiple of N blocks, and worker b mod N owns block b. So a worker owns equally many blocks
    of each section, and blocks that follow each other are encoded or decoded in one call.

    Args:
        wire: The workers, their communicator of second stages, and the precision of both stages.
        sections: Sections to sum. Either all streams have ``errors``, or none, for a single stage.
        what: Name of the operation in errors.
        vote: Number of numbers in a vote.

    Attributes:
        codec: Codec of the precision.
        kernels: The Triton kernels that encode and land the message; None: torch operations do.
        flag: bool, one element. ``kernels.encode`` sets it to False if the update is not finite.
    """

    quantized = True

    def __init__(
        self, wire: Wire, sections: Sequence[Section], what: str, *, vote: int = 0
    ) -> None:
        super().__init__(sections, what)
        self._wire, self.codec = wire, CODECS[wire.precision]()
        self._single = all(each.stream.errors is None for each in sections)
        owners = self._owners = 1 if self._single else wire.team.size
        self._firsts, blocks = [], 0  # index of the first block of each section
        for each in sections:
            self._firsts.append(blocks)
            blocks += owners * -(-each.elements // (BLOCK * owners))
        size, self._vote_bytes = self.codec.block_bytes, 8 * vote
        self._bytes = blocks // owners * size  # that a worker owns
        device = sections[0].stream.device if sections else torch.device("cpu")
        self._sent = torch.zeros(blocks, size, dtype=torch.uint8, device=device)
        self.kernels: Any = None
        if all(each.stream.dtype == torch.float32 for each in sections):
            self.kernels = triton_kernels(device, wire.precision)
        if self.kernels is not None:
            self.flag = to_device(torch.ones((), dtype=torch.bool, device="cpu"), device)
        self._summands: list[Tensor] = []  # encoded: two updates, or one sum of two stages
        self._contributes = True

    def encoded(self, index: int, start: int, count: int) -> tuple[Tensor, list[Tensor]]:
        """Return rows of this worker's update, and those whose sum is the sum of the updates."""
        rows = self._rows(index, start, count)
        return self._sent[rows], [each[rows] for each in self._summands]

    def _rows(self, index: int, start: int, count: int) -> slice:
        """Return the blocks that contain ``count`` numbers of a section."""
        first = self._firsts[index] + start // BLOCK
        return slice(first, first - (-count // BLOCK))

    @override
    def write(self, index: int, start: int, values: Tensor) -> None:
        stream, first, _ = self.sections[index]
        count, device = values.numel(), self._sent.device
        padding = -count % BLOCK
        if stream.residual is not None:
            whole = stream.residual[first + start : first + start + count + padding]
            whole[:count].add_(values)
            values = whole
        elif padding or values.dtype != torch.float32 or values.device != device:
            whole = torch.zeros(count + padding, dtype=torch.float32, device=device)
            whole[:count] = values
            values = whole
        rows = self._sent[self._rows(index, start, count)]
        self.codec.encode(values, rows, keep_error=stream.residual is not None)

    @override
    def finite(self) -> Tensor:
        if self.kernels is not None:
            return self.flag
        return ~self._sent[:, :4].view(torch.float32).isnan().any()

    @override
    def clear(self) -> None:
        self._sent.zero_()
        self._contributes = False

    @override
    def start(self, vote: Tensor | None, send: Tensor | bool = True) -> Future[Any]:
        assert (0 if vote is None else vote.numel() * 8) == self._vote_bytes
        team, sent = self._wire.team, self._sent
        rows = sent.new_empty(self._owners, self._bytes + self._vote_bytes)
        blocks = sent.view(-1, self._owners, sent.shape[1]).transpose(0, 1)
        torch.mul(blocks, send, out=self._blocks(rows))
        if vote is not None:
            vote = vote if vote.device == sent.device else to_device(vote, sent.device)
            rows[:, self._bytes :] = vote.view(torch.uint8)
        flat = rows.view(-1)
        if self._single:
            return team.communicator.gather(flat, what=self.what).then(self._store_updates)
        first = team.communicator.exchange(flat, what=self.what)
        # Count the second stage now, because the step in which it starts may vary.
        team.account.sent(self._bytes)
        stages = team.stages.start(first, self._start_second, what=self.what, like=flat)
        return stages.then(self._store_sums)

    def _blocks(self, rows: Tensor) -> Tensor:
        """Return the encoded blocks in rows of bytes: [rows, blocks, bytes of a block]."""
        blocks: Tensor = rows[:, : self._bytes].unflatten(1, (-1, self.codec.block_bytes))
        return blocks

    def _store_updates(self, rows: list[Tensor]) -> None:
        self._read_votes(rows)
        self._summands = [self._blocks(row[None])[0] for row in rows]

    def _read_votes(self, received: Iterable[Tensor]) -> None:
        if self._vote_bytes:
            votes = torch.stack([row[self._bytes :] for row in received]).cpu()
            self.votes = votes.view(torch.float64).tolist()

    def _start_second(self, received: Tensor) -> Future[list[Tensor]]:
        """Add up the blocks that this worker owns, and send the sums. For a background thread."""
        codec, owners = self.codec, self._owners
        received = received.view(owners, -1)
        self._read_votes(received)
        updates = self._blocks(received)
        sections = [*zip(self.sections, self._firsts, strict=True)]
        if not (self._contributes or bool(updates.any())):
            sections.clear()  # all updates are zero: a later sum contains the errors
        allocate = updates.new_empty if sections else updates.new_zeros
        out = allocate(updates.shape[1:])
        for (stream, start, stop), first in sections:
            assert stream.errors is not None
            first, count = first // owners, -(-(stop - start) // (BLOCK * owners))
            errors = stream.errors[start // owners :]
            rows = out[first : first + count]
            if self.kernels is not None:
                self.kernels.add_up(updates[:, first : first + count], errors, rows, codec.bits)
                continue
            for some, numbers in pieces(rows):
                part = errors[numbers]
                for update in updates:
                    codec.decode(update[first : first + count][some], part, add=True)
                codec.encode(part, rows[some])
        assert self._wire.duplicate is not None
        return self._wire.duplicate.gather(out.view(-1), what=self.what)

    def _store_sums(self, rows: list[Tensor]) -> None:
        owned = [row.view(-1, self.codec.block_bytes) for row in rows]
        self._summands = [torch.stack(owned, 1).flatten(0, 1)]

    @override
    def read(self, index: int, start: int, total: Tensor, sent: Tensor | None = None) -> None:
        update, summands = self.encoded(index, start, total.numel())
        if sent is not None:
            self._decode([update], sent)
        self._decode(summands, total)

    def _decode(self, summands: Sequence[Tensor], out: Tensor) -> None:
        """out ← the sum of encoded blocks, added in their order."""
        total = out
        if out.dtype != torch.float32 or out.device != self._sent.device:
            total = torch.empty(len(out), dtype=torch.float32, device=self._sent.device)
        for index, rows in enumerate(summands):
            self.codec.decode(rows, total, add=index > 0)
        if total is not out:
            out.copy_(total)


class All(Future[None]):
    """Future that is done when all of several futures are done."""

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self._futures = futures

    @override
    def done(self) -> bool:
        # Operations usually finish in order, so the last one is the most likely to be missing.
        return all(future.done() for future in reversed(self._futures))

    @override
    def wait(self) -> None:
        for future in self._futures:
            future.wait()
