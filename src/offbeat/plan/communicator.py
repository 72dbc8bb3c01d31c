"""The communicator of a worker of a mirror run."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.plan.mirror import End, MirrorCluster
from offbeat.simulate.cluster import Collective
from offbeat.simulate.communicator import SimulatedCommunicator, SimulatedHandle
from offbeat.transport.handle import Handle
from offbeat.transport.operation import Broadcast, Exchange, Gather, Maximum, Operation, Sum
from offbeat.transport.placeholder_tensors import blank, blanks, bytes_of, is_blank


class MirrorCommunicator(SimulatedCommunicator):
    """One running worker's end of a ``MirrorCluster``.

    Values of model data are not summed, for nothing depends on them: a sum is this worker's own
    tensor, as many times as there are workers.
    """

    cluster: MirrorCluster

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        match operation:
            case Sum(tensor=tensor):
                return self._meet("reduce", operation, self._add, tensor.copy_, tensor)
            case Maximum(tensor=tensor):
                return self._meet("reduce", operation, _largest, tensor.copy_, tensor)
            case Broadcast(tensor=tensor):
                return self._meet("broadcast", operation, _first, tensor.copy_, tensor)
            case Gather(tensor=tensor) if is_blank(tensor):
                parts = blanks(tensor, self.size)
                return self._meet("gather", operation, _nothing, _nothing, parts)
            case Gather(tensor=tensor):
                parts = [torch.empty_like(tensor) for _ in range(self.size)]

                def put(tensors: Sequence[Tensor]) -> None:
                    for i, part in enumerate(parts):
                        part.copy_(tensors[i * len(tensors) // self.size])

                return self._meet("gather", operation, list, put, parts)
            case Exchange(tensor=tensor) if is_blank(tensor):
                result = blank(*tensor.shape, dtype=tensor.dtype)
                return self._meet("exchange", operation, _nothing, _nothing, result)
            case Exchange(tensor=tensor):
                result = torch.empty_like(tensor)

                def take(tensors: Sequence[Tensor]) -> None:
                    own = [one.chunk(self.size)[self.rank] for one in tensors]
                    chunks = [own[i * len(own) // self.size] for i in range(self.size)]
                    torch.cat(chunks, out=result)

                return self._meet("exchange", operation, list, take, result)
        return super().start(operation)

    def _meet(
        self,
        kind: Collective,
        operation: Any,
        combine: Callable[[Sequence[Tensor]], Any],
        place: Callable[[Any], object],
        result: Any,
    ) -> Handle[Any]:
        tensor, what = operation.tensor, operation.what
        # In nodes of several workers each of them carries an equal part across.
        size = bytes_of(tensor, self.cluster.scale, operation.tail) / self.line.sharing
        end = self.cluster.meet(
            self.line, self._group, self.member, kind, tensor, size, what, combine, place
        )
        return _MirrorHandle(self, end, result, what)

    def _add(self, tensors: Sequence[Tensor]) -> Tensor:
        first, count = tensors[0], len(tensors)
        if self.cluster.scale != 1 and first.dtype == torch.float32:
            return first * self.size
        total = torch.stack(list(tensors)).sum(0) if count > 1 else first.clone()
        return total.mul_(self.size / count) if count < self.size else total


class _MirrorHandle(SimulatedHandle):
    """An operation that is done for all workers or for none."""

    @override
    def done(self) -> bool:
        if isinstance(self._fabric, MirrorCommunicator) and isinstance(self._signal, End):
            self._fabric.cluster.require_same(self._signal)
        return super().done()


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).amax(0)


def _first(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def _nothing(_: object) -> None:
    """Blank tensors hold no values."""
