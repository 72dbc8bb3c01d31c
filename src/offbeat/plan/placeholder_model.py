"""The placeholder model, a small model that represents a large one, and its simulated training.

Each element of the placeholder represents ``scale`` elements of the full model (see
``transport/placeholder_tensors.py``). Its tensors have the proportions of the full model's tensors.
Strategies therefore divide both models at the same places into buckets or parts, the units that are
sent separately. Training computes nothing. Values do not matter, except for the norm of the
gradient: it is large in some steps, because the strategy SelSync synchronizes when it changes
strongly.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from offbeat.averaging import AttachedOptimizer, Replica, Worker, flow_of
from offbeat.averaging.buckets import as_real, staging_dtype
from offbeat.averaging.replica import saved_buffers
from offbeat.nodes.gradients import NodeBuffers, NodeMean
from offbeat.quantization.wire import Precision, Wire
from offbeat.strategies import Strategy
from offbeat.telemetry import Stats
from offbeat.training.iteration import Iteration
from offbeat.training.stats_recorder import StatsRecorder
from offbeat.transport.handle import Handle
from offbeat.transport.team import Team
from offbeat.units import to_count

_ELEMENTS = 2**16  # approximate limit of the elements of the placeholder of a given model
# Sizes if only the number of parameters is given. A tensor has _SMALL elements (1 MiB); twice as
# many, up to _LARGE (8 MiB), above _MOST_TENSORS tensors; half as many below _FEWEST_TENSORS.
_LARGE, _SMALL = 2**21, 2**18
_MOST_TENSORS, _FEWEST_TENSORS = 256, 64
_FLOAT32 = 4
_SIGNIFICANT = 1e4  # norm of the gradient if SelSync should synchronize; 1 in all other steps
_LONGEST_PATTERN = 200  # most steps after which the pattern of significant gradients repeats


@dataclass(frozen=True)
class Shapes:
    """Sizes of the tensors of a model and of its placeholder.

    Attributes:
        parameters: Name and number of placeholder elements of each trainable parameter, in the
            model's order.
        buffers: Name and number of placeholder elements of each floating-point or complex buffer.
        integers: Number of elements of all signed integer buffers, which are not scaled.
        scale: Elements of the full model per element of the placeholder.
        count: Number of elements of ``parameters`` and ``buffers`` in the full model. An element
            whose sum takes 8 bytes, for example in float64, counts as two.
    """

    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    integers: int
    scale: float
    count: float

    @property
    def model_bytes(self) -> float:
        """Bytes of the full model if it is sent in float32."""
        return _FLOAT32 * self.count


def shapes_of(parameters: float | str | nn.Module) -> Shapes:
    """Return the sizes of the tensors of a model and of its placeholder.

    Args:
        parameters: The model; or its number of parameters, as a number or text like "25M".
    """
    if isinstance(parameters, nn.Module):
        return _shapes_of_model(parameters)
    return _shapes_of_count(to_count(parameters))


def _shapes_of_count(count: float) -> Shapes:
    """Return the sizes of a model of equal tensors with ``count`` elements in total.

    A power of two of the tensors fills a bucket of 8 MiB, so all buckets except one are full. Some
    tensors are split into a weight and a small bias, so that every bucket has a small tensor, as in
    most models.
    """
    elements = float(_SMALL)
    while count / elements > _MOST_TENSORS and elements < _LARGE:
        elements *= 2
    while count / elements < _FEWEST_TENSORS and elements > 1:
        elements /= 2
    tensors = math.ceil(count / elements)
    # Not more than the model has: a payload must cover at least one number of the placeholder.
    placeholder_elements = min(2 ** max(7, 15 - tensors.bit_length()), int(elements))
    scale = elements / placeholder_elements
    last = math.ceil((count - (tensors - 1) * elements) / scale)
    sizes: list[int] = []
    for i in range(tensors):
        size = placeholder_elements if i < tensors - 1 else last
        biased = size > 1 and i % max(1, int(_LARGE / elements / 2)) == 0
        sizes += [size - 1, 1] if biased else [size]
    named = tuple((f"tensor {i:06d}", size) for i, size in enumerate(sizes))
    return Shapes(named, (), 0, scale, count)


def _shapes_of_model(model: nn.Module) -> Shapes:
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("parameters: this model has no trainable parameter")
    saved = [(name, module.get_buffer(key)) for name, (module, key) in saved_buffers(model).items()]
    buffers = [(n, b) for n, b in saved if b.is_floating_point() or b.is_complex()]
    counts = (torch.int8, torch.int16, torch.int32, torch.int64)
    integers = sum(b.numel() for _, b in saved if b.dtype in counts)
    sizes = [_float32(t) for _, t in (*trainable, *buffers)]
    count = sum(sizes)
    scale = max(1.0, count / _ELEMENTS)
    scaled = [max(1, round(size / scale)) if size else 0 for size in sizes]
    scale = count / max(1, sum(scaled))
    named = [(n, size) for (n, _), size in zip((*trainable, *buffers), scaled, strict=True)]
    split = len(trainable)
    return Shapes(tuple(named[:split]), tuple(named[split:]), integers, scale, count)


def _float32(tensor: Tensor) -> float:
    """Return the bytes of ``tensor`` in a sum, divided by the four bytes of a float32."""
    elements = as_real(tensor.detach()).numel()
    return elements * staging_dtype(tensor).itemsize / _FLOAT32


def _zeros(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype, device="cpu")


class PlaceholderModel(nn.Module):
    """A model with small tensors that represent those of a large model, and with gradients.

    Args:
        shapes: Sizes of the tensors.
        lssr: Approximate share of steps, in (0, 1), with a small gradient. In all other steps the
            gradient is large enough for SelSync to synchronize.

    Attributes:
        tensors: The parameters, in the model's order.
        optimizer: An optimizer of all parameters, whose step does nothing.
    """

    def __init__(self, shapes: Shapes, lssr: float) -> None:
        super().__init__()
        self.tensors = [nn.Parameter(_zeros(size)) for _, size in shapes.parameters]
        for (name, _), tensor in zip(shapes.parameters, self.tensors, strict=True):
            self.register_parameter(name.replace(".", "/"), tensor)
            tensor.grad = torch.zeros_like(tensor)
        for name, size in shapes.buffers:
            self.register_buffer(name.replace(".", "/"), _zeros(size))
        if shapes.integers:
            self.register_buffer("integers", _zeros(shapes.integers, torch.int64))
        self.optimizer = _PlaceholderOptimizer(self.tensors)
        share = Fraction(1 - lssr).limit_denominator(_LONGEST_PATTERN)
        self._share = share or Fraction(1, _LONGEST_PATTERN)
        self._step = 0

    def differentiate(self) -> None:
        """Set the gradients of the next step: large ones in a share 1 − ``lssr`` of the steps."""
        before, self._step = self._step, self._step + 1
        significant = math.floor(before * self._share) != math.floor((before - 1) * self._share)
        gradient = self.tensors[0].grad
        if gradient is not None:
            # numpy is faster here than torch.
            gradient.numpy()[:1] = _SIGNIFICANT if significant else 1.0

    def storage_addresses(self) -> set[int]:
        """Return the addresses of the storages of parameters, buffers and gradients."""
        gradients = [p.grad for p in self.tensors if p.grad is not None]
        held: Iterable[Tensor] = (*self.parameters(), *self.buffers(), *gradients)
        return {tensor.untyped_storage().data_ptr() for tensor in held}


class _PlaceholderOptimizer:
    """An optimizer that does nothing.

    An optimizer of torch would import torch's compiler, which a plan does not need.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}


