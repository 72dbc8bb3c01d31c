"""WHAT is averaged: the model's tensors as flat buckets, in place, and nothing of networks.

A bucket is a list of tensors of one dtype and device with one flat staging tensor. Half-precision
tensors are staged, and therefore summed, in float32. Parameters are never rebound: values are
copied into the storage that the optimizer holds.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

BUCKET_BYTES = 8 * 2**20
Contents = Literal["averaged", "parameters", "buffers"]
_COUNTERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def as_real(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or a view of a complex one as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def staging_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which ``tensor`` is summed: float32 for the half types, uint8 for bool."""
    if tensor.is_complex():
        return as_real(tensor).dtype
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.uint8 if tensor.dtype == torch.bool else tensor.dtype


def pack(tensors: Sequence[Tensor], flat: Tensor, weight: float = 1.0) -> None:
    """flat ← weight · tensors, one after the other; weight 0 gives 0 even for NaN."""
    if weight == 0:
        flat.zero_()
        return
    with torch.no_grad():
        parts = [as_real(t.detach()).reshape(-1) for t in tensors]
        if flat.dtype == torch.uint8:
            parts = [part.to(torch.uint8) for part in parts]
        torch.cat(parts, out=flat)
        if weight != 1:
            flat.mul_(weight)


def read(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """flat ← tensors, one after the other, whatever their dtypes and devices."""
    with torch.no_grad():
        offset = 0
        for tensor in tensors:
            source = as_real(tensor.detach()).reshape(-1)
            flat[offset : offset + source.numel()].copy_(source)
            offset += source.numel()


def unpack(flat: Tensor, tensors: Sequence[Tensor], divisor: float = 1.0) -> None:
    """tensors ← flat / divisor, in place, each cast to its own dtype."""
    with torch.no_grad():
        offset = 0
        for tensor in tensors:
            target = as_real(tensor.detach())
            part = flat[offset : offset + target.numel()].view(target.shape)
            if divisor == 1:
                target.copy_(part)
            else:
                torch.div(part, divisor, out=target)
            offset += target.numel()


_PIECE = 2**16  # elements that are exchanged at a time: they stay in the cache


def swap(flat: Tensor, tensors: Sequence[Tensor], divisor: float = 1.0) -> None:
    """Tensors ← flat / divisor as by ``unpack``, and flat ← what the tensors were.

    ``unpack(flat, tensors)`` then brings that back. If it is interrupted (a Ctrl-C), the tensors
    are what they were, and flat is of no use.
    """
    kept: list[tuple[Tensor, Tensor]] = []  # what was overwritten, and where its value is now
    with torch.no_grad():
        scratch = flat.new_empty(min(_PIECE, flat.numel()))
        try:
            for own, new in _pieces(flat, tensors):
                fits = own.numel() <= scratch.numel()
                before = scratch[: own.numel()].view(own.shape) if fits else torch.empty_like(new)
                kept.append((own, before.copy_(own)))
                torch.div(new, divisor, out=own)
                kept[-1] = (own, new.copy_(before))
        except BaseException:
            for own, value in kept:
                own.copy_(value)
            raise


def _pieces(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of the tensors, and the part of ``flat`` that stands for each."""
    offset = 0
    for tensor in tensors:
        target = as_real(tensor.detach())
        part = flat[offset : offset + target.numel()]
        offset += target.numel()
        if target.is_contiguous():
            yield from zip(target.view(-1).split(_PIECE), part.split(_PIECE), strict=True)
        else:
            yield target, part.view(target.shape)


class Bucket:
    """Tensors of one dtype and device and their staging tensor, allocated on first use.

    Args:
        tensors: The tensors, which are read and written in place.
        tail: Extra elements at the end of the staging tensor, for numbers that travel along.
    """

    def __init__(self, tensors: Sequence[Tensor], tail: int = 0) -> None:
        self.tensors = list(tensors)
        self.elements = sum(as_real(t.detach()).numel() for t in self.tensors)
        self._tail = tail
        self._flat: Tensor | None = None

    @property
    def flat(self) -> Tensor:
        """The staging tensor, 1-D, ``elements + tail`` long."""
        if self._flat is None:
            first = self.tensors[0]
            self._flat = torch.empty(
                self.elements + self._tail,
                dtype=staging_dtype(first),
                device=first.device,
            )
        return self._flat

    @property
    def body(self) -> Tensor:
        """The part of ``flat`` that stands for the tensors."""
        return self.flat[: self.elements]

    @property
    def tail(self) -> Tensor:
        """The extra elements at the end of ``flat``."""
        return self.flat[self.elements :]

    def pack(self, weight: float = 1.0) -> Tensor:
        """Stage ``weight`` times the tensors; returns ``flat``."""
        pack(self.tensors, self.body, weight)
        return self.flat

    def unpack(self, divisor: float = 1.0) -> None:
        """Replace the tensors by the staged values divided by ``divisor``."""
        unpack(self.body, self.tensors, divisor)

    def swap(self, divisor: float = 1.0) -> None:
        """``unpack``, and stage what the tensors were before, for ``unpack()`` to bring back."""
        swap(self.body, self.tensors, divisor)

    def release(self) -> None:
        """Free the staging tensor until it is needed again."""
        self._flat = None


def group_tensors(
    tensors: Iterable[Tensor],
    bucket_bytes: float = BUCKET_BYTES,
    first_bucket_bytes: float = 0,
) -> list[list[Tensor]]:
    """Tensors in order, grouped by (dtype, device) into lists of at most ``bucket_bytes``.

    A tensor larger than ``bucket_bytes`` gets a list of its own. With ``first_bucket_bytes`` the
    first list of all ends with the tensor that brings it to so many.
    """
    groups: list[list[Tensor]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        size = as_real(tensor.detach()).numel() * staging_dtype(tensor).itemsize
        group, filled = open_groups.get(key, (None, 0))
        if first_bucket_bytes and group is not None and group is groups[0]:
            full = filled >= first_bucket_bytes
        else:
            full = filled + size > bucket_bytes
        if group is None or full:
            group, filled = [], 0
            groups.append(group)
        group.append(tensor)
        open_groups[key] = (group, filled + size)
    return groups


def make_buckets(tensors: Iterable[Tensor], bucket_bytes: float = BUCKET_BYTES) -> list[Bucket]:
    """Buckets over ``tensors``; empty tensors take no part."""
    return [Bucket(g) for g in group_tensors((t for t in tensors if t.numel()), bucket_bytes)]


class Replica:
    """This worker's copy of a model.

    Args:
        model: The model.
        trainable: The parameters that are averaged, whether or not they have a gradient.
        scale: ``Host.scale``.

    Attributes:
        parameters: Name and tensor of each averaged parameter, sorted by name, tied ones once.
    """

    def __init__(
        self, model: nn.Module, trainable: Iterable[nn.Parameter], scale: float = 1.0
    ) -> None:
        self._model, self._bucket_bytes = model, BUCKET_BYTES / scale
        chosen = {id(p) for p in trainable}
        self.parameters = sorted(
            ((name, p) for name, p in model.named_parameters() if id(p) in chosen),
            key=lambda item: item[0],
        )
        self._buckets: dict[Contents, tuple[list[Tensor], list[Bucket]]] = {}

    def describe(self) -> list[str]:
        """One line a tensor of the model, to be compared between workers."""
        averaged = {id(p) for _, p in self.parameters}
        lines = [
            f"parameter {name!r}: shape {tuple(p.shape)}, {p.dtype}, "
            f"{'averaged' if id(p) in averaged else 'frozen'}"
            for name, p in self._model.named_parameters()
        ]
        lines += [
            f"buffer {name!r}: shape {tuple(b.shape)}, {b.dtype}"
            for name, b in self._model.named_buffers()
        ]
        return lines

    def replaced(self) -> list[str]:
        """Names of averaged parameters that the model does not hold any more."""
        held = {id(p) for p in self._model.parameters()}
        return [name for name, p in self.parameters if id(p) not in held]

    def versions(self) -> list[int]:
        """A number for each averaged parameter that grows whenever something writes into it."""
        return [p._version for _, p in self.parameters]

    def everything(self) -> list[Tensor]:
        """All parameters and buffers, frozen ones too."""
        return [*self._model.parameters(), *self._model.buffers()]

    def float_buffers(self) -> list[Tensor]:
        """Floating-point and complex buffers, such as BatchNorm's statistics: averaged."""
        return [b for b in self._buffers() if b.is_floating_point() or b.is_complex()]

    def integer_buffers(self) -> list[Tensor]:
        """Signed integer buffers, such as BatchNorm's batch counter: the maximum is taken."""
        return [b for b in self._buffers() if b.dtype in _COUNTERS]

    def other_buffers(self) -> list[Tensor]:
        """All others, such as masks and packed bytes: of neither a mean nor a maximum is any use.

        Rank 0's are taken where all workers are to hold the same, in ``consensus`` and ``finish``.
        """
        done = {id(b) for b in (*self.float_buffers(), *self.integer_buffers())}
        return [b for b in self._buffers() if id(b) not in done]

    def _buffers(self) -> list[Tensor]:
        return [buffer for _, buffer in sorted(self._model.named_buffers(), key=lambda one: one[0])]

    def averaged(self) -> list[Tensor]:
        """All tensors that a mean of models replaces."""
        return [*(p for _, p in self.parameters), *self.float_buffers()]

    def buckets(self, kind: Contents = "averaged") -> list[Bucket]:
        """Buckets over ``averaged()``, or over the parameters or the floating-point buffers alone.

        They are kept from call to call, and made anew when a buffer was rebound.
        """
        tensors: list[Tensor] = [] if kind == "buffers" else [p for _, p in self.parameters]
        if kind != "parameters":
            tensors += self.float_buffers()
        kept, buckets = self._buckets.get(kind, ([], []))
        if len(kept) != len(tensors) or any(a is not b for a, b in zip(kept, tensors, strict=True)):
            buckets = make_buckets(tensors, self._bucket_bytes)
            self._buckets[kind] = (tensors, buckets)
        return buckets

    def forget_buckets(self) -> None:
        """Make them anew: a backend may still be writing into these, of operations given up."""
        self._buckets.clear()

    def _changing(self) -> list[Tensor]:
        """Everything that others may change."""
        return [*self.averaged(), *self.integer_buffers(), *self.other_buffers()]

    def snapshot(self) -> list[Tensor]:
        """A copy of everything a consensus may change (one model in memory)."""
        return [t.detach().clone() for t in self._changing()]

    def restore(self, snapshot: Sequence[Tensor]) -> None:
        """Put a ``snapshot`` back, in place."""
        with torch.no_grad():
            for target, value in zip(self._changing(), snapshot, strict=True):
                target.detach().copy_(value)


def add_to(tensors: Sequence[Tensor], flat: Tensor, scale: float) -> None:
    """Tensors ← tensors + scale · flat, in place, half types computed in float32."""
    with torch.no_grad():
        offset = 0
        for tensor in tensors:
            target = as_real(tensor.detach())
            part = flat[offset : offset + target.numel()].view(target.shape)
            if target.dtype == part.dtype:
                target.add_(part, alpha=scale)
            else:
                target.copy_(target.to(part.dtype).add_(part, alpha=scale))
            offset += target.numel()


def add_clamped(tensors: Sequence[Tensor], mean: Tensor, own: Tensor) -> None:
    """Tensors ← tensors + (mean − own), but between the tensors and the mean, elementwise.

    A shifted variance could become negative; between two variances it cannot.

    Args:
        tensors: Buffers, shifted in place.
        mean: Mean over the workers of what they have sent, 1-D.
        own: What this worker has sent, 1-D.
    """
    with torch.no_grad():
        now = torch.empty_like(mean)
        pack(tensors, now)
        shifted = now + (mean - own)
        clamped = torch.minimum(
            torch.maximum(shifted, torch.minimum(now, mean)), torch.maximum(now, mean)
        )
        # Unchanged values become the mean: ∞ − ∞, as in a mask, is not a number. So does NaN.
        replaced = (now == own) | now.isnan() | own.isnan()
        unpack(torch.where(replaced, mean, clamped), tensors)
