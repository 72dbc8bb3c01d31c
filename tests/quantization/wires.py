"""Run a function with a wire on several workers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from offbeat.quantization.message import QuantizedMessage, Section, Stream
from offbeat.quantization.wire import Wire
from offbeat.transport.communicator import Communicator
from offbeat.transport.future import Future
from offbeat.transport.team import Team
from transport import communicators

Function = Callable[[Wire, Team], Any]
SIZE = 3


def gloo(function: Function, precision: Any, workers: int = SIZE) -> list[Any]:
    """Return the results by rank, on real processes."""
    return communicators.gloo(partial(_on_wire, function, precision), workers)


def simulated(function: Function, precision: Any, workers: int = SIZE) -> list[Any]:
    """Return the results by rank, on simulated workers."""
    return communicators.simulated(partial(_on_wire, function, precision), workers)


def _on_wire(function: Function, precision: Any, communicator: Communicator) -> Any:
    team = Team(communicator)
    return function(Wire(team, precision), team)


every_world = pytest.mark.parametrize("world", [gloo, simulated], ids=["gloo", "simulated"])


def start_sum(wire: Wire, x: Tensor, what: str = "a sum") -> Future[Tensor]:
    """Start to replace ``x`` by its quantized sum over the workers, in two stages."""
    stream = Stream(x.numel(), x.dtype, x.device)
    stream.make_errors(wire.team.size)
    message = QuantizedMessage(wire, [Section(stream, 0, x.numel())], what)
    message.write(0, 0, x)

    def read(_: object) -> Tensor:
        message.read(0, 0, x)
        return x

    return message.start(None).then(read)
