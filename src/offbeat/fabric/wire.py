"""How sums travel: as they are, or quantised with error feedback.

A quantised sum has two stages. Cut into one chunk for each worker, the tensor is rounded and
exchanged all to all; every worker adds what it got of its chunk in float32, rounds that sum once,
and all gather the rounded sums. So no partial sum is rounded on the way, and all workers decode the
same bytes. What rounding took away is kept, on both stages, and added the next time.

The second stage starts as soon as somebody asks (``done``, ``wait``, the next ``sum``) and finds
the first one ended, at the latest before the worker blocks in any operation. It runs on a twin of
the communicator, in the order in which the first stages were started, so that the order is the
same on all workers whenever each of them asks. All wires of a team keep one such order: a worker
that waited for one of a later sum would hold up the others in an earlier one.
"""

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.arguments import require_choice
from offbeat.fabric.accounting import Account
from offbeat.fabric.codec import BLOCK, CODECS, Codec
from offbeat.fabric.handle import Completed, Handle
from offbeat.fabric.team import Team

T = TypeVar("T")
Precision = Literal["float32", "bfloat16", "int8", "int4", "int2"]
SECOND = {"int2": "int4"}
"""Of sums, where it is another one: a sum of numbers with few bits has more."""


def require_precision(precision: object) -> None:
    """Raise ValueError unless ``precision`` is one of ``Precision``."""
    require_choice("wire", precision, get_args(Precision))


class _Coding:
    """What the numbers are rounded to on both stages."""

    def __init__(self, precision: Precision) -> None:
        self.first: Codec = CODECS[precision]()
        self.second: Codec = CODECS[SECOND.get(precision, precision)]()

    @property
    def most_block_bytes(self) -> int:
        """Of a block on the stage that has more."""
        return max(self.first.block_bytes, self.second.block_bytes)


class _Stream:
    """The errors not yet fed back of what is summed again and again under one name.

    Attributes:
        sent: Of rounding what this worker sent, float32; a row for each worker's chunk.
        summed: Of rounding the sum of this worker's chunk.
    """

    def __init__(self, sent: Tensor, summed: Tensor) -> None:
        self.sent, self.summed = sent, summed
        self._before: dict[str, Tensor] = {}

    def remember(self, name: Literal["sent", "summed"]) -> None:
        """Note the errors on one stage, for ``take_back``."""
        errors: Tensor = getattr(self, name)
        if name in self._before:
            self._before[name].copy_(errors)
        else:
            self._before[name] = errors.clone()

    def take_back(self) -> None:
        """Put back what was remembered."""
        self.sent.copy_(self._before["sent"])
        self.summed.copy_(self._before["summed"])

    def forget(self) -> None:
        """Free the memory of ``remember``."""
        self._before.clear()


@dataclass(eq=False)
class _Sum(Handle[Tensor]):
    """A quantised sum under way.

    Attributes:
        wire: What it travels on.
        coding: What it is rounded to.
        stream: The errors on both stages.
        result: Where the sum goes.
        first: The exchange of the first stage.
        contribute: Whether this worker adds anything.
        tentative: Whether it may be taken back.
        what: Names it in errors.
        payload: What this worker sent, while somebody may ask for it.
        second: The gathering of the second stage, once it is started.
        ended: Whether ``result`` is there.
    """

    wire: "Wire"
    coding: _Coding
    stream: _Stream
    result: Tensor
    first: Handle[Tensor]
    contribute: bool
    tentative: bool
    what: str
    payload: Tensor | None = None
    second: Handle[list[Tensor]] | None = None
    ended: bool = False

    @override
    def done(self) -> bool:
        self.wire.advance()
        return self.ended or (self.second is not None and self.second.done())

    @override
    def wait(self) -> Tensor:
        if not self.ended:
            self.wire.end(self)
            self.second, self.ended = None, True
        return self.result


class Update(Handle[Tensor]):
    """A sum of updates under way; what rounding takes from one stays with the sender.

    Args:
        handle: The sum.
        sent: What this worker put in: its payload, or the numbers.
        decode: Writes a payload's numbers into a tensor; None for numbers.
    """

    def __init__(
        self,
        handle: Handle[Tensor],
        sent: Tensor,
        decode: Callable[[Tensor, Tensor], object] | None = None,
    ) -> None:
        self._handle, self._sent, self._decode = handle, sent, decode

    @override
    def done(self) -> bool:
        return self._handle.done()

    @override
    def wait(self) -> Tensor:
        return self._handle.wait()

    def sent(self, like: Tensor) -> Tensor:
        """u: what the others have got from this worker, as many numbers as ``like`` has."""
        if self._decode is None:
            return self._sent
        self._decode(self._sent, found := torch.empty_like(like))
        return found


