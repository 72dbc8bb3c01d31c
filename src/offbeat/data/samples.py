"""Samples as bytes: taken out of a batch, and put behind another worker's. Nothing is pickled.

A batch is a tensor or a list of numbers or strings, one a sample, or a nest of them: tuples, lists,
dictionaries, named tuples, dataclasses. Its bytes are two int64 (the length of the description and
the number of samples), the description as text, and the values of one leaf after the other.
"""

import copy
import dataclasses
import struct
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from offbeat.errors import MismatchError

Column: TypeAlias = Sequence[int] | Sequence[float] | Sequence[str]
Leaf: TypeAlias = Tensor | Column

_PREFIX = struct.Struct("<qq")
_DTYPES = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Some samples of a batch, on their way.

    Attributes:
        samples: How many.
        values_bytes: Bytes of the samples alone.
        data: All bytes, with the description: 1-D uint8.
    """

    samples: int
    values_bytes: int
    data: Tensor


def count_samples(batch: Any, dimension: int = 0) -> int:
    """How many samples ``batch`` holds.

    Raises:
        TypeError: it holds something else than tensors, numbers and strings.
        ValueError: it is empty, or its tensors hold different numbers of samples.
    """
    found: dict[int, str] = {}
    for path, leaf in _leaves(batch, "batch"):
        found.setdefault(_length(path, leaf, dimension), path)
    if not found:
        raise ValueError("the batch holds no tensor and no list of numbers or strings")
    if len(found) > 1:
        (size, path), (other, where) = list(found.items())[:2]
        raise ValueError(
            f"{path} holds {size} samples, {where} {other}: every tensor of a batch must have one "
            f"entry a sample in dimension {dimension}"
        )
    return next(iter(found))


def take(batch: Any, indices: Sequence[int], dimension: int = 0) -> Parcel:
    """The samples at ``indices`` of ``batch``, as bytes.

    Raises:
        TypeError: as ``count_samples``.
    """
    chosen = torch.tensor(list(indices), dtype=torch.int64)
    lines, values = [], []
    for path, leaf in _leaves(batch, "batch"):
        lines.append(_describe(path, leaf, dimension))
        values.append(_pack(leaf, chosen, dimension))
    text = "\n".join(lines).encode()
    prefix = _PREFIX.pack(len(text), len(chosen)) + text
    size = sum(value.numel() for value in values)
    data = torch.cat([torch.frombuffer(bytearray(prefix), dtype=torch.uint8), *values])
    return Parcel(len(chosen), size, data)


@dataclasses.dataclass(frozen=True)
class Joined:
    """A batch with what others gave behind it.

    Attributes:
        batch: Of the same structure, on the same devices; the own one itself if none gave any.
        samples: How many were added.
        values_bytes: Their bytes.
    """

    batch: Any
    samples: int
    values_bytes: int


def join(batch: Any, parcels: Sequence[tuple[int, Tensor]], dimension: int = 0) -> Joined:
    """Put the samples of ``parcels``, ranks with their ``Parcel.data``, behind those of ``batch``.

    Raises:
        MismatchError: a rank has batches of another structure, dtype or shape.
        TypeError: as ``count_samples``.
    """
    if not parcels:
        return Joined(batch, 0, 0)
    leaves = list(_leaves(batch, "batch"))
    lines = [_describe(path, leaf, dimension) for path, leaf in leaves]
    received: list[list[Leaf]] = []  # the leaves of each parcel
    samples = size = 0
    for rank, data in parcels:
        number, values = _open(data, lines, rank)
        received.append(_unpack(values, [leaf for _, leaf in leaves], number, dimension))
        samples, size = samples + number, size + values.numel()
    whole = iter(
        [
            _concatenate(leaf, pieces, dimension)
            for (_, leaf), *pieces in zip(leaves, *received, strict=True)
        ]
    )
    return Joined(_rebuild(batch, lambda: next(whole)), samples, size)


def _open(data: Tensor, lines: list[str], rank: int) -> tuple[int, Tensor]:
    """The number of samples and their bytes, once it is sure that they are described alike."""
    length, samples = _PREFIX.unpack(data[: _PREFIX.size].numpy().tobytes())
    start = _PREFIX.size + length
    theirs = data[_PREFIX.size : start].numpy().tobytes().decode().split("\n")
    for i in range(max(len(theirs), len(lines))):
        ours, other = ((rows[i] if i < len(rows) else "nothing more") for rows in (lines, theirs))
        if ours != other:
            raise MismatchError(
                f"rank {rank} sent samples of {other}; this rank has {ours}: data injection needs "
                "batches of one structure on all workers, with tensors that differ in the number "
                "of samples alone"
            )
    return samples, data[start:]


# -- the nest ------------------------------------------------------------------------------------


def _is_column(node: Any) -> bool:
    """Whether ``node`` is a list of numbers or strings, one a sample."""
    plain = isinstance(node, list | tuple) and not hasattr(node, "_fields") and len(node) > 0
    return plain and any(all(isinstance(one, kind) for one in node) for kind in (int | float, str))


def _children(node: Any) -> list[tuple[str, Any]]:
    """What ``node`` consists of, and how each is reached."""
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", node[key]) for key in node]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", value) for name, value in zip(node._fields, node, strict=True)]
    if isinstance(node, list | tuple):
        return [(f"[{i}]", value) for i, value in enumerate(node)]
    return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(node, Tensor) or _is_column(node):
        yield path, node
    elif node is not None:
        nest = isinstance(node, Mapping | list | tuple) or dataclasses.is_dataclass(node)
        if not nest or isinstance(node, type):
            raise TypeError(
                f"{path} is a {type(node).__name__}: data injection takes batches of tensors and "
                "lists of numbers or strings, in tuples, lists, dictionaries and dataclasses"
            )
        for step, child in _children(node):
            yield from _leaves(child, path + step)


def _rebuild(node: Any, following: Callable[[], Leaf]) -> Any:
    """A copy of the nest with the ``following()`` leaf in the place of each."""
    if isinstance(node, Tensor) or _is_column(node):
        return following()
    if node is None:
        return None
    values = [_rebuild(child, following) for _, child in _children(node)]
    if isinstance(node, MutableMapping):
        made = copy.copy(node)  # keeps what a subclass has besides
        made.update(zip(node, values, strict=True))
        return made
    if isinstance(node, Mapping):
        return type(node)(zip(node, values, strict=True))  # type: ignore[call-arg]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*values)
    if isinstance(node, list | tuple):
        return type(node)(values)
    names = [field.name for field in dataclasses.fields(node)]
    return dataclasses.replace(node, **dict(zip(names, values, strict=True)))


# -- its leaves ----------------------------------------------------------------------------------


def _length(path: str, leaf: Leaf, dimension: int) -> int:
    if not isinstance(leaf, Tensor):
        return len(leaf)
    if leaf.ndim <= dimension or leaf.layout != torch.strided:
        raise ValueError(
            f"{path} must be a dense tensor with the samples in dimension {dimension}, got shape "
            f"{list(leaf.shape)}, {leaf.layout}"
        )
    return leaf.shape[dimension]


def _describe(path: str, leaf: Leaf, dimension: int) -> str:
    """What must be the same on all workers; the dimension of the samples is a star."""
    if not isinstance(leaf, Tensor):
        return f"{path}: list of {_kind(leaf)}"
    shape = [str(n) for n in leaf.shape]
    shape[dimension : dimension + 1] = "*"
    return f"{path}: {leaf.dtype} of shape [{', '.join(shape)}]"


def _kind(column: Column) -> str:
    """The narrowest of bool, int, float and str that all entries are."""
    kinds = (("bool", bool), ("int", int), ("float", int | float))
    return next((name for name, k in kinds if all(isinstance(one, k) for one in column)), "str")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _pack(leaf: Leaf, chosen: Tensor, dimension: int) -> Tensor:
    if isinstance(leaf, Tensor):
        return _bytes_of(leaf.index_select(dimension, chosen.to(leaf.device)))
    entries = [leaf[i] for i in chosen.tolist()]
    kind = _kind(leaf)
    if kind != "str":
        return _bytes_of(torch.tensor(entries, dtype=_DTYPES[kind]))
    texts = [str(one).encode() for one in entries]
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64)
    joined = torch.frombuffer(bytearray(b"".join(texts) or b"\0"), dtype=torch.uint8)
    return torch.cat([_bytes_of(lengths), joined[: int(lengths.sum())]])


def _unpack(data: Tensor, leaves: Sequence[Leaf], samples: int, dimension: int) -> list[Leaf]:
    """The values of each leaf, from their bytes one after the other."""
    offset = 0

    def read(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        nonlocal offset
        size = torch.Size(shape).numel() * dtype.itemsize
        piece, offset = data[offset : offset + size], offset + size
        return piece.clone().view(dtype).reshape(list(shape))  # a clone is aligned

    found: list[Leaf] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            shape = list(leaf.shape)
            shape[dimension] = samples
            found.append(read(leaf.dtype, shape))
        elif (kind := _kind(leaf)) != "str":
            found.append(read(_DTYPES[kind], [samples]).tolist())
        else:
            lengths = read(torch.int64, [samples]).tolist()
            found.append([read(torch.uint8, [n]).numpy().tobytes().decode() for n in lengths])
    return found


def _concatenate(own: Leaf, pieces: Sequence[Any], dimension: int) -> Leaf:
    if not isinstance(own, Tensor):
        return type(own)([*own, *(one for piece in pieces for one in piece)])  # type: ignore[call-arg]
    whole = torch.cat([own, *(piece.to(own.device) for piece in pieces)], dim=dimension)
    return whole.pin_memory() if own.is_pinned() else whole
