"""The wire: sums tensors over the workers, exactly or quantized with error feedback.

*Error feedback* means that the quantization error of one sum is added to the next sum of the same
tensor. A quantized sum takes two stages, which both quantize (``two_stage_sum.py``). Two kinds of
sums differ in the place where the errors are stored:

- ``sum``: the wire stores the errors of both stages.
- ``sum_updates``: the caller keeps the errors of the first stage in its model, and the wire stores
  those of the second stage. Two workers use a single stage instead, in which each
  worker receives all updates and adds them up.
"""

from typing import Any, get_args

import torch
from torch import Tensor

from offbeat.arguments import Precision as Precision
from offbeat.arguments import require_choice
from offbeat.quantization.decoding import LazyVector, PayloadVector, TensorVector, UpdateSum
from offbeat.quantization.kernels import BLOCK, kernels
from offbeat.quantization.payloads import StageCodecs, uses_single_stage
from offbeat.quantization.two_stage_sum import ErrorFeedback, start_sum
from offbeat.transport.handle import Handle
from offbeat.transport.team import Team


def require_precision(precision: object) -> None:
    """Raise ValueError if ``precision`` is not the name of a precision."""
    require_choice("wire", precision, get_args(Precision))


class Wire:
    """Sums tensors over the workers.

    The constructor is a collective, unless ``precision`` is "float32" or there is one worker.

    Args:
        team: The workers.
        precision: "float32" sends tensors unchanged. "bfloat16", "int8", "int4" and "int2" quantize
            them.
    """

    def __init__(self, team: Team, precision: Precision = "float32") -> None:
        require_precision(precision)
        self._team, self.precision = team, precision
        self._streams: dict[str, ErrorFeedback] = {}
        self._codecs: dict[str, StageCodecs] = {}
        if not self.exact:
            kernels()  # compile now, not in the first step
            self._twin = team.uncounted.twin()

    @property
    def exact(self) -> bool:
        """True if no sum is quantized: at float32, or with a single worker."""
        return self.precision == "float32" or self._team.size == 1

    # -- sums ------------------------------------------------------------------------------------

    def sum(
        self,
        tensor: Tensor,
        *,
        stream: str,
        what: str,
        contribute: bool = True,
        tentative: bool = False,
    ) -> Handle[Tensor]:
        """Start to replace ``tensor`` by its sum over the workers. ``wait`` of the result ends it.

        A small tensor is sent exactly if quantization, which pads to blocks of 512 numbers, would
        not save bytes.

        Args:
            tensor: 1-D, floating point, with the same shape and dtype on all workers. The
                quantization error is proportional to the values. Therefore sum gradients or changes
                of a model rather than the model.
            stream: Name under which the same tensor is summed repeatedly, equal on all workers. The
                quantization errors are stored under this name.
            what: Name of the operation in errors.
            contribute: False sets ``tensor`` to zeros and sends zeros. This worker's errors of
                earlier sums are then kept for a later sum.
            tentative: True if ``undo`` may be called for this sum, equal on all workers. It costs a
                copy of the errors.
        """
        if not contribute:
            tensor.zero_()
        vector = TensorVector(tensor)
        codecs = self._codecs_for(vector, self.precision)
        if codecs is None:
            return self._team.communicator.sum(tensor, what=what)
        errors = self._errors_of(stream, vector, codecs)
        if tentative:
            errors.save("sent")
        else:
            errors.discard_saved()
        if contribute:
            payload = codecs.encode(tensor, errors.sent)
        else:
            payload = codecs.first_payload(errors.sent.numel(), tensor.device).zero_()
        total = start_sum(
            payload,
            self._team,
            self._twin,
            codecs,
            errors,
            vector,
            contribute=contribute,
            tentative=tentative,
            what=what,
        )

        def decode(encoded: LazyVector) -> Tensor:
            encoded.read(tensor)
            return tensor

        return total.then(decode)

    def sum_updates(
        self,
        update: LazyVector,
        *,
        stream: str,
        what: str,
        contribute: bool = True,
        precision: Precision | None = None,
    ) -> UpdateSum:
        """Start to sum updates. The caller must keep the quantization error of its update.

        An update is a change that the caller's model already contains. When the sum arrives, the
        caller adds the common change of all models and subtracts ``UpdateSum.sent``. The error,
        update − ``sent``, then stays in its model and is part of its next update.

        Args:
            update: This worker's update, of the same length and dtype on all workers.
            stream: Name under which updates of the same tensor are summed repeatedly, equal on all
                workers.
            what: Name of the operation in errors.
            contribute: False sends zeros and does not read ``update``.
            precision: Precision of this sum, equal on all workers. None means the wire's precision.
                Sums of one stream may have different precisions.

        Raises:
            ValueError: ``precision`` requires quantization, but the wire was made for float32. Or
                updates of another length were summed under the name ``stream``.
        """
        codecs = self._codecs_for(update, self.precision if precision is None else precision)
        if codecs is None:
            values = update.to_tensor() if contribute else update.empty_tensor().zero_()
            sent = TensorVector(values.clone())
            if stream in self._streams:
                self._streams.pop(stream).add_summed(values, self._team.rank)
            handle = self._team.communicator.sum(values, what=what)
            return UpdateSum(handle.then(TensorVector), sent)
        if uses_single_stage(codecs.precision, self._team.size):
            return self._gather_updates(update, codecs, contribute, what)
        errors = self._errors_of(stream, update, codecs, second_stage_only=True)
        size, chunk = self._team.size, errors.summed.numel()
        payload = self._encode_update(update, codecs, size, chunk, contribute)
        total = start_sum(
            payload,
            self._team,
            self._twin,
            codecs,
            errors,
            update,
            contribute=contribute,
            what=what,
        )
        chunks = [[part] for part in payload.chunk(size)]
        return UpdateSum(total, PayloadVector(codecs.codec, chunks, chunk, update))

    def undo(self, stream: str) -> None:
        """Set the errors of ``stream`` to their values before its last sum.

        The sum must have been tentative and have ended. All workers must call this, and none may
        use the sum.
        """
        if stream in self._streams:
            self._streams[stream].restore()

    def _gather_updates(
        self, update: LazyVector, codecs: StageCodecs, contribute: bool, what: str
    ) -> UpdateSum:
        """Sum in a single stage: each worker adds all updates in the order of the ranks."""
        chunk = -(-update.elements // BLOCK) * BLOCK
        payload = self._encode_update(update, codecs, 1, chunk, contribute)
        gathering = self._team.communicator.gather(payload, what=what)
        total: Handle[LazyVector] = gathering.then(
            lambda payloads: PayloadVector(codecs.codec, [payloads], chunk, update)
        )
        return UpdateSum(total, PayloadVector(codecs.codec, [[payload]], chunk, update))

    def _encode_update(
        self, update: LazyVector, codecs: StageCodecs, chunks: int, chunk: int, contribute: bool
    ) -> Tensor:
        if contribute:
            return codecs.encode_update(update, chunks, chunk)
        return codecs.first_payload(chunks * chunk, update.device).zero_()

    def _codecs_for(self, vector: LazyVector, precision: Precision) -> StageCodecs | None:
        """Return the codecs for a sum of ``vector``, or None if the sum is exact."""
        require_precision(precision)
        if precision == "float32" or self._team.size == 1:
            return None
        if self.exact:
            raise ValueError(
                f"cannot sum at precision {precision!r}: the wire was made for 'float32' and does "
                "not quantize; make the wire with a lossy precision"
            )
        if precision not in self._codecs:
            self._codecs[precision] = StageCodecs(precision)
        codecs = self._codecs[precision]
        blocks = self._team.size * self._chunk_blocks(vector)
        quantized_bytes = blocks * codecs.codec.block_bytes
        return codecs if quantized_bytes < vector.nbytes else None

    def _chunk_blocks(self, vector: LazyVector) -> int:
        """Return the number of blocks in each worker's chunk."""
        return -(-vector.elements // (BLOCK * self._team.size))

    # -- error feedback --------------------------------------------------------------------------

    def _errors_of(
        self,
        stream: str,
        vector: LazyVector,
        codecs: StageCodecs,
        *,
        second_stage_only: bool = False,
    ) -> ErrorFeedback:
        rows, columns = self._team.size, self._chunk_blocks(vector) * BLOCK
        shape = (0 if second_stage_only else rows, columns)
        errors, device = self._streams.get(stream), vector.device
        if errors is None:
            sent = torch.zeros(*shape, dtype=torch.float32, device=device)
            summed = torch.zeros(columns, dtype=torch.float32, device=device)
            errors = self._streams[stream] = ErrorFeedback(sent, summed)
        elif errors.sent.device != device:  # loaded from a checkpoint
            errors.sent, errors.summed = errors.sent.to(device), errors.summed.to(device)
        if errors.sent.shape != shape:
            raise ValueError(
                f"stream {stream!r} of the wire holds quantization errors of shape "
                f"{tuple(errors.sent.shape)}, but a tensor of {vector.elements} elements needs "
                f"{shape}: use one stream per tensor, and resume with the same number of workers"
            )
        return errors

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the errors of all streams. No sum may be in progress."""
        return {
            stream: {"sent": errors.sent.clone(), "summed": errors.summed.clone()}
            for stream, errors in self._streams.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the errors of all streams by those in a result of ``state_dict()``."""
        self._streams = {
            stream: ErrorFeedback(errors["sent"].clone(), errors["summed"].clone())
            for stream, errors in state.items()
        }