class _Stages:
    """The sums of all wires of one account whose first stage is started and whose second is not."""

    def __init__(self) -> None:
        self.queue: deque[_Sum] = deque()
        self._waiting = False  # inside a wait of its own

    @classmethod
    def of(cls, account: Account) -> "_Stages":
        """Those of ``account``, which tells them before the worker may block."""
        for callback in account.before_waiting:
            if isinstance(callback, cls):
                return callback
        account.before_waiting.append(stages := cls())
        return stages

    def advance(self) -> None:
        """Start the second stage of every sum whose first one has ended. Never blocks."""
        while self.queue and self.queue[0].first.done():
            self._start()

    def __call__(self, handle: Handle[Any]) -> None:
        """The worker may be about to block: others need its second stages to come that far."""
        if self.queue and not self._waiting and not handle.done():
            self.wait_for(None)

    def wait_for(self, one: _Sum | None) -> list[Tensor]:
        """The second stage's result; with None only start those that are due."""
        self._waiting = True
        try:
            while self.queue and (one is None or one.second is None):
                self.queue[0].first.wait()
                self._start()
            self.advance()
            return [] if one is None or one.second is None else one.second.wait()
        finally:
            self._waiting = False

    def _start(self) -> None:
        head = self.queue.popleft()
        head.wire.start_second(head)


