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

from typing import Literal

from torch import Tensor

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

    def save(self, stage: Literal["sent", "summed"]) -> None:
        """Keep a copy of the errors of one stage for ``restore``."""
        errors: Tensor = getattr(self, stage)
        saved = self._saved.get(stage)
        self._saved[stage] = errors.clone() if saved is None else saved.copy_(errors)

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


def start_sum(
    payload: Tensor,
    team: Team,
    twin: Communicator,
    codecs: StageCodecs,
    errors: ErrorFeedback,
    like: LazyVector,
    *,
    contribute: bool,
    what: str,
    tentative: bool = False,
) -> Handle[LazyVector]:
    """Start both stages of a sum. The first one sends one chunk of ``payload`` to each worker.

    Args:
        payload: First-stage payload of this worker.
        team: The workers.
        twin: Communicator of the second stages, without accounting.
        codecs: Codecs of both stages.
        errors: Quantization errors of the stream.
        like: Vector with the length, dtype and device of the sum.
        contribute: False if this worker sends zeros.
        what: Name of the operation in errors.
        tentative: True if ``Wire.undo`` may follow, which restores the errors.
    """

    def start_second(received: Tensor) -> Handle[list[Tensor]]:
        """Add up this worker's chunk and send the sum to all workers. Runs in the background."""
        if tentative:
            errors.save("summed")
        if contribute or bool(received.any()):
            second = codecs.reduce(received, team.size, errors.summed)
        else:
            # All workers sent zeros. Send zeros, too, and keep the errors for a later sum.
            second = codecs.second_payload(errors.summed).zero_()
        return twin.gather(second, what=what)

    elements = errors.summed.numel()
    exchange = Exchange(what=what, tensor=payload)
    # Count both stages now, because the step in which the second one starts may vary.
    team.account.sent(exchange.sent_bytes(team.rank))
    team.account.sent(elements // BLOCK * codecs.codec.block_bytes)
    first = team.uncounted.start(exchange)
    both = team.communicator.timed(team.stages.start(first, start_second, what=what, like=payload))
    return both.then(
        lambda chunks: PayloadVector(codecs.codec, [[chunk] for chunk in chunks], elements, like)
    )
