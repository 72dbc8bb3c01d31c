"""How numbers travel rounded between a worker and the rank that keeps a shard.

In one direction go changes; their sender keeps what rounding took away. In the other goes a model,
as its difference to a *mirror*: what the receiver holds of it. Both ends keep the mirror, and move
it by the same arithmetic on the same bytes, so that it stays the same to the bit. Its rounding
errors do not add up, because the next difference contains the last one's.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from offbeat.fabric.codec import CODECS
from offbeat.fabric.wire import Precision
from offbeat.kernels import BLOCK

_PIECE = 512 * BLOCK  # numbers that are worked on at a time: 1 MiB of scratch memory

Pushes = Literal["changes", "models"]
"""What goes to the shards: changes, and a model comes back; or models, and a change does."""


def travelling_bytes(elements: float, element_bytes: float, precision: Precision) -> float:
    """Bytes of so many numbers on a link: as they are, if whole rounded blocks are not shorter."""
    exact = elements * element_bytes
    if precision == "float32":
        return exact
    return min(exact, math.ceil(elements / BLOCK) * CODECS[precision].block_bytes)


class Rounding:
    """A codec and its scratch memory; for one thread at a time.

    Args:
        precision: A lossy one.
    """

    def __init__(self, precision: Precision) -> None:
        self._codec = CODECS[precision]()
        self._scratch = torch.empty(0)

    def encode(
        self, values: Tensor, payload: Tensor, minus: Tensor | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Payload ← values − minus, rounded; yields what was sent, piece by piece.

        ``values`` and ``minus`` of a piece may be changed when it is yielded.
        """
        for place, part, scratch in self._pieces(values.numel(), payload):
            numbers = scratch[: place.stop - place.start]
            numbers.copy_(values[place] if minus is None else values[place] - minus[place])
            scratch[numbers.numel() :].zero_()
            self._codec.encode(scratch, part)
            self._codec.decode(part, numbers)
            yield place, numbers

    def decode(self, payload: Tensor, elements: int) -> Iterator[tuple[slice, Tensor]]:
        """What was sent, piece by piece."""
        for place, part, scratch in self._pieces(elements, payload):
            numbers = scratch[: place.stop - place.start]
            self._codec.decode(part, numbers)
            yield place, numbers

    def _pieces(self, elements: int, payload: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Places of the numbers, the bytes of each, and whole blocks of scratch memory."""
        first = 0
        for start in range(0, elements, _PIECE):
            place = slice(start, min(start + _PIECE, elements))
            blocks = -(-(place.stop - start) // BLOCK)
            if self._scratch.numel() < blocks * BLOCK:
                self._scratch = torch.empty(blocks * BLOCK)
            last = first + blocks * self._codec.block_bytes
            yield place, payload[first:last], self._scratch[: blocks * BLOCK]
            first = last


class Link:
    """One end.

    Args:
        rounding: Of this end.
        payload_bytes: Of so many numbers as ``mirror`` has.
        mirror: 1-D, on the CPU; the same on both ends.
        model: Which direction is relative to the mirror, as this end sees it.

    Attributes:
        payload: uint8; what is sent, or was received.
        mirror: See above; written by ``pack`` or ``unpack``.
    """

    def __init__(
        self,
        rounding: Rounding,
        payload_bytes: int,
        mirror: Tensor,
        model: Literal["sent", "received"],
    ) -> None:
        self._rounding, self._model = rounding, model
        self.payload = torch.empty(payload_bytes, dtype=torch.uint8)
        self.mirror = mirror

    def pack(self, values: Tensor) -> None:
        """Payload ← values, rounded. Of a change, ``values`` ← what rounding took away."""
        if self._model == "sent":
            for place, sent in self._rounding.encode(values, self.payload, self.mirror):
                self.mirror[place].add_(sent)
        else:
            for place, sent in self._rounding.encode(values, self.payload, None):
                values[place].sub_(sent)

    def unpack(self, values: Tensor) -> None:
        """Values ← what the payload brings; those of a model are the mirror, which follows it."""
        for place, sent in self._rounding.decode(self.payload, values.numel()):
            if self._model == "received":
                self.mirror[place].add_(sent)
            else:
                values[place].copy_(sent)

    def round(self, change: Tensor) -> None:
        """Change ← what the other end would get of it. The payload is overwritten."""
        for place, sent in self._rounding.encode(change, self.payload, None):
            change[place].copy_(sent)


def open_links(
    precision: Precision,
    parts: Mapping[int, Tensor],
    *,
    model: Literal["sent", "received"],
    shared: bool = False,
) -> dict[int, Link]:
    """Ends of links by the keys of ``parts``, but for those that are not shorter when rounded.

    Args:
        precision: How numbers travel.
        parts: What both ends hold at first.
        model: See ``Link``.
        shared: Whether ``parts`` become the mirrors; else copies of them do.
    """
    links: dict[int, Link] = {}
    rounding = None if precision == "float32" else Rounding(precision)
    for key, part in parts.items():
        size = travelling_bytes(part.numel(), part.element_size(), precision)
        if rounding is not None and size < part.nbytes:
            links[key] = Link(rounding, int(size), part if shared else part.clone(), model)
    return links
