"""The phantom model: a few thousand numbers, each of which stands for many.

Its tensors keep the proportions of the full model, so that buckets, parts and fragments are cut in
the same places (``offbeat.transport.placeholder_tensors``). Nothing is computed: the values never
matter, except for the norm of the gradient, which rises at the steps at
which SelSync should synchronize.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from offbeat.arguments import require_number
from offbeat.averaging.buckets import as_real, staging_dtype
from offbeat.units import parse_count

_NUMBERS = 2**16  # of the phantom of a given model, about
_LARGE, _SMALL = 2**21, 2**18  # numbers of a tensor where only their count is given: 8 and 1 MiB
_MOST_TENSORS, _FEWEST_TENSORS = 256, 64
_FLOAT32 = 4
_SIGNIFICANT = 1e4  # ‖g‖ at a step that asks for a synchronization; 1 at all others
_LONGEST_PATTERN = 200  # steps until these steps repeat


@dataclass(frozen=True)
class Shapes:
    """What is known of a model.

    Attributes:
        parameters: Numbers of each trainable parameter of the phantom, in the model's order.
        buffers: Likewise of floating-point buffers.
        integers: Elements of all signed integer buffers. They stand for themselves.
        scale: How many numbers one number of the phantom stands for.
        count: Numbers that a mean of models replaces, as float32.
    """

    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    integers: int
    scale: float
    count: float

    @property
    def model_bytes(self) -> float:
        """Bytes of the model as it travels over an exact wire."""
        return _FLOAT32 * self.count


def shapes_of(parameters: float | str | nn.Module) -> Shapes:
    """The shapes of a model, or of one with so many parameters.

    Raises:
        TypeError: something else.
        ValueError: a number that is not positive and finite.
    """
    if isinstance(parameters, nn.Module):
        return _shapes_of_model(parameters)
    count = parse_count(parameters) if isinstance(parameters, str) else parameters
    require_number("parameters", count)
    if not 0 < count < math.inf:
        raise ValueError(
            f"parameters must be positive and finite, like 25e6 or 25M, got {parameters}"
        )
    return _shapes_of_count(count)


def _shapes_of_count(count: float) -> Shapes:
    """Equal tensors, small against a bucket of 8 MiB, but of at least a number each.

    They are fractions of a bucket by powers of two, so that buckets are full. Some are split into a
    weight and a small bias, so that every bucket has a small tensor, as in most models.
    """
    numbers = float(_SMALL)
    while count / numbers > _MOST_TENSORS and numbers < _LARGE:
        numbers *= 2
    while count / numbers < _FEWEST_TENSORS and numbers > 1:
        numbers /= 2
    tensors = math.ceil(count / numbers)
    each = 2 ** max(7, 15 - tensors.bit_length())
    scale = numbers / each
    last = math.ceil((count - (tensors - 1) * numbers) / scale)
    sizes: list[int] = []
    for i in range(tensors):
        size = each if i < tensors - 1 else last
        biased = size > 1 and i % max(1, int(_LARGE / numbers / 2)) == 0
        sizes += [size - 1, 1] if biased else [size]
    named = tuple((f"tensor {i:06d}", size) for i, size in enumerate(sizes))
    return Shapes(named, (), 0, scale, count)


def _shapes_of_model(model: nn.Module) -> Shapes:
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("parameters: this model has no trainable parameter")
    buffers = [(n, b) for n, b in model.named_buffers() if b.is_floating_point() or b.is_complex()]
    counts = (torch.int8, torch.int16, torch.int32, torch.int64)
    integers = sum(b.numel() for _, b in model.named_buffers() if b.dtype in counts)
    sizes = [_float32(t) for _, t in (*trainable, *buffers)]
    count = sum(sizes)
    scale = max(1.0, count / _NUMBERS)
    kept = [max(1, round(size / scale)) if size else 0 for size in sizes]
    scale = count / max(1, sum(kept))
    named = [(n, k) for (n, _), k in zip((*trainable, *buffers), kept, strict=True)]
    split = len(trainable)
    return Shapes(tuple(named[:split]), tuple(named[split:]), integers, scale, count)


def _float32(tensor: Tensor) -> float:
    """How many float32 numbers have as many bytes as ``tensor`` has when it is summed."""
    numbers = as_real(tensor.detach()).numel()
    return numbers * staging_dtype(tensor).itemsize / _FLOAT32


class Phantom(nn.Module):
    """A model of some ``Shapes``, with gradients.

    Args:
        shapes: The shapes.
        lssr: Share of steps in (0, 1) at which the norm of the gradient stays as it is.

    Attributes:
        shapes: Likewise.
        tensors: The parameters, in the model's order.
    """

    def __init__(self, shapes: Shapes, lssr: float) -> None:
        super().__init__()
        self.shapes = shapes
        self.tensors = [nn.Parameter(torch.zeros(size)) for _, size in shapes.parameters]
        for (name, _), tensor in zip(shapes.parameters, self.tensors, strict=True):
            self.register_parameter(name.replace(".", "/"), tensor)
            tensor.grad = torch.zeros_like(tensor)
        for name, size in shapes.buffers:
            self.register_buffer(name.replace(".", "/"), torch.zeros(size))
        if shapes.integers:
            self.register_buffer("integers", torch.zeros(shapes.integers, dtype=torch.int64))
        share = Fraction(1 - lssr).limit_denominator(_LONGEST_PATTERN)
        self._share = share or Fraction(1, _LONGEST_PATTERN)
        self._step = 0

    def optimizers(self) -> list["PhantomOptimizer"]:
        """The optimizer."""
        return [PhantomOptimizer(self.tensors)]

    def differentiate(self) -> None:
        """The gradients of the next step; a share 1 − ``lssr`` of them is significant."""
        before, self._step = self._step, self._step + 1
        rises = math.floor(before * self._share) != math.floor((before - 1) * self._share)
        gradient = self.tensors[0].grad
        if gradient is not None:
            # As numpy, which leaves the version counter alone: nobody shall take it for a mean.
            gradient.numpy()[:1] = _SIGNIFICANT if rises else 1.0

    def own_bytes(self) -> set[int]:
        """The addresses of parameters, buffers and gradients."""
        gradients = [p.grad for p in self.tensors if p.grad is not None]
        held: Iterable[Tensor] = (*self.parameters(), *self.buffers(), *gradients)
        return {tensor.untyped_storage().data_ptr() for tensor in held}


class PhantomOptimizer:
    """An optimizer that does nothing; torch's own would import its compiler.

    Attributes:
        param_groups: One group with all parameters.
        state: Empty.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
