"""How sums travel: as they are, or quantised with error feedback.

A quantised sum has two stages. Cut into one chunk for each worker, the tensor is rounded and
exchanged all to all; every worker adds what it got of its chunk in float32, rounds that sum once,
and all gather the rounded sums. So no partial sum is rounded on the way, and all workers decode the
same bytes. What rounding took away is kept, on both stages, and added the next time.

Updates of which the sender keeps what rounding takes away (``sum_updates``) are gathered in one
stage where few workers send few bits: everyone adds up what everyone has sent.

The second stage starts as soon as somebody asks (``done``, ``wait``, the next ``sum``) and finds
the first one ended, at the latest before the worker blocks in any operation. It runs on a twin of
the communicator, in the order in which the first stages were started, so that the order is the
same on all workers whenever each of them asks. All wires of a team keep one such order: a worker
that waited for one of a later sum would hold up the others in an earlier one.
The file is long because that order is kept between all kinds of sums in it.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor
from typing_extensions import override

from offbeat.arguments import Precision as Precision
from offbeat.arguments import require_choice
from offbeat.quantization.decoding import Coded, Numbers, Plain, Summed, Update
from offbeat.quantization.kernels import BLOCK, kernels
from offbeat.quantization.payloads import Coding, gathers
from offbeat.quantization.placeholder_codecs import BlankCoding
from offbeat.transport.accounting import Account
from offbeat.transport.handle import Handle
from offbeat.transport.team import Team

T = TypeVar("T")


def require_precision(precision: object) -> None:
    """Raise ValueError unless ``precision`` is one of ``Precision``."""
    require_choice("wire", precision, get_args(Precision))


class _Stream:
    """The errors not yet fed back of what is summed again and again under one name.

    Attributes:
        sent: Of rounding what this worker sent, float32; a row for each worker's chunk.
        summed: Of rounding the sum of this worker's chunk.
    """

    def __init__(self, sent: Tensor, summed: Tensor) -> None:
        self.sent, self.summed = sent, summed
        self._before: dict[str, Tensor] = {}

    def remember(self, name: Literal["sent", "summed"], coding: Coding) -> None:
        """Note the errors on one stage, for ``take_back``."""
        errors: Tensor = getattr(self, name)
        self._before[name] = coding.copy(errors, self._before.get(name))

    def take_back(self) -> None:
        """Put back what was remembered."""
        self.sent.copy_(self._before["sent"])
        self.summed.copy_(self._before["summed"])

    def forget(self) -> None:
        """Free the memory of ``remember``."""
        self._before.clear()


@dataclass(eq=False)
class _Sum(Handle[Numbers]):
    """A quantised sum under way.

    Attributes:
        wire: What it travels on.
        coding: What it is rounded to.
        stream: The errors on both stages.
        like: What is summed.
        contribute: Whether this worker adds anything.
        tentative: Whether it may be taken back.
        what: Names it in errors.
        first: The exchange of the first stage, until the second one is started.
        second: The gathering of the second stage, once it is started.
        result: The sum, once it has ended.
    """

    wire: "Wire"
    coding: Coding
    stream: _Stream
    like: Numbers
    contribute: bool
    tentative: bool
    what: str
    first: Handle[Tensor] | None = None
    second: Handle[list[Tensor]] | None = None
    result: Coded | None = None

    @override
    def done(self) -> bool:
        self.wire.advance()
        return self.result is not None or (self.second is not None and self.second.done())

    @override
    def wait(self) -> Coded:
        if self.result is None:
            parts, chunk = self.wire.payloads(self), self.stream.summed.numel()
            self.result = Coded(self.coding.second, parts, chunk, self.like)
            self.second = None
        return self.result


class _Decoded(Handle[Tensor]):
    """A quantised sum under way, which goes to ``result``."""

    def __init__(self, total: _Sum, result: Tensor) -> None:
        self._total: _Sum | None = total
        self._result = result

    @override
    def done(self) -> bool:
        return self._total is None or self._total.done()

    @override
    def wait(self) -> Tensor:
        if self._total is not None:
            self._total.wait().read(self._result)
            self._total = None  # frees the payloads
        return self._result


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
        while self.queue and _first(self.queue[0]).done():
            self._start()

    def __call__(self, handle: Handle[Any]) -> None:
        """The worker may be about to block: others need its second stages to come that far."""
        if self.queue and not self._waiting and not handle.done():
            self.wait_for(None)

    def wait_for(self, one: _Sum | None) -> list[Tensor]:
        """Wait for a sum and return its payloads. All sums before it get their second stage first.

        Args:
            one: The sum. None: wait for the first stage of every queued sum, start its second
                stage, and return nothing.
        """
        self._waiting = True
        try:
            while self.queue and (one is None or one.second is None):
                _first(self.queue[0]).wait()
                self._start()
            self.advance()
            return [] if one is None or one.second is None else one.second.wait()
        finally:
            self._waiting = False

    def _start(self) -> None:
        head = self.queue.popleft()
        head.wire.start_second(head)


def _first(one: _Sum) -> Handle[Tensor]:
    assert one.first is not None
    return one.first


class Wire:
    """Sums over the workers, at the precision chosen for the wire.

    A collective, unless ``precision`` is "float32".

    Args:
        team: The workers.
        precision: "float32" sends tensors as they are; the others quantise them. "auto": each sum
            says its own.
    """

    def __init__(self, team: Team, precision: Precision = "float32") -> None:
        require_precision(precision)
        self._team, self.precision = team, precision
        self._streams: dict[str, _Stream] = {}
        self._stages = _Stages.of(team.account)
        self._codings: dict[str, Coding] = {}
        self._scale = team.host.scale
        if not self.exact:
            if self._scale == 1:
                kernels()  # compiled now, not in the first step
            self._twin = team.communicator.twin()

    @property
    def chosen(self) -> bool:
        """Whether the strategy chooses what it sends."""
        return self.precision == "auto"

    # -- for one that chooses by itself; see ``adaptive`` ----------------------------------------

    @property
    def slots(self) -> int:
        """How many numbers ``measured`` gives."""
        return 0

    def measured(self, step: int, *, stepping: bool) -> tuple[float, ...]:
        """What the roll of a round carries for this wire, called in own step ``step``."""
        return ()

    def acted(self, sums: Handle[tuple[float, ...]]) -> None:
        """A round has been acted on, whose roll has told ``sums``."""

    def interrupted(self) -> None:
        """All workers have met, and something else than training may follow."""

    def told(self) -> dict[str, str]:
        """What was chosen and why, for ``Stats.details``."""
        return {}

    # -- sums ------------------------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether tensors travel as they are; those of a single worker do not travel."""
        return self.precision == "float32" or self._team.size == 1

    def second_stage(self, precision: Precision) -> bool:
        """Whether sums of updates have one, at ``precision`` where the wire's own is "auto"."""
        precision = precision if self.precision == "auto" else self.precision
        return not (self.exact or precision == "float32" or gathers(precision, self._team.size))

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
        numbers = Plain(tensor)
        coding = self._coding(numbers, self.precision)
        if coding is None:
            return self._team.communicator.sum(tensor, what=what)
        state = self._stream(stream, numbers, coding)
        if tentative:
            state.remember("sent", coding)
        else:
            state.forget()
        one = _Sum(self, coding, state, numbers, contribute, tentative, what)
        if contribute:
            payload = coding.encode(tensor, state.sent)
        else:
            payload = coding.zeros(coding.payload(state.sent.numel(), tensor.device))
        self._start(one, payload)
        return _Decoded(one, tensor)

    def sum_updates(
        self,
        update: Numbers,
        *,
        stream: str,
        what: str,
        contribute: bool = True,
        precision: Precision | None = None,
    ) -> Update:
        """As ``sum``, for updates of a model that keeps what rounding takes from them.

        No error is fed back on the first stage: the caller moves the model by the sum, less what
        ``Update.sent`` says that the others have got. Until then there are payloads in memory, and
        nothing else.

        Args:
            update: Alike on all workers; read once, a stretch at a time.
            stream: As for ``sum``.
            what: Names the operation in errors.
            contribute: False sends zeros, and reads nothing.
            precision: Of this sum; None is the wire's own. The same on all workers. The errors of
                the second stage go with the next quantised sum of the stream, whatever its
                precision.

        Raises:
            ValueError: a lossy precision, and the wire's own is "float32".
        """
        self.advance()
        coding = self._coding(update, self.precision if precision is None else precision)
        if coding is None:
            total = update.whole() if contribute else update.new().zero_()
            sent = Plain(total.clone())
            return Update(self._team.communicator.sum(total, what=what).then(Plain), sent)
        if gathers(coding.precision, self._team.size):
            return self._gather_updates(update, coding, contribute, what)
        state = self._stream(stream, update, coding, only_second=True)
        one = _Sum(self, coding, state, update, contribute, False, what)
        size, chunk = self._team.size, state.summed.numel()
        if contribute:
            payload = coding.round(update, size, chunk)
        else:
            payload = coding.zeros(coding.payload(size * chunk, update.device))
        self._start(one, payload)
        return Update(one, Coded(coding.first, coding.chunks(payload, size), chunk, update))

    def _gather_updates(
        self, update: Numbers, coding: Coding, contribute: bool, what: str
    ) -> Update:
        """In one stage: everyone adds up what everyone has sent, in the order of the ranks."""
        chunk = -(-self._elements(update) // BLOCK) * BLOCK
        if contribute:
            payload = coding.round(update, 1, chunk)
        else:
            payload = coding.zeros(coding.payload(chunk, update.device))
        gathering = self._team.communicator.gather(payload, what=what)
        total: Handle[Numbers] = gathering.then(
            lambda payloads: Summed(coding.first, payloads, update)
        )
        return Update(total, Coded(coding.first, [payload], chunk, update))

    def _coding(self, like: Numbers, precision: Precision) -> Coding | None:
        """What to round to; None: the numbers go as they are, for that sends less."""
        require_precision(precision)
        if precision == "float32" or self._team.size == 1:
            return None
        if self.exact:
            raise ValueError(
                f"a sum in {precision!r} over a wire of 'float32', which has no second stage: "
                "make the wire of a lossy precision"
            )
        assert precision != "auto", "each sum has to say its own"
        kind = Coding if self._scale == 1 else BlankCoding
        coding = self._codings.get(precision) or kind(precision)
        self._codings[precision] = coding
        blocks = self._team.size * self._chunk_blocks(like)
        return coding if blocks * coding.most_block_bytes < like.nbytes * self._scale else None

    def _start(self, one: _Sum, payload: Tensor) -> None:
        blocks = one.stream.summed.numel() // BLOCK
        # Of the second stage, which starts at any time.
        self._team.account.sent(blocks * one.coding.second.block_bytes)
        one.first = self._team.communicator.exchange(payload, what=one.what)
        self._stages.queue.append(one)

    def take_back(self, stream: str) -> None:
        """As if the last, tentative sum under ``stream`` had not been. It must have ended.

        All workers do so, and none uses its result.
        """
        if stream in self._streams:
            self._streams[stream].take_back()

    def _chunk_blocks(self, like: Numbers) -> int:
        """Blocks of each worker's chunk."""
        return -(-self._elements(like) // (BLOCK * self._team.size))

    def _elements(self, like: Numbers) -> int:
        """How many numbers ``like`` stands for."""
        return math.ceil(like.elements * self._scale)

    def _stream(
        self, name: str, like: Numbers, coding: Coding, *, only_second: bool = False
    ) -> _Stream:
        rows, columns = self._team.size, self._chunk_blocks(like) * BLOCK
        shape = (0 if only_second else rows, columns)
        state, device = self._streams.get(name), like.device
        if state is None:
            sent, summed = coding.errors(shape, device), coding.errors((columns,), device)
            state = self._streams[name] = _Stream(sent, summed)
        elif state.sent.device != device:  # loaded from a checkpoint
            state.sent, state.summed = state.sent.to(device), state.summed.to(device)
        if state.sent.shape != shape:
            raise ValueError(
                f"stream {name!r} of the wire has {tuple(state.sent.shape)} errors to feed back, "
                f"a tensor of {like.elements} elements needs {shape}: give each tensor a stream "
                "of its own, and resume with as many workers"
            )
        return state

    def advance(self) -> None:
        """Start the second stage of every sum whose first one has ended. Never blocks."""
        self._stages.advance()

    def payloads(self, one: _Sum) -> list[Tensor]:
        """Wait for a sum of this wire: one payload for each worker's chunk of it."""
        return self._stages.wait_for(one)

    def start_second(self, one: _Sum) -> None:
        """Add up this worker's chunk of a sum and send it to all."""
        received, errors, coding = _first(one).wait(), one.stream.summed, one.coding
        one.first = None  # frees the payloads
        if one.tentative:
            one.stream.remember("summed", coding)
        if one.contribute or bool(received.any()):
            payload = coding.add_up(received, self._team.size, errors)
        else:  # nobody contributes: the sum is zero, and the errors wait for another one
            payload = coding.zeros(coding.summed(errors))
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
