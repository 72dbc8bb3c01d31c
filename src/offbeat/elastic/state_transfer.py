"""Transfer of the training state from one worker to workers that have joined or are behind.

A transfer consists of two messages: the length of the payload in bytes, and the payload, which
``torch.save`` has written.
"""

import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.transport.communicator import Communicator

logger = logging.getLogger("offbeat")

_TAG = 0  # tag of both messages; no other messages are sent during a transfer


def send_values(communicator: Communicator, values: Any, destinations: Sequence[int]) -> None:
    """Send ``values`` to the ranks ``destinations``, which call ``receive_values``. Blocks.

    ``torch.load`` must read ``values`` with ``weights_only=True``.
    """
    payload, what = _packed(values), "state for a worker that lacks it"
    length = torch.tensor([payload.numel()], device="cpu")
    handles = [
        communicator.send(message, destination=rank, tag=_TAG, what=what)
        for rank in destinations
        for message in (length, payload)
    ]
    for handle in handles:
        handle.wait()


def receive_values(communicator: Communicator, source: int) -> Any:
    """Return the values that rank ``source`` sends, with all tensors on the CPU. Blocks."""
    what = f"state from rank {source}"
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    communicator.receive(length, source=source, tag=_TAG, what=what).wait()
    payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    communicator.receive(payload, source=source, tag=_TAG, what=what).wait()
    return _unpacked(payload)


def _packed(values: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    return torch.load(io.BytesIO(packed.numpy().data), map_location="cpu", weights_only=True)


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

    def values(self) -> list[Any]:
        """Return the current states of this worker, in a form that ``send_values`` accepts."""
        return [save() for save in self._save]

    def receive(self, values: list[Any]) -> None:
        """Keep the states of another worker for ``add``. ``values`` is its ``values()``."""
        self._received = values
