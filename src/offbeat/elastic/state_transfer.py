"""Transfer of the training state from one worker to workers that have joined or are behind.

A transfer consists of two messages: a header and a payload. The payload is a JSON text followed by
the bytes of all tensors, in the order of the text. The text contains the values and, in place of
each tensor, its dtype and shape. The header contains the lengths of payload and text in bytes.
"""

import io
import json
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.checkpoint.state import as_bytes
from offbeat.transport.communicator import Communicator

logger = logging.getLogger("offbeat")

_TAG = 0  # tag of both messages; no other messages are sent during a transfer


def send_values(communicator: Communicator, values: Any, destinations: Sequence[int]) -> None:
    """Send ``values`` to the ranks ``destinations``, which call ``receive_values``. Blocks.

    ``values`` is a number, string, tensor or None, or nested lists and dictionaries of these.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_encode(values, tensors)).encode()
    parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    parts += map(as_bytes, tensors)
    payload, what = torch.cat(parts), "state for a worker that lacks it"
    header = torch.tensor([payload.numel(), len(text)], device="cpu")
    handles = [
        communicator.send(message, destination=rank, tag=_TAG, what=what)
        for rank in destinations
        for message in (header, payload)
    ]
    for handle in handles:
        handle.wait()


def receive_values(communicator: Communicator, source: int) -> Any:
    """Return the values that rank ``source`` sends, with all tensors on the CPU. Blocks."""
    what = f"state from rank {source}"
    header = torch.zeros(2, dtype=torch.int64, device="cpu")
    communicator.receive(header, source=source, tag=_TAG, what=what).wait()
    length, text = header.tolist()
    payload = torch.empty(length, dtype=torch.uint8, device="cpu")
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
    """Return ``value`` in a form that JSON can represent, and append its tensors to ``tensors``."""
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
    """Return the optimizer state of each parameter, in a form that ``send_values`` accepts.

    The result has one dictionary per parameter, with the keys of ``optimizer.state[parameter]``.
    Its values are pairs: whether the state is a tensor on the parameter's device, and the state.
    State that cannot be sent is left out with a warning.
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
    """Replace the optimizer state by ``values``, the result of ``optimizer_values`` on the sender.

    ``parameters`` must correspond to those on the sender, in the same order.
    """
    for parameter, state in zip(parameters, values, strict=True):
        if not state:
            optimizer.state.pop(parameter, None)
            continue
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if on_device else value
            for key, (on_device, value) in state.items()
        }


# -- the state of the training script --------------------------------------------------------------


class SharedStates:
    """States of the training script that a worker receives when it joins.

    Each worker adds the same states in the same order, before its first step.
    """

    def __init__(self) -> None:
        self._save: list[Callable[[], Any]] = []
        self._received: list[Any] = []

    def add(self, save: Callable[[], Any], load: Callable[[Any], object]) -> None:
        """Add a state; see ``Synchronizer.share_state``."""
        _unpacked(_packed([save()]))  # raises here rather than when a worker joins
        self._save.append(save)
        if len(self._save) <= len(self._received):
            load(self._received[len(self._save) - 1])

    def values(self) -> Tensor | None:
        """Return the current states of this worker, in a form that ``send_values`` accepts."""
        return _packed([save() for save in self._save]) if self._save else None

    def receive(self, values: Tensor | None) -> None:
        """Keep the states of another worker for ``add``. ``values`` is its ``values()``."""
        self._received = [] if values is None else _unpacked(values)


def _packed(values: list[Any]) -> Tensor:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> list[Any]:
    buffer = io.BytesIO(packed.numpy().tobytes())
    values: list[Any] = torch.load(buffer, map_location="cpu", weights_only=True)
    return values
