"""Tensors as flat vectors, and the parts into which the averaged parameters are cut.

``Flat`` reads and changes tensors like one vector. The optimizer, the modules and CUDA graphs hold
the tensors, so it changes them in place. The vectors that the workers sum have the dtype of the
tensors, with three exceptions: float16 and bfloat16 become float32, complex numbers become pairs of
reals, and bool becomes uint8.

The global model P and its velocity v are flat tensors (``Space``). The local model x stays in the
tensors of the user.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from offbeat.quantization.message import Section, Stream

T = TypeVar("T")
BUCKET_BYTES = 8 * 2**20  # default limit for the size of a message
PIECE = 2**17  # numbers that are processed at a time on a CPU, few enough for its cache
STAGED = 2**22  # numbers that are processed at a time on a GPU, if P is copied for that


def as_real(tensor: Tensor) -> Tensor:
    """Return ``tensor`` itself, or a view of a complex tensor as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def staging_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a vector that contains ``tensor``; see the module's docstring."""
    if tensor.is_complex():
        return as_real(tensor).dtype
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.uint8 if tensor.dtype == torch.bool else tensor.dtype


class Share(NamedTuple):
    """Share ``place`` of ``number`` shares of each tensor. One process of a node averages it."""

    place: int
    number: int

    def of(self, numbers: int) -> tuple[int, int]:
        """Return first and last + 1 of the share of a tensor with so many numbers."""
        size = -(-numbers // self.number)
        return min(numbers, self.place * size), min(numbers, (self.place + 1) * size)


WHOLE = Share(0, 1)
_Copy = tuple[Tensor, Tensor]  # a tensor that has gaps in memory or another order, and its copy


class Flat:
    """Tensors as one vector, one tensor after the other.

    A complex element is two numbers. A tensor with gaps in memory is copied at each access.

    Args:
        tensors: At least one tensor, usually of one dtype and device (``make_flats``). In a mixture
            ``dtype`` and ``device`` are those of the first tensor, and values are converted.
        share: The vector contains only this share of the numbers of each tensor.
        in_memory_order: True: the vector has the numbers of a tensor in their order in memory.
            False: in row-major order, which is equal on workers whose strides differ. A tensor that
            is not row-major is then copied at each access.

    Attributes:
        tensors: The tensors.
        lengths: Number of numbers of each tensor in the vector.
        elements: Sum of ``lengths``.
        dtype: Dtype for computations with the elements: float32 for half-precision tensors.
        stored_dtype: Dtype of the numbers in memory.
        device: Device of the tensors.
    """

    def __init__(
        self, tensors: Iterable[Tensor], share: Share = WHOLE, *, in_memory_order: bool = False
    ) -> None:
        self.tensors = list(tensors)
        self.dtype = staging_dtype(self.tensors[0])
        self.stored_dtype = as_real(self.tensors[0].detach()).dtype
        self._in_memory_order = in_memory_order
        self._addresses: list[int] = []
        self.refresh()
        bounds = [share.of(view.numel()) for view in self._views]
        self._firsts = [first for first, _ in bounds]  # where the share begins in each tensor
        self.lengths = [last - first for first, last in bounds]
        self._ends = list(itertools.accumulate(self.lengths))
        self.elements = self._ends[-1]

    def refresh(self) -> None:
        """Renew the views if the memory of a tensor has changed, for example by ``module.to``."""
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        if addresses == self._addresses:
            return
        self._addresses, self.device = addresses, self.tensors[0].device
        numbers = [as_real(tensor.detach()) for tensor in self.tensors]
        self._views = [_by_memory(each) for each in numbers] if self._in_memory_order else numbers
        self._pieces: dict[tuple[int, int], tuple[list[Tensor], list[_Copy]]] = {}
        self._tables: dict[tuple[int, int], Any] = {}

    def _slices(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (tensor, first, last) for each tensor with numbers from ``start`` to ``stop``."""
        index = bisect_right(self._ends, start)
        while start < stop:
            offset = self._ends[index] - self.lengths[index] - self._firsts[index]
            last = min(stop, self._ends[index])
            if start < last:
                yield index, start - offset, last - offset
            start, index = last, index + 1

    def _numbers(self, start: int, stop: int) -> tuple[list[Tensor], list[_Copy]]:
        """Return the numbers from ``start`` to ``stop`` as 1-D tensors, and the copied tensors.

        If no tensor was copied, the result is stored for the next call.
        """
        found = self._pieces.get((start, stop))
        if found is None:
            found = numbers, copies = list[Tensor](), list[_Copy]()
            for index, first, last in self._slices(start, stop):
                view = self._views[index]
                whole = view.reshape(-1).contiguous()
                numbers.append(whole[first:last])
                if whole.data_ptr() != view.data_ptr():
                    copies.append((view, whole))
            if not copies:
                self._pieces[start, stop] = found
        return found

    def table(self, start: int, stop: int, kernels: Any) -> tuple[Any, list[_Copy]]:
        """Return the numbers as a table of ``kernels``, and what to ``write_back`` if changed."""
        numbers, copies = self._numbers(start, stop)
        table = self._tables.get((start, stop))
        if table is None:
            table = kernels.make_table(numbers)
            if not copies:
                self._tables[start, stop] = table
        return table, copies

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop of consecutive ranges of at most ``BUCKET_BYTES`` each."""
        step = BUCKET_BYTES // self.dtype.itemsize
        for start in range(0, self.elements, step):
            yield start, min(start + step, self.elements)

    def read(self, start: int, out: Tensor) -> None:
        """Fill ``out``, of any dtype and device, with the numbers from ``start`` on."""
        numbers, _ = self._numbers(start, start + out.numel())
        if all(each.device == out.device for each in numbers):
            torch.cat(numbers, out=out)
        else:
            for part, each in zip(out.split([t.numel() for t in numbers]), numbers, strict=True):
                part.copy_(each)

    def copy(self, start: int = 0, stop: int | None = None, *, weight: float = 1.0) -> Tensor:
        """Return ``weight`` times the numbers from ``start`` to ``stop`` as a new 1-D tensor.

        Integers need weight 1. With weight 0 a NaN becomes 0, too.
        """
        size = (self.elements if stop is None else stop) - start
        allocate = torch.empty if weight else torch.zeros
        values = allocate(size, dtype=self.dtype, device=self.device)
        if weight:
            self.read(start, values)
            if weight != 1:
                values.mul_(weight)
        return values

    def add(self, start: int, values: Tensor) -> None:
        """Add ``values`` to the numbers from ``start`` on, computed in the dtype of ``values``."""
        self._write(start, values, add=True)

    def write(self, start: int, values: Tensor) -> None:
        """Replace the numbers from ``start`` on by ``values``."""
        self._write(start, values, add=False)

    def _write(self, start: int, values: Tensor, *, add: bool) -> None:
        numbers, copies = self._numbers(start, start + values.numel())
        for target, part in zip(numbers, values.split([t.numel() for t in numbers]), strict=True):
            if add:
                target.add_(part.to(target.device))
            else:
                target.copy_(part)
        write_back(copies)


def write_back(copies: Iterable[_Copy]) -> None:
    """Copy the copies of tensors to the tensors."""
    for view, whole in copies:
        view.copy_(whole.view(view.shape))


def make_flats(
    tensors: Iterable[Tensor], share: Share = WHOLE, *, in_memory_order: bool = False
) -> list[Flat]:
    """Return a ``Flat`` for each dtype and device. Tensors without elements are left out."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [Flat(group, share, in_memory_order=in_memory_order) for group in groups.values()]


def _by_memory(tensor: Tensor) -> Tensor:
    """Return a 1-D view if the elements fill a range of memory without gaps, else ``tensor``."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]
    ):
        if size > 1:
            if stride != expected:
                return tensor
            expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


class Space:
    """Parameters of one dtype and device: the local model x, the global model P, and v.

    Attributes:
        x: The parameters.
        P: The global model, 1-D; None if it is not stored. ``GlobalModel.stored`` determines its
            dtype and its device. Computations use a copy if those of ``x`` differ (``staged``).
        v: Velocity of the outer step, 1-D, on the device of P; None if there is none.
        error: Rounding error of x at its last landing, bfloat16, 1-D; None if x is not rounded.
            Without it, landings would lose changes below half a unit in the last place of x.
        stream: Quantization errors of the sums of updates.
    """

    def __init__(self, x: Flat, *, shared: bool, velocity: bool, stored: str = "float32") -> None:
        self.x = x
        self.error: Tensor | None = None
        pinned = stored == "host" and x.device.type == "cuda"
        memory: Any = {"device": "cpu" if pinned else x.device, "pin_memory": pinned}
        dtype = torch.bfloat16 if stored == "bfloat16" else x.dtype
        self.P = torch.empty(x.elements, dtype=dtype, **memory) if shared else None
        if self.P is not None:
            x.read(0, self.P)
        self.v = torch.zeros(x.elements, dtype=x.dtype, **memory) if velocity else None
        self.stream = Stream(x.elements, x.dtype, x.device)

    def make_error(self) -> None:
        """Allocate ``error`` if x is float16 or bfloat16."""
        if self.x.dtype != self.x.stored_dtype:
            self.error = torch.zeros(self.x.elements, dtype=torch.bfloat16, device=self.x.device)

    @property
    def in_place(self) -> bool:
        """True if P is stored where and as it is computed with, or not at all."""
        return self.P is None or (self.P.device, self.P.dtype) == (self.x.device, self.x.dtype)

    def staged(self, stored: Tensor) -> Tensor:
        """Return numbers of P or v to compute with: themselves, or a copy like x. Never waits."""
        return stored.to(self.x.device, self.x.dtype, non_blocking=True)

    @contextmanager
    def moving(self, start: int, stop: int) -> Iterator[list[Tensor]]:
        """Yield P and v from ``start`` to ``stop``, ``staged``, and store them at the end.

        Without v the second vector is empty. The GPU makes all copies in order, so a later call
        reads what this one has stored. The host has to wait for the GPU before it reads P or v.
        """
        assert self.P is not None
        velocity = self.P[:0] if self.v is None else self.v[start:stop]
        stored = [self.P[start:stop], velocity]
        staged = [self.staged(each) for each in stored]
        yield staged
        for target, values in zip(stored, staged, strict=True):
            if values is not target:  # in bfloat16, what the rounding of P loses stays in x − P
                target.copy_(values, non_blocking=True)

    def table(self, start: int, stop: int, kernels: Any) -> tuple[Any, Tensor | None, list[_Copy]]:
        """Return ``Flat.table`` from ``start`` to ``stop``, and the rounding error there."""
        table, copies = self.x.table(start, stop, kernels)
        return table, None if self.error is None else self.error[start:stop], copies

    def read(self, start: int, out: Tensor) -> None:
        """Fill ``out`` with x from ``start`` on, without its rounding error."""
        self.x.read(start, out)
        if self.error is not None:
            out.sub_(self.error[start : start + out.numel()])

    def add(self, start: int, values: Tensor, kernels: Any = None) -> None:
        """Add ``values`` to x from ``start`` on, with Triton kernels if they are given."""
        if kernels is not None:
            table, error, copies = self.table(start, start + len(values), kernels)
            kernels.add(table, error, values)
            write_back(copies)
        elif self.error is None:
            self.x.add(start, values)
        else:
            exact = torch.empty_like(values)
            self.read(start, exact)
            self.write(start, exact.add_(values))

    def write(self, start: int, values: Tensor) -> None:
        """Replace x from ``start`` on by ``values``."""
        self.x.write(start, values)
        if self.error is not None:
            error = values.to(self.x.stored_dtype) - values
            # x that overflows, and NaN, have no error that could be made up for later.
            self.error[start : start + len(error)] = error.nan_to_num_(0, 0, 0)


@dataclass(frozen=True, eq=False)
class Slice:
    """The numbers from ``start`` to ``stop`` of a space."""

    space: Space
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def contains(self, other: "Slice") -> bool:
        """Return True if the slice ``other`` is a part of this one."""
        return other.space is self.space and self.start <= other.start < self.stop

    def section(self) -> Section:
        """Return the numbers as a section of the stream of the space."""
        return Section(self.space.stream, self.start, self.stop)

    def pieces(self, elements: int = PIECE) -> Iterator["Slice"]:
        """Yield the slice in pieces. On a GPU there is a single one, which costs fewer launches.

        There are several if P is copied, so that the copies of a large message stay small.
        """
        if self.space.x.device.type == "cpu":
            step = elements
        else:
            step = max(1, len(self)) if self.space.in_place else STAGED
        for start in range(self.start, self.stop, step):
            yield Slice(self.space, start, min(start + step, self.stop))


def make_spaces(tensors: Iterable[Tensor], share: Share = WHOLE, **stores: Any) -> list[Space]:
    """Return the tensors in one space for each dtype and device. Empty tensors are left out.

    ``stores`` are the further arguments of ``Space``.
    """
    flats = make_flats(tensors, share, in_memory_order=True)
    return [Space(x, **stores) for x in flats]


def cut(spaces: Sequence[Space], parts: int, unit: int = 1) -> list[list[Slice]]:
    """Cut the spaces into parts of about equal bytes, which may begin inside a tensor.

    Args:
        spaces: The spaces.
        parts: Largest number of parts.
        unit: Cuts inside a space are at multiples of ``unit`` numbers.

    Returns:
        The slices of each part, at least one. There are fewer parts than requested if there are
        not enough units.
    """
    total = sum(space.x.elements * space.x.dtype.itemsize for space in spaces)
    slices: list[list[Slice]] = [[] for _ in range(parts)]
    done = part = 0
    for space in spaces:
        start, itemsize = 0, space.x.dtype.itemsize
        while start < space.x.elements:
            stop = space.x.elements
            if part < parts - 1:
                end = total * (part + 1) - done * parts  # end of this part, in bytes · ``parts``
                stop = min(stop, -(-end // (itemsize * parts * unit)) * unit)  # rounded up
            if start < stop:
                slices[part].append(Slice(space, start, stop))
                start = stop
            if start < space.x.elements:
                part += 1
        done += space.x.elements * itemsize
    return [part for part in slices if part] or [[]]


def joined(slices: Iterable[tuple[Slice, T]]) -> list[tuple[Slice, T]]:
    """Join slices that follow each other in a space, if their second values are equal."""
    found: list[tuple[Slice, T]] = []
    for each, value in slices:
        if found:
            last, known = found[-1]
            if (last.space, last.stop, known) == (each.space, each.start, value):
                found[-1] = Slice(each.space, last.start, each.stop), value
                continue
        found.append((each, value))
    return found
