"""Messages: tensors of one or several parts of the model, summed over the workers.

Each worker sends its update u of each part, and some numbers about itself, its *vote*. The update
is a change of the model, or a gradient. The sum of the updates is decoded when it is needed, piece
by piece. Two kinds of messages have the same interface:

- ``QuantizedMessage``: u is quantized.
- ``ExactMessage``: u is sent as it is.

A quantized sum takes two stages:

1. All-to-all: each worker divides its blocks into one chunk per worker, and sends chunk k to worker
   k.
2. All-gather: worker k adds the received chunks in float32, quantizes the sum, and sends it to all
   workers.

So each number is quantized only twice, and all workers decode the same bytes. A background thread
starts the second stages, in the order in which the sums were started (``transport/stages.py``).
They run on a twin (a second communicator), so that their order is independent of other collectives.

Two workers that average models need a single stage, in which each one receives the update of the
other. It sends as many bytes, and saves one operation and one quantization.

The quantization errors of both stages are added to the next sum of the same tensor (*error
feedback*). If models are averaged, the errors of the first stage stay in the local model. All other
errors are in the ``Stream``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.base import pieces
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.integers import IntegerCodec
from offbeat.quantization.kernels import BLOCK
from offbeat.quantization.wire import Wire
from offbeat.transport.handle import Handle
from offbeat.transport.team import Team

SINGLE_STAGE_WORKERS = 2
"""Largest number of workers whose models are averaged in a single stage."""

Squares = NDArray[np.float64]
"""‖D‖² and ‖u‖², summed over pieces."""


class Stream:
    """What one part of the model needs in all of its messages.

    Args:
        slices: Number of elements, dtype and device of each slice of the part.
        workers: Number of workers.
        device: Device of a quantized message of the part.

    Attributes:
        starts: Index of the first block of each slice. Each slice begins with a new block.
        chunk: Blocks of the chunk that each worker owns in the second stage of a sum.
        errors: Quantization errors of the second stage in this worker's chunk: float32, 1-D. None
            if sums take a single stage.
        residual: Quantization errors of the first stage: float32, 1-D, whole blocks. None if they
            stay in the model.
    """

    def __init__(
        self,
        slices: Sequence[tuple[int, torch.dtype, torch.device]],
        workers: int,
        device: torch.device,
    ) -> None:
        self._slices, self.device = list(slices), device
        self.starts, blocks = [], 0
        for length, _, _ in slices:
            self.starts.append(blocks)
            blocks += -(-length // BLOCK)
        self.chunk = -(-blocks // workers)
        self.errors: Tensor | None = None
        self.residual: Tensor | None = None
        self._buffers: list[Tensor] = []

    @property
    def elements(self) -> int:
        """Number of elements of the part."""
        return sum(length for length, _, _ in self._slices)

    @property
    def nbytes(self) -> int:
        """Bytes of the part in an exact message."""
        return sum(length * dtype.itemsize for length, dtype, _ in self._slices)

    def make_errors(self, *, residual: bool = False) -> None:
        """Allocate ``errors``, for quantized sums in two stages.

        ``residual`` True also allocates ``residual``, for a part with a single slice.
        """
        self.errors = torch.zeros(self.chunk * BLOCK, dtype=torch.float32, device=self.device)
        if residual:
            blocks = -(-self.elements // BLOCK)
            self.residual = torch.zeros(blocks * BLOCK, dtype=torch.float32, device=self.device)

    def make_full_errors(self) -> None:
        """Allocate ``errors`` for a message that keeps the error of each element of the part."""
        dtypes = {dtype for _, dtype, _ in self._slices}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self.errors = torch.zeros(self.elements, dtype=dtype, device=self.device)

    def split_errors(self) -> list[Tensor]:
        """Return the ``errors`` of ``make_full_errors`` of each slice, as views."""
        assert self.errors is not None
        return list(self.errors.split([length for length, _, _ in self._slices]))

    def buffers(self) -> list[Tensor]:
        """Return memory for the exact numbers of each slice. Later calls return the same memory."""
        if not self._buffers:
            self._buffers = [
                torch.empty(length, dtype=dtype, device=device)
                for length, dtype, device in self._slices
            ]
        return self._buffers

    def release(self) -> None:
        """Free the memory of ``buffers``."""
        self._buffers = []


class Message(ABC):
    """One message. The methods are called in this order: ``write``, ``start``, ``read``.

    Args:
        streams: The parts, in order.
        what: Name of the operation in errors.

    Attributes:
        votes: The vote of each worker, by rank, once the message has arrived.
        integers: True if the updates are quantized to integers.
    """

    integers = False

    def __init__(self, streams: Sequence[Stream], what: str) -> None:
        self.streams, self.what = streams, what
        self.votes: list[list[float]] = []

    @abstractmethod
    def write(self, part: int, piece: int, start: int, values: Tensor) -> None:
        """Put numbers of this worker's update into the message.

        Args:
            part: Index of the part in this message.
            piece: Index of the slice in the part.
            start: Index of the first number in the slice, a multiple of ``BLOCK``.
            values: The numbers, 1-D. Overwritten.
        """

    def finite(self) -> bool:
        """Return False if the encoded update is known to contain NaN or infinity."""
        return True

    @abstractmethod
    def clear(self) -> None:
        """Make the update zero. The errors of earlier sums wait for a later message."""

    @abstractmethod
    def start(self, vote: Sequence[float] | None) -> Handle[Any]:
        """Send the message. The handle sets ``votes``.

        Args:
            vote: Numbers about this worker. None: none are sent, by any worker.
        """

    @abstractmethod
    def read(self, part: int, piece: int, start: int, total: Tensor, sent: Tensor) -> None:
        """total ← the sum of the updates, and sent ← this worker's update, from ``start`` on.

        The arguments are those of ``write``. The tensors have any floating-point dtype.
        """


class ExactMessage(Message):
    """A message whose updates are sent as they are.

    Args:
        keep: True if ``read`` writes ``sent``: the message then keeps a copy of the update.
    """

    def __init__(self, team: Team, streams: Sequence[Stream], what: str, *, keep: bool) -> None:
        super().__init__(streams, what)
        self._team = team
        self._sums = [list(stream.buffers()) for stream in streams]
        self._sent: list[list[Tensor]] = []
        self._keep = keep

    @override
    def write(self, part: int, piece: int, start: int, values: Tensor) -> None:
        self._sums[part][piece][start : start + values.numel()].copy_(values)

    @override
    def clear(self) -> None:
        for sums in self._sums:
            for each in sums:
                each.zero_()

    @override
    def start(self, vote: Sequence[float] | None) -> Handle[Any]:
        team, what = self._team, self.what
        if self._keep:
            self._sent = [[each.clone() for each in sums] for sums in self._sums]
        handles: list[Handle[Any]] = []
        for i, sums in enumerate(self._sums):
            for j, each in enumerate(sums):
                handle = team.communicator.sum(each, what=what)

                def store(result: Tensor, i: int = i, j: int = j) -> None:
                    self._sums[i][j] = result

                handles.append(handle.then(store))
        if vote is not None:
            device = team.communicator.control_device
            own = torch.tensor(vote, dtype=torch.float64, device=device)

            def keep_votes(votes: list[Tensor]) -> None:
                self.votes = [each.tolist() for each in votes]

            gathering = team.communicator.gather(own, what=f"votes of {what}")
            handles.append(gathering.then(keep_votes))
        return All(handles)

    @override
    def read(self, part: int, piece: int, start: int, total: Tensor, sent: Tensor) -> None:
        numbers = slice(start, start + total.numel())
        total.copy_(self._sums[part][piece][numbers])
        if self._keep:
            sent.copy_(self._sent[part][piece][numbers])


class QuantizedMessage(Message):
    """A message whose updates are quantized. All parts have one device.

    The message is a matrix of bytes. With two stages it has one row for each worker: that worker's
    chunk of each part. In a single stage it has one row. The vote follows at the end of each row.

    Args:
        wire: The workers, and their communicator of second stages.
        precision: Precision of both stages.
        streams: The parts. Either all have ``errors``, or none, for a single stage.
        what: Name of the operation in errors.
        vote: Number of numbers in a vote.
    """

    def __init__(
        self, wire: Wire, precision: str, streams: Sequence[Stream], what: str, *, vote: int = 0
    ) -> None:
        super().__init__(streams, what)
        self._wire, self._codec = wire, CODECS[precision]()
        self.integers = isinstance(self._codec, IntegerCodec)
        self._size = size = self._codec.block_bytes
        self._single = streams[0].errors is None
        workers = wire.team.size
        rows = 1 if self._single else workers
        # Blocks of each part in one row, and the position of its first byte.
        self._blocks = [stream.chunk * (workers // rows) for stream in streams]
        self._starts = [size * sum(self._blocks[:i]) for i in range(len(streams))]
        self._vote_bytes = 8 * vote
        length = size * sum(self._blocks) + self._vote_bytes
        self._sent = torch.zeros(rows, length, dtype=torch.uint8, device=streams[0].device)
        self._sums: Tensor | None = None
        self._contributes = True

    def _ranges(self, part: int, piece: int, start: int, count: int) -> list[tuple[int, slice]]:
        """Return the rows, and the bytes in each, that contain ``count`` numbers of a slice."""
        size, width = self._size, self._blocks[part]
        block = self.streams[part].starts[piece] + start // BLOCK
        stop, found = block - (-count // BLOCK), []
        while block < stop:
            row, offset = divmod(block, width)
            blocks = min(stop - block, width - offset)
            first = self._starts[part] + offset * size
            found.append((row, slice(first, first + blocks * size)))
            block += blocks
        return found

    @override
    def write(self, part: int, piece: int, start: int, values: Tensor) -> None:
        residual, count = self.streams[part].residual, values.numel()
        padding, device = -count % BLOCK, self._sent.device
        if residual is not None:
            residual[start : start + count].add_(values)
            values = residual[start : start + count + padding]
        elif padding or values.dtype != torch.float32 or values.device != device:
            whole = torch.zeros(count + padding, dtype=torch.float32, device=device)
            whole[:count] = values
            values = whole
        targets = [self._sent[row, some] for row, some in self._ranges(part, piece, start, count)]
        rows = targets[0]
        if len(targets) > 1:  # a single call of the codec takes less time
            rows = torch.empty(sum(map(len, targets)), dtype=torch.uint8, device=device)
        self._codec.encode(values, rows.view(-1, self._size), keep_error=residual is not None)
        if len(targets) > 1:
            for target, encoded in zip(targets, rows.split([*map(len, targets)]), strict=True):
                target.copy_(encoded)

    @override
    def finite(self) -> bool:
        """Return False if a scale is NaN. A GPU is read once."""
        count = sum(self._blocks)
        if not (count and self.integers):
            return True
        blocks = self._sent[:, : self._size * count].unflatten(1, (count, self._size))
        return not bool(blocks[..., :4].contiguous().view(torch.float32).isnan().any())

    @override
    def clear(self) -> None:
        self._sent.zero_()
        self._contributes = False

    @override
    def start(self, vote: Sequence[float] | None) -> Handle[Any]:
        assert len(vote or ()) * 8 == self._vote_bytes
        if vote:
            numbers = torch.tensor(vote, dtype=torch.float64, device="cpu").view(torch.uint8)
            self._sent[:, -self._vote_bytes :] = numbers.to(self._sent.device)
        team, flat = self._wire.team, self._sent.view(-1)
        if self._single:
            return team.communicator.gather(flat, what=self.what).then(self._store)
        first = team.communicator.exchange(flat, what=self.what)
        # Count the second stage now, because the step in which it starts may vary.
        team.account.sent(self._size * sum(self._blocks))
        stages = team.stages.start(first, self._start_second, what=self.what, like=flat)
        return stages.then(self._store)

    def _store(self, rows: list[Tensor]) -> None:
        self._sums = torch.stack(rows)
        if self._single:
            self._read_votes(self._sums)

    def _read_votes(self, received: Tensor) -> None:
        if self._vote_bytes:
            votes = received[:, -self._vote_bytes :].cpu().contiguous()
            self.votes = votes.view(torch.float64).tolist()

    def _start_second(self, received: Tensor) -> Handle[list[Tensor]]:
        """Add up this worker's chunk of each part, and send the sums. For a background thread."""
        size, codec = self._size, self._codec
        received = received.view(len(self._sent), -1)
        self._read_votes(received)
        out = torch.zeros(size * sum(self._blocks), dtype=torch.uint8, device=received.device)
        for stream, start in zip(self.streams, self._starts, strict=True):
            stop = start + stream.chunk * size
            chunks = received[:, start:stop]
            if not (self._contributes or bool(chunks.any())):
                continue  # the sum is zero, too, and the errors are for a later one
            assert stream.errors is not None
            rows = out[start:stop].view(-1, size)
            for some, numbers in pieces(rows):
                part = stream.errors[numbers]
                for chunk in chunks:
                    codec.decode(chunk.view(-1, size)[some], part, add=True)
                codec.encode(part, rows[some])
        assert self._wire.twin is not None
        return self._wire.twin.gather(out, what=self.what)

    @override
    def read(
        self, part: int, piece: int, start: int, total: Tensor, sent: Tensor | None = None
    ) -> None:
        sums = self._sums
        assert sums is not None
        ranges = self._ranges(part, piece, start, total.numel())
        if sent is not None:
            self._decode([self._rows(self._sent, ranges)], sent)
        if self._single:  # the only row of each worker
            ((_, some),) = ranges
            self._decode([self._rows(sums, [(sender, some)]) for sender in range(len(sums))], total)
        else:
            self._decode([self._rows(sums, ranges)], total)

    def _rows(self, message: Tensor, ranges: Sequence[tuple[int, slice]]) -> Tensor:
        """Return the encoded blocks in ``ranges``."""
        found = [message[row, some] for row, some in ranges]
        return (found[0] if len(found) == 1 else torch.cat(found)).view(-1, self._size)

    def _decode(self, summands: Sequence[Tensor], out: Tensor) -> None:
        """out ← the sum of encoded blocks, added in their order."""
        total = out
        if out.dtype != torch.float32 or out.device != self._sent.device:
            total = torch.empty(len(out), dtype=torch.float32, device=self._sent.device)
        for index, rows in enumerate(summands):
            self._codec.decode(rows, total, add=index > 0)
        if total is not out:
            out.copy_(total)


class All(Handle[None]):
    """Handle of several operations."""

    def __init__(self, handles: Sequence[Handle[Any]]) -> None:
        self._handles = handles

    @override
    def done(self) -> bool:
        # Operations usually finish in order, so the last one is the most likely to be missing.
        return all(handle.done() for handle in reversed(self._handles))

    @override
    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
