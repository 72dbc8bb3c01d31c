"""Shared by the tests of training: attaching, sinks, transports that record or fail."""

import io
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from faults import Fault, Watched
from offbeat.strategies.base import Strategy
from offbeat.transport.communicator import Communicator
from offbeat.transport.connect import open_communicator
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator
from offbeat_lab.baselines import STRATEGIES
from problems import OPTIMIZERS, flat, loss_of, make_model


def attach(model: nn.Module, optimizer: Any, strategy: Strategy | str, **options: Any) -> Any:
    """Call ``offbeat.attach`` with a short time-out. The strategy may be text."""
    if isinstance(strategy, str):
        strategy = offbeat.parse_strategy(strategy, STRATEGIES)
    return offbeat.attach(model, optimizer, strategy, **{"timeout_seconds": 20, **options})


def start(
    rank: int, strategy: Strategy | str, kind: str = "sgd", **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Attach a model that depends on the rank, and an optimizer of this kind in ``OPTIMIZERS``."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, attach(model, optimizer, strategy, **options)


def restart(
    model: nn.Module, optimizer: Any, sync: Any, again: Callable[[], tuple[nn.Module, Any, Any]]
) -> tuple[nn.Module, Any, Any]:
    """Save to a file, detach, and load the file into what another script attaches."""
    file = io.BytesIO()
    torch.save(sync.state_dict(), file)
    sync.detach()
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    model, optimizer, sync = again()
    sync.load_state_dict(saved)
    return model, optimizer, sync


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def everything(model: nn.Module) -> list[Tensor]:
    """Return copies of all parameters and buffers."""
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def all_numbers(model: nn.Module) -> Tensor:
    """Return all parameters and buffers as one vector."""
    return torch.cat([t.reshape(-1).double() for t in everything(model)])


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, so that NaN equals NaN and 0 differs from −0."""
    value = tensor.detach().clone(memory_format=torch.contiguous_format)
    return (
        (torch.view_as_real(value) if value.is_complex() else value).reshape(-1).view(torch.uint8)
    )


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def trained(sync: Any, model: nn.Module, batches: list[Any]) -> list[Tensor]:
    """Train and return the model after each step. A list of batches is one accumulated step."""
    optimizer, trace = sync._worker.optimizers[0].optimizer, []
    for batch in batches:
        optimizer.zero_grad()
        several = batch if isinstance(batch, list) else [batch]
        (sum(loss_of(model, one) for one in several) / len(several)).backward()
        optimizer.step()
        trace.append(flat(model))
    return trace


class Sink:
    """A telemetry sink that keeps the records in memory."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.closed = 0

    def write(self, record: dict[str, Any]) -> None:
        assert not self.closed
        self.records.append(dict(record))

    def close(self) -> None:
        self.closed += 1


def error_of(function: Callable[[], object]) -> tuple[list[str], str]:
    """Return the class names and the text of the error that ``function`` raises."""
    try:
        function()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], "nothing was raised"


def meet(folder: str, rank: int, ranks: Iterable[int]) -> None:
    """A barrier of ``ranks`` that uses neither Offbeat nor the process group."""
    store = dist.FileStore(f"{folder}/meeting", -1)
    store.set(str(rank), "here")
    store.wait([str(other) for other in ranks], timedelta(seconds=40))


class Quick:
    """A transport over gloo with short time-outs after a failure."""

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        return TorchCommunicator(
            None, timeout_seconds=timeout_seconds, liveness_seconds=0.5, closing_seconds=1.0
        )


class Faulty:
    """A transport whose communicators inject the given faults.

    Attributes:
        made: The communicator of this worker.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults = list(faults)
        self.made: Watched

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        if dist.get_backend() == "gloo":
            inner = Quick().make_communicator(timeout_seconds)
        else:
            inner = open_communicator(None, timeout_seconds, what="a test")
        self.made = Watched(inner, self._faults)
        return self.made


class Recorded:
    """A transport whose communicators record the operations that this worker starts.

    Attributes:
        operations: Kind, name and bytes of each operation, in order.
        tensors: Weak references to the tensors sent.
    """

    def __init__(self) -> None:
        self.operations: list[tuple[str, str, int]] = []
        self.tensors: list[weakref.ref[Tensor]] = []

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        made = Watched(open_communicator(None, timeout_seconds, what="a test"))
        made.operations, made.tensors = self.operations, self.tensors
        return made

    def sums(self, name: str) -> list[int]:
        """Return the bytes of each sum whose name begins with ``name``."""
        return [b for kind, what, b in self.operations if kind == "sum" and what.startswith(name)]
