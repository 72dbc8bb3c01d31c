"""A quantized sum over the workers in two stages, with error feedback.

1. All-to-all: each worker divides its tensor into one chunk per worker, quantizes the chunks, and
   sends chunk k to worker k.
2. All-gather: worker k adds the received chunks in float32, quantizes the sum, and sends it to all
   workers.

So each number is quantized only twice, and all workers decode the same bytes. A *stream* is a
sequence of sums of the same tensor. The quantization errors of both stages are added to the next
sum of the stream (error feedback).

**When the second stage starts.** The training thread starts it, not a background thread:

- ``start_second_stages``, ``done`` and each new sum start it if the first stage has ended.
- ``wait`` waits for the first stages of this and of all earlier sums, then starts their second
  stages.
- Before the training thread blocks in another collective, it waits for all first stages and starts
  all second stages. Another worker may wait for one of them before it starts that collective.

**Order.** Workers start second stages at different times, but all must start these collectives in
the same order. Therefore second stages are queued in the order in which the sums were started. They
run on a twin (a second communicator), so that their order is independent of other collectives. All
wires of a worker share one queue, so a wait for a sum of one wire also starts the earlier second
stages of the others.
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
    """Quantization errors of one stream, which the next sum adds.

    Attributes:
        sent: Errors of the first stage: float32, one row per chunk. No rows if the caller keeps
            these errors (``Wire.sum_updates``).
        summed: Errors of the second stage, in this worker's chunk: float32, 1-D.
    """

    def __init__(self, sent: Tensor, summed: Tensor) -> None:
        self.sent, self.summed = sent, summed
        self._saved: dict[str, Tensor] = {}

    def save(self, stage: Literal["sent", "summed"], codecs: StageCodecs) -> None:
        """Keep a copy of the errors of one stage for ``restore``."""
        errors: Tensor = getattr(self, stage)
        self._saved[stage] = codecs.copy_errors(errors, self._saved.get(stage))

    def restore(self) -> None:
        """Set the errors of both stages to the saved copies."""
        self.sent.copy_(self._saved["sent"])
        self.summed.copy_(self._saved["summed"])

    def add_summed(self, tensor: Tensor, rank: int) -> None:
        """Add ``summed`` to the chunk of worker ``rank`` in ``tensor``, which is sent exactly."""
        size = self.summed.numel()
        chunk = tensor[rank * size :][:size]
        chunk.add_(self.summed[: chunk.numel()].to(tensor.device))

    def discard_saved(self) -> None:
        """Delete the saved copies, to free their memory."""
        self._saved.clear()


@dataclass(eq=False)
class TwoStageSum(Handle[LazyVector]):
    """A quantized sum in progress. ``start`` starts it.

    Attributes:
        team: The workers.
        twin: Communicator of the second stages.
        queue: Queue of the sums whose second stage has not started.
        codecs: Codecs of both stages.
        errors: Quantization errors of the stream.
        like: Vector with the length, dtype and device of the sum.
        contribute: False if this worker sends zeros.
        tentative: True if ``Wire.undo`` may follow, which restores the errors.
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
        """Start the first stage: send one chunk of ``payload`` to each worker."""
        blocks = self.errors.summed.numel() // BLOCK
        # Count the bytes of the second stage now, because the step in which it starts may vary.
        self.team.account.sent(blocks * self.codecs.second.block_bytes)
        self._first = self.team.communicator.exchange(payload, what=self.what)
        self.queue.append(self)

    @property
    def first(self) -> Handle[Tensor]:
        """Handle of the first stage, until the second stage starts."""
        assert self._first is not None
        return self._first

    @property
    def second(self) -> Handle[list[Tensor]] | None:
        """Handle of the second stage. None before its start and after ``wait``."""
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
            # All workers sent zeros. Send zeros, too, and keep the errors for a later sum.
            payload = self.codecs.zero_payload(self.codecs.second_payload(errors))
        with self.team.account.paused():  # counted by ``start``
            self._second = self.twin.gather(payload, what=self.what)

    @override
    def done(self) -> bool:
        self.queue.start_second_stages()
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
    """Queue of the sums whose second stage has not started, in the order of their start.

    The queue is a callback in ``Account.before_waiting``, which runs before each wait for a
    collective.
    """

    def __init__(self) -> None:
        self._sums: deque[TwoStageSum] = deque()
        self._waiting = False  # True while this queue waits: such a wait calls the queue again

    @classmethod
    def get_or_create(cls, account: Account) -> "SecondStageQueue":
        """Return the only queue of ``account``. The first call creates and registers it."""
        for callback in account.before_waiting:
            if isinstance(callback, cls):
                return callback
        account.before_waiting.append(queue := cls())
        return queue

    def append(self, entry: TwoStageSum) -> None:
        """Add a sum whose first stage was started."""
        self._sums.append(entry)

    def has_errors_of(self, streams: dict[str, ErrorFeedback]) -> bool:
        """Return True if a queued sum will change the errors of one of these ``streams``."""
        return any(entry.errors is errors for entry in self._sums for errors in streams.values())

    def start_second_stages(self) -> None:
        """Start second stages in order, up to the first sum that must wait. Never blocks."""
        while self._sums and self._sums[0].first.done():
            self._start_second_of_head()

    def wait_for(self, entry: TwoStageSum) -> list[Tensor]:
        """Wait for a sum, and return its second-stage payloads, one per chunk.

        Also waits for the first stages of earlier sums, but not of later sums: another worker may
        need this sum before it starts a later one.
        """
        self._waiting = True
        try:
            while self._sums and entry.second is None:
                self._start_second_of_head()
            self.start_second_stages()
            assert entry.second is not None
            return entry.second.wait()
        finally:
            self._waiting = False

    def __call__(self, handle: Handle[Any]) -> None:
        """Wait for all first stages and start all second stages, before a wait for ``handle``.

        Does nothing if the wait for ``handle`` would not block, or is a wait of this queue.
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
        self._sums[0].first.wait()  # if this raises, the sum stays in the queue
        self._sums.popleft().start_second()