class _AveragedGradients(NodeBuffers):
    """Gradients that are averaged inside the node in no time.

    The cluster adds the time of this mean to the compute time of the step.
    """

    def __init__(self) -> None:
        pass

    @override
    def average(self, index: int) -> None:
        pass


class PlaceholderTraining:
    """Training of a placeholder model by one worker.

    It creates the same objects as ``attach``, except for ``Synchronizer`` and hooks, which would
    import torch's compiler. All running workers must call the constructor.

    Args:
        strategy: The strategy.
        wire: Precision of means, as in ``attach``.
        team: The workers and their communicators.
        model: The placeholder model.
        averages: True if this run simulates the means of gradients inside each node. Otherwise they
            take no time here.

    Attributes:
        roots: Objects from which the tensors of the training can be reached.
    """

    def __init__(
        self,
        strategy: Strategy,
        wire: Precision,
        team: Team,
        model: PlaceholderModel,
        *,
        averages: bool = False,
    ) -> None:
        scale = team.host.scale
        replica = Replica(model, model.tensors, scale)
        optimizer: Any = model.optimizer
        optimizers = [AttachedOptimizer(0, optimizer, model.tensors, scale)]
        with team.account.paused():
            opened = Wire(team, wire)
        worker = Worker(team, replica, optimizers, opened)
        node: NodeBuffers | None = None
        if team.node is not None and averages:
            node = NodeMean(team.node.inside, model, optimizers)
        elif team.node is not None:
            node = _AveragedGradients()
        flow = flow_of(strategy, worker)
        self._iteration = Iteration(flow, worker, self._completed, node)
        self._recorder = StatsRecorder(worker, None)
        flow.start()
        self._iteration.watch_backward()
        self._recorder.restart()
        self._model, self._account = model, team.account
        self.roots = [worker, flow, self._iteration]

    def step(self) -> None:
        """Take one training step: set the gradients, then call the strategy as hooks would."""
        self._model.differentiate()
        self._iteration.report_buckets()
        self._iteration.prepare(0)
        self._iteration.complete(0)

    def _completed(self, synced: bool) -> None:
        self._recorder.count_step(synced=synced)

    def before_waiting(self, callback: Callable[[Handle[Any]], None]) -> None:
        """Call ``callback`` whenever the worker is about to wait for a collective."""
        self._account.before_waiting.append(callback)

    @property
    def payload_bytes(self) -> int:
        """Bytes passed to operations so far, including the current step."""
        return self._account.payload_bytes

    @property
    def stats(self) -> Stats:
        """Totals of this worker since the start."""
        return self._recorder.stats
