"""What a newcomer, or one that has missed the last round, gets from one worker that has it all."""

import json
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.transport.communicator import Communicator

logger = logging.getLogger("offbeat")

_TAG = 0  # of messages; nothing else travels when these do


def send_values(communicator: Communicator, values: Any, destinations: Sequence[int]) -> None:
    """Send plain values (numbers, text, tensors, lists and dictionaries of them) to some ranks."""
    tensors: list[Tensor] = []
    text = json.dumps(_encode(values, tensors)).encode()
    parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    parts += [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    payload, what = torch.cat(parts), "what a worker needs to go on"
    header = torch.tensor([payload.numel(), len(text)])
    handles = [
        communicator.send(one, destination=rank, tag=_TAG, what=what)
        for rank in destinations
        for one in (header, payload)
    ]
    for handle in handles:
        handle.wait()


def receive_values(communicator: Communicator, source: int) -> Any:
    """What ``send_values`` has sent, tensors on the CPU."""
    what = f"what this worker needs to go on, from rank {source}"
    header = torch.zeros(2, dtype=torch.int64)
    communicator.receive(header, source=source, tag=_TAG, what=what).wait()
    length, text = header.tolist()
    payload = torch.empty(length, dtype=torch.uint8)
    communicator.receive(payload, source=source, tag=_TAG, what=what).wait()
    tensors = _Tensors(payload[text:])
    return _decode(json.loads(payload[:text].numpy().tobytes()), tensors)


class _Tensors:
    """Those of a payload, one after the other."""

    def __init__(self, payload: Tensor) -> None:
        self._rest = payload

    def take(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The next one, in memory of its own."""
        size = math.prod(shape) * dtype.itemsize
        part, self._rest = self._rest[:size], self._rest[size:]
        return part.clone().view(dtype).reshape(tuple(shape))


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    """JSON, in which a tensor is its dtype and shape; the tensors themselves, in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, dict):
        items = [[key, _encode(one, tensors)] for key, one in value.items()]
        return ["dict", items]
    if isinstance(value, list | tuple):
        return ["list", [_encode(one, tensors) for one in value]]
    return ["value", value]


def _decode(coded: Any, tensors: _Tensors) -> Any:
    kind, *inside = coded
    if kind == "tensor":
        return tensors.take(getattr(torch, inside[0]), inside[1])
    if kind == "dict":
        return {key: _decode(one, tensors) for key, one in inside[0]}
    if kind == "list":
        return [_decode(one, tensors) for one in inside[0]]
    return inside[0]


# -- the optimizer's state -------------------------------------------------------------------------


def optimizer_values(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Any]:
    """The state of each parameter, as plain values: of a tensor also whether it is beside it."""
    return [
        {
            key: [isinstance(value, Tensor) and value.device == parameter.device, value]
            for key, value in optimizer.state.get(parameter, {}).items()
            if _is_plain(optimizer, key, value)
        }
        for parameter in parameters
    ]


def _is_plain(optimizer: Optimizer, key: str, value: object) -> bool:
    plain = value is None or isinstance(value, Tensor | bool | int | float | str)
    if not plain:
        logger.warning(
            "%s keeps %s for %r, which cannot be sent: a worker that joins begins without it",
            *(type(optimizer).__name__, type(value).__name__, key),
        )
    return plain


def put_optimizer_values(
    optimizer: Optimizer, parameters: Sequence[Tensor], values: Sequence[Any]
) -> None:
    """Replace the state of each parameter by what ``optimizer_values`` gave."""
    for parameter, saved in zip(parameters, values, strict=True):
        if not saved:
            optimizer.state.pop(parameter, None)
            continue
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if near else value
            for key, (near, value) in saved.items()
        }
