"""A communicator that refuses to carry models: what a strategy has beside a lossy wire."""

from typing import TypeVar

from torch import Tensor
from typing_extensions import override

from offbeat.fabric.communicator import Communicator, Wrapper
from offbeat.fabric.handle import Handle
from offbeat.fabric.operation import Operation
from offbeat.fabric.wire import Precision
from offbeat.kernels import BLOCK

T = TypeVar("T")


class ControlOnly(Wrapper):
    """The communicator of a strategy while the wire is lossy: for decisions, not for models.

    Otherwise a strategy that sums its tensors by itself would send them as they are, and the user's
    ``wire`` would be accepted and not honoured.
    """

    MOST = 4 * BLOCK
    """Numbers that an operation may carry."""

    def __init__(self, inner: Communicator, precision: Precision) -> None:
        super().__init__(inner)
        self._precision: Precision = precision

    @override
    def twin(self) -> Communicator:
        return ControlOnly(self.inner.twin(), self._precision)

    @override
    def start(self, operation: Operation[T]) -> Handle[T]:
        tensor: Tensor | None = getattr(operation, "tensor", None)
        if tensor is not None and tensor.numel() > self.MOST and _holds_reals(tensor):
            raise ValueError(
                f"{operation.what}: {tensor.numel()} numbers sent past wire={self._precision!r}. "
                "In a strategy use worker.average(roll), or sum over worker.wire, both of which "
                'honour it; or declare averages = "nothing", which refuses it'
            )
        return self.inner.start(operation)


def _holds_reals(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
