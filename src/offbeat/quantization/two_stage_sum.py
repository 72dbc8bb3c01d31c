"""A quantized sum in two stages, its error feedback, and the order of the second stages.

1. Each worker quantizes its tensor, one chunk for each worker, and sends chunk k to worker k
   (all-to-all).
2. Worker k adds the received chunks in float32, quantizes the sum, and sends it to all workers
   (all-gather).

No partial sum is quantized on the way, and all workers decode the same bytes. The quantization
errors of both stages are added to the next sum of the same stream (error feedback).

The second stage starts when the worker next calls ``done``, ``wait`` or ``Wire.sum`` after the
first stage has ended, and at the latest before the worker blocks in any collective. Workers make
these calls at different times. The order of the all-gathers must still be equal on all workers, so
second stages start in the order in which the first ones were started, and run on a duplicate of the
communicator. All wires of a team share one such order. Otherwise a worker that waits for a later
sum of one wire would delay its peers, which wait for an earlier sum of another wire.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from offbeat.quantization.decoding import LazyVector, PayloadVector
from offbeat.quantization.kernels import BLOCK
from offbeat.quantization.payloads import StageCodecs
from offbeat.transport.accounting import Account
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.transport.team import Team


class ErrorFeedback:
    """Quantization errors of one stream that the next sum will add.

    Attributes:
        sent: Errors of this worker's contributions: float32, one row for each worker's chunk.
        summed: Errors of the sums of this worker's chunk: float32, 1-D.
    """

    def __init__(self, sent: Tensor, summed: Tensor) -> None:
        self.sent, self.summed = sent, summed
        self._saved: dict[str, Tensor] = {}

    def save(self, stage: Literal["sent", "summed"], codecs: StageCodecs) -> None:
        """Copy the errors of one stage, for ``restore``."""
        errors: Tensor = getattr(self, stage)
        self._saved[stage] = codecs.copy_errors(errors, self._saved.get(stage))

    def restore(self) -> None:
        """Restore the errors of both stages from the copies."""
        self.sent.copy_(self._saved["sent"])
        self.summed.copy_(self._saved["summed"])

    def discard_saved(self) -> None:
        """Free the memory of the copies."""
        self._saved.clear()


@dataclass(eq=False)
class TwoStageSum(Handle[LazyVector]):
    """A quantized sum in flight.

    Attributes:
        team: The workers.
        twin: Communicator of the second stages.
        queue: Queue of all sums whose second stage has not started.
        codecs: Codecs of both stages.
        errors: Error feedback of the stream.
        like: Vector with the length, dtype and device of the sum.
        contribute: False if this worker sends zeros.
        tentative: True if ``Wire.undo`` may follow.
        what: Name of the operation in errors.
    """

    team: Team
    twin: Communicator
    queue: "SecondStageQueue"
    codecs: StageCodecs
    errors: ErrorFeedback
    like: LazyVector
    contribute: bool
    tentative: bool
    what: str
    _first: Handle[Tensor] | None = None
    _second: Handle[list[Tensor]] | None = None
    _result: PayloadVector | None = None

    def start(self, payload: Tensor) -> None:
        """Start the first stage: send the chunks of ``payload``."""
        blocks = self.errors.summed.numel() // BLOCK
        # The bytes of the second stage are counted now, because it starts at any later time.
        self.team.account.sent(blocks * self.codecs.second.block_bytes)
        self._first = self.team.communicator.exchange(payload, what=self.what)
        self.queue.append(self)

    @property
    def first(self) -> Handle[Tensor]:
        """The first stage. Only until the second one is started."""
        assert self._first is not None
        return self._first

    @property
    def second(self) -> Handle[list[Tensor]] | None:
        """The second stage, once it is started and until its result was taken."""
        return self._second

    def start_second(self) -> None:
        """Wait for the first stage, add up this worker's chunk and send the sum to all workers."""
        received, errors = self.first.wait(), self.errors.summed
        self._first = None  # frees the payloads
        if self.tentative:
            self.errors.save("summed", self.codecs)
        if self.contribute or bool(received.any()):
            payload = self.codecs.reduce(received, self.team.size, errors)
        else:
            # Only zeros were sent: the sum is zero, and the errors stay for a later one.
            payload = self.codecs.zero_payload(self.codecs.second_payload(errors))
        with self.team.account.paused():  # counted by ``start``
            self._second = self.twin.gather(payload, what=self.what)

    @override
    def done(self) -> bool:
        self.queue.advance()
        return self._result is not None or (self._second is not None and self._second.done())

    @override
    def wait(self) -> PayloadVector:
        if self._result is None:
            chunks, elements = self.queue.wait_for(self), self.errors.summed.numel()
            self._result = PayloadVector(
                self.codecs.second, [[payload] for payload in chunks], elements, self.like
            )
            self._second = None
        return self._result


class SecondStageQueue:
    """Sums of all wires of one account whose second stage has not started, in order of their start.

    It is a callback in ``Account.before_waiting``.
    """

    def __init__(self) -> None:
        self._sums: deque[TwoStageSum] = deque()
        self._waiting = False  # True while this object blocks; its own waits call it, too

    @classmethod
    def of(cls, account: Account) -> "SecondStageQueue":
        """Return the queue of ``account``. The first call makes and registers it."""
        for callback in account.before_waiting:
            if isinstance(callback, cls):
                return callback
        account.before_waiting.append(queue := cls())
        return queue

    def append(self, entry: TwoStageSum) -> None:
        """Add a sum whose first stage was started."""
        self._sums.append(entry)

    def has_errors_of(self, streams: dict[str, ErrorFeedback]) -> bool:
        """Return True if a queued sum will change the errors of one of these streams."""
        return any(entry.errors is errors for entry in self._sums for errors in streams.values())

    def advance(self) -> None:
        """Start the second stage of every sum whose first one has ended. Never blocks."""
        while self._sums and self._sums[0].first.done():
            self._start_second_of_head()

    def wait_for(self, entry: TwoStageSum) -> list[Tensor]:
        """Wait for a sum. Return its second-stage payloads, one for each chunk.

        Starts the second stages of the sums before it, which blocks on their first stages, but not
        those of later sums: peers may wait for this sum before they start a later one.
        """
        self._waiting = True
        try:
            while self._sums and entry.second is None:
                self._start_second_of_head()
            self.advance()
            assert entry.second is not None
            return entry.second.wait()
        finally:
            self._waiting = False

    def __call__(self, handle: Handle[Any]) -> None:
        """Start all second stages before the worker blocks on ``handle``.

        Peers may need them before they start the operation of ``handle``. Does nothing while
        ``wait_for`` blocks.
        """
        if not self._sums or self._waiting or handle.done():
            return
        self._waiting = True
        try:
            while self._sums:
                self._start_second_of_head()
        finally:
            self._waiting = False

    def _start_second_of_head(self) -> None:
        self._sums[0].first.wait()  # if it fails, the sum remains in the queue
        self._sums.popleft().start_second()