class Wire:
    """Sums over the workers, at the precision chosen for the wire.

    A collective, unless ``precision`` is "float32".

    Args:
        team: The workers.
        precision: "float32" sends tensors as they are; the others quantise them.
    """

    def __init__(self, team: Team, precision: Precision = "float32") -> None:
        require_precision(precision)
        self._team, self.precision = team, precision
        self._streams: dict[str, _Stream] = {}
        self._stages = _Stages.of(team.account)
        self._codings: dict[str, _Coding] = {}
        if not self.exact:
            self._twin = team.fabric.twin()

    @property
    def exact(self) -> bool:
        """Whether tensors travel as they are; those of a single worker do not travel."""
        return self.precision == "float32" or self._team.size == 1

    def sum(
        self,
        tensor: Tensor,
        *,
        stream: str,
        what: str,
        contribute: bool = True,
        tentative: bool = False,
    ) -> Handle[Tensor]:
        """Start replacing the flat ``tensor`` by its sum over the workers.

        A tensor so small that quantising, with its whole blocks, would send more goes as it is.

        Args:
            tensor: 1-D, floating point, alike on all workers. For a lossy wire it should hold
                changes (gradients, updates), not values: the error is relative to them.
            stream: What is sent again and again under this name; the quantisation error of one
                time is added the next. The same on all workers.
            what: Names the operation in errors.
            contribute: False sends zeros, whatever ``tensor`` holds, and keeps the errors of the
                stream for another time.
            tentative: ``take_back`` may follow. It needs another copy of the errors. The same on
                all workers.
        """
        self.advance()
        if not contribute:
            tensor.zero_()
        coding = self._coding(tensor, self.precision)
        if coding is None:
            return self._team.fabric.sum(tensor, what=what)
        state = self._stream(stream, tensor)
        if tentative:
            state.remember("sent")
        else:
            state.forget()
        one = _Sum(self, coding, state, tensor, Completed(tensor), contribute, tentative, what)
        self._start(one, self._encode(coding, tensor, state.sent, contribute=contribute))
        return one

    def sum_updates(
        self,
        tensor: Tensor,
        *,
        stream: str,
        what: str,
        contribute: bool = True,
        precision: Precision | None = None,
    ) -> Update:
        """As ``sum``, for updates of a model that keeps what rounding takes from them.

        No error is fed back on the first stage: the caller moves the model by the sum, less what
        ``Update.sent`` says that the others have got.

        Args:
            tensor: As for ``sum``.
            stream: As for ``sum``.
            what: Names the operation in errors.
            contribute: False sends zeros.
            precision: Of this sum; None is the wire's own. The same on all workers. The errors of
                the second stage go with the next quantised sum of the stream, whatever its
                precision.

        Raises:
            ValueError: a lossy precision, and the wire's own is "float32".
        """
        self.advance()
        if not contribute:
            tensor.zero_()
        coding = self._coding(tensor, self.precision if precision is None else precision)
        if coding is None:
            sent = tensor.clone()
            return Update(self._team.fabric.sum(tensor, what=what), sent)
        state = self._stream(stream, tensor, only_second=True)
        errors = tensor.new_zeros(self._team.size, state.summed.numel(), dtype=torch.float32)
        payload = self._encode(coding, tensor, errors, contribute=contribute)
        one = _Sum(self, coding, state, tensor, Completed(tensor), contribute, False, what)
        self._start(one, payload)
        return Update(one, payload, functools.partial(self._decode, coding.first))

    def _coding(self, tensor: Tensor, precision: Precision) -> _Coding | None:
        """What to round ``tensor`` to; None: it goes as it is, for that sends less."""
        require_precision(precision)
        if precision == "float32" or self._team.size == 1:
            return None
        if self.exact:
            raise ValueError(
                f"a sum in {precision!r} over a wire of 'float32', which has no second stage: "
                "make the wire of a lossy precision"
            )
        coding = self._codings.get(precision) or _Coding(precision)
        self._codings[precision] = coding
        blocks = self._team.size * self._chunk_blocks(tensor)
        return coding if blocks * coding.most_block_bytes < tensor.nbytes else None

    def _encode(
        self, coding: _Coding, tensor: Tensor, errors: Tensor, *, contribute: bool
    ) -> Tensor:
        """The payload of the first stage of ``tensor`` plus ``errors``, which become those of it.

        Args:
            coding: What to round to.
            tensor: 1-D.
            errors: float32, a row for each worker's chunk.
            contribute: False: zeros; the errors stay.
        """
        size, elements = errors.shape
        chunk_bytes = elements // BLOCK * coding.first.block_bytes
        payload = torch.empty(size * chunk_bytes, dtype=torch.uint8, device=tensor.device)
        if not contribute:
            return payload.zero_()
        for rank, (row, part) in enumerate(zip(errors, payload.chunk(size), strict=True)):
            coding.first.encode(row, part, plus=tensor[rank * elements :])
        return payload

    def _decode(self, codec: Codec, payload: Tensor, values: Tensor) -> None:
        """Values ← the numbers of a payload of ``_encode``."""
        elements = self._chunk_blocks(values) * BLOCK
        parts = payload.chunk(self._team.size)
        for part, chunk in zip(parts, values.split(elements), strict=False):
            codec.decode(part, chunk)

    def _start(self, one: _Sum, payload: Tensor) -> None:
        blocks = one.stream.summed.numel() // BLOCK
        # Of the second stage, which starts at any time.
        self._team.account.sent(blocks * one.coding.second.block_bytes)
        one.first = self._team.fabric.exchange(payload, what=one.what)
        self._stages.queue.append(one)

    def take_back(self, stream: str) -> None:
        """As if the last, tentative sum under ``stream`` had not been. It must have ended.

        All workers do so, and none uses its result.
        """
        if stream in self._streams:
            self._streams[stream].take_back()

    def _chunk_blocks(self, tensor: Tensor) -> int:
        """Blocks of each worker's chunk of ``tensor``."""
        return -(-tensor.numel() // (BLOCK * self._team.size))

    def _stream(self, name: str, tensor: Tensor, *, only_second: bool = False) -> _Stream:
        rows, columns = self._team.size, self._chunk_blocks(tensor) * BLOCK
        shape = (0 if only_second else rows, columns)
        state, device = self._streams.get(name), tensor.device
        if state is None:
            sent = torch.zeros(shape, device=device)
            state = self._streams[name] = _Stream(sent, torch.zeros(columns, device=device))
        elif state.sent.device != device:  # loaded from a checkpoint
            state.sent, state.summed = state.sent.to(device), state.summed.to(device)
        if state.sent.shape != shape:
            raise ValueError(
                f"stream {name!r} of the wire has {tuple(state.sent.shape)} errors to feed back, "
                f"a tensor of {tensor.numel()} elements needs {shape}: give each tensor a stream "
                "of its own, and resume with as many workers"
            )
        return state

    def advance(self) -> None:
        """Start the second stage of every sum whose first one has ended. Never blocks."""
        self._stages.advance()

    def end(self, one: _Sum) -> None:
        """Wait for a sum of this wire and decode it."""
        parts = self._stages.wait_for(one)
        chunk_elements = one.stream.summed.numel()
        for part, chunk in zip(parts, one.result.split(chunk_elements), strict=False):
            one.coding.second.decode(part, chunk)

    def start_second(self, one: _Sum) -> None:
        """Add up this worker's chunk of a sum and send it to all."""
        received, errors, coding = one.first.wait(), one.stream.summed, one.coding
        one.first = Completed(one.result)  # frees the payloads
        if one.tentative:
            one.stream.remember("summed")
        blocks, block_bytes = errors.numel() // BLOCK, coding.second.block_bytes
        payload = torch.empty(blocks * block_bytes, dtype=torch.uint8, device=errors.device)
        if one.contribute or bool(received.any()):
            for part in received.chunk(self._team.size):
                coding.first.add(part, errors)
            coding.second.encode(errors, payload)
        else:  # nobody contributes: the sum is zero, and the errors wait for another one
            payload.zero_()
        with self._team.account.paused():  # counted when the sum was started
            one.second = self._twin.gather(payload, what=one.what)

    def state_dict(self) -> dict[str, Any]:
        """The errors not yet fed back, by stream. No sum may be under way."""
        assert all(one.wire is not self for one in self._stages.queue), "a sum is under way"
        return {
            name: {"sent": one.sent.clone(), "summed": one.summed.clone()}
            for name, one in self._streams.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        self._streams = {
            name: _Stream(one["sent"].clone(), one["summed"].clone()) for name, one in state.items()
        }
