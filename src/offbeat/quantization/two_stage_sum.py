"""A quantized sum over the workers in two stages, with error feedback.

1. All-to-all: each worker divides its tensor into one chunk per worker, quantizes the chunks, and
   sends chunk k to worker k.
2. All-gather: worker k adds the received chunks in float32, quantizes the sum, and sends it to all
   workers.

So each number is quantized only twice, and all workers decode the same bytes. A *stream* is a
sequence of sums of the same tensor. The quantization errors of both stages are added to the next
sum of the stream (error feedback).

A background thread starts the second stages, in the order in which the sums were started
(``transport/stages.py``). They run on a twin (a second communicator), so that their order is
independent of other collectives.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from offbeat.quantization.decoding import LazyVector, PayloadVector
from offbeat.quantization.kernels import BLOCK
from offbeat.quantization.payloads import StageCodecs
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.transport.operation import Exchange
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
        twin: Communicator of the second stages, without accounting.
        codecs: Codecs of both stages.
        errors: Quantization errors of the stream.
        like: Vector with the length, dtype and device of the sum.
        contribute: False if this worker sends zeros.
        tentative: True if ``Wire.undo`` may follow, which restores the errors.
        what: Name of the operation in errors.
    """

    team: Team
    twin: Communicator
    codecs: StageCodecs
    errors: ErrorFeedback
    like: LazyVector
    contribute: bool
    tentative: bool
    what: str
    _both: Handle[list[Tensor]] | None = None
    _result: PayloadVector | None = None

    def start(self, payload: Tensor) -> None:
        """Start the first stage: send one chunk of ``payload`` to each worker."""
        team, blocks = self.team, self.errors.summed.numel() // BLOCK
        exchange = Exchange(what=self.what, tensor=payload)
        # Count both stages now, because the step in which the second one starts may vary.
        team.account.sent(exchange.sent_bytes(team.rank, team.host.scale))
        team.account.sent(blocks * self.codecs.second.block_bytes)
        first = team.uncounted.start(exchange)
        both = team.stages.start(first, self._start_second, what=self.what, like=payload)
        self._both = team.communicator.timed(both)

    def _start_second(self, received: Tensor) -> Handle[list[Tensor]]:
        """Add up this worker's chunk and send the sum to all workers. Runs in the background."""
        errors = self.errors.summed
        if self.tentative:
            self.errors.save("summed", self.codecs)
        if self.contribute or bool(received.any()):
            payload = self.codecs.reduce(received, self.team.size, errors)
        else:
            # All workers sent zeros. Send zeros, too, and keep the errors for a later sum.
            payload = self.codecs.zero_payload(self.codecs.second_payload(errors))
        return self.twin.gather(payload, what=self.what)

    @override
    def done(self) -> bool:
        return self._both is None or self._both.done()

    @override
    def wait(self) -> PayloadVector:
        if self._result is None:
            assert self._both is not None
            chunks, elements = self._both.wait(), self.errors.summed.numel()
            self._result = PayloadVector(
                self.codecs.second, [[payload] for payload in chunks], elements, self.like
            )
            self._both = None  # frees the payloads
        return self._result
