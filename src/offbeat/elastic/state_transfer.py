"""Transfer of model and optimizer state from one worker to the workers that lack it."""

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

_TAG = 0  # tag of the messages; no other messages are in flight during a transfer


def send_values(communicator: Communicator, values: Any, destinations: Sequence[int]) -> None:
    """Send numbers, strings, tensors, and lists and dictionaries of them to some ranks."""
    tensors: list[Tensor] = []
    text = json.dumps(_encode(values, tensors)).encode()
    parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    parts += [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    payload, what = torch.cat(parts), "state for a worker that lacks it"
    header = torch.tensor([payload.numel(), len(text)])
    handles = [
        communicator.send(message, destination=rank, tag=_TAG, what=what)
        for rank in destinations
        for message in (header, payload)
    ]
    for handle in handles:
        handle.wait()


def receive_values(communicator: Communicator, source: int) -> Any:
    """Return the values that rank ``source`` has sent with ``send_values``, on the CPU."""
    what = f"state from rank {source}"
    header = torch.zeros(2, dtype=torch.int64)
    communicator.receive(header, source=source, tag=_TAG, what=what).wait()
    length, text = header.tolist()
    payload = torch.empty(length, dtype=torch.uint8)
    communicator.receive(payload, source=source, tag=_TAG, what=what).wait()
    tensors = _TensorReader(payload[text:])
    return _decode(json.loads(payload[:text].numpy().tobytes()), tensors)


class _TensorReader:
    """Reads the tensors of a payload one after the other."""

    def __init__(self, payload: Tensor) -> None:
        self._rest = payload

    def read(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return a copy of the next tensor."""
        size = math.prod(shape) * dtype.itemsize
        part, self._rest = self._rest[:size], self._rest[size:]
        return part.clone().view(dtype).reshape(tuple(shape))


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    """Return JSON with the dtype and shape of each tensor, and append the tensors in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, dict):
        items = [[key, _encode(item, tensors)] for key, item in value.items()]
        return ["dict", items]
    if isinstance(value, list | tuple):
        return ["list", [_encode(item, tensors) for item in value]]
    return ["value", value]


def _decode(coded: Any, tensors: _TensorReader) -> Any:
    kind, *content = coded
    if kind == "tensor":
        return tensors.read(getattr(torch, content[0]), content[1])
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content[0]}
    if kind == "list":
        return [_decode(item, tensors) for item in content[0]]
    return content[0]


# -- the optimizer's state -------------------------------------------------------------------------


def optimizer_values(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Any]:
    """Return the optimizer state of each parameter, in a form that ``send_values`` takes.

    Each entry is a pair: True if it is a tensor on the device of the parameter, and its value.
    """
    return [
        {
            key: [isinstance(value, Tensor) and value.device == parameter.device, value]
            for key, value in optimizer.state.get(parameter, {}).items()
            if _can_be_sent(optimizer, key, value)
        }
        for parameter in parameters
    ]


def _can_be_sent(optimizer: Optimizer, key: str, value: object) -> bool:
    possible = value is None or isinstance(value, Tensor | bool | int | float | str)
    if not possible:
        logger.warning(
            "%s keeps %s for %r, which cannot be sent: a worker that joins begins without it",
            *(type(optimizer).__name__, type(value).__name__, key),
        )
    return possible


def load_optimizer_values(
    optimizer: Optimizer, parameters: Sequence[Tensor], values: Sequence[Any]
) -> None:
    """Replace the state of each parameter by the result of ``optimizer_values``."""
    for parameter, state in zip(parameters, values, strict=True):
        if not state:
            optimizer.state.pop(parameter, None)
            continue
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if on_device else value
            for key, (on_device, value) in state.items()
        }
