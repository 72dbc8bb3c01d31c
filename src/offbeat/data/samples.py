"""Serialization of samples of a batch, and concatenation with the batch of another worker.

The *leaves* of a batch are tensors, and lists of numbers or strings. Each has one entry per sample.
Tuples, lists, dictionaries, named tuples and dataclasses may contain them, nested to any depth.

Serialized samples are called a *parcel*. Its bytes are, in this order:

1. two int64: the number of bytes of the description, and the number of samples;
2. the description as text: path, type and shape of each leaf, one per line;
3. the values of each leaf.

The receiver compares the description with its own batch. Nothing is pickled, so a parcel cannot run
code.
"""

import copy
import dataclasses
import struct
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from offbeat.checkpoint.state import as_bytes
from offbeat.errors import MismatchError

Column: TypeAlias = Sequence[int] | Sequence[float] | Sequence[str]
"""A leaf that is not a tensor: one number or string per sample."""
Leaf: TypeAlias = Tensor | Column

_PREFIX = struct.Struct("<qq")  # the two int64 at the start of a parcel
_DTYPES = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Serialized samples of a batch.

    Attributes:
        samples: Number of samples.
        values_bytes: Number of bytes of the values, without description.
        data: All bytes of the parcel: 1-D uint8.
    """

    samples: int
    values_bytes: int
    data: Tensor


def count_samples(batch: Any, dimension: int = 0) -> int:
    """Return the number of samples of ``batch``."""
    sizes: dict[int, str] = {}
    for path, leaf in _leaves(batch, "batch"):
        sizes.setdefault(_length(path, leaf, dimension), path)
    if not sizes:
        raise ValueError("the batch holds no tensor and no list of numbers or strings")
    if len(sizes) > 1:
        (size, path), (other, where) = list(sizes.items())[:2]
        raise ValueError(
            f"{path} holds {size} samples, {where} {other}: every tensor of a batch must have one "
            f"entry per sample in dimension {dimension}"
        )
    return next(iter(sizes))


def take(batch: Any, indices: Sequence[int], dimension: int = 0) -> Parcel:
    """Serialize the samples of ``batch`` at ``indices``."""
    chosen = torch.tensor(list(indices), dtype=torch.int64, device="cpu")
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
    """A batch extended by samples of other workers.

    Attributes:
        batch: The extended batch, with the structure and devices of the original one.
        samples: Number of added samples.
        values_bytes: Number of bytes of the added samples.
    """

    batch: Any
    samples: int
    values_bytes: int


def join(batch: Any, parcels: Sequence[tuple[int, Tensor]], dimension: int = 0) -> Joined:
    """Append the samples of ``parcels`` to those of ``batch``.

    Args:
        batch: This worker's batch.
        parcels: Pairs of the rank of another worker and its ``Parcel.data``.
        dimension: Dimension of the tensors that counts samples.

    Raises:
        MismatchError: A parcel has another structure, dtype or shape than ``batch``.
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
    extended = iter(
        [
            _concatenate(leaf, pieces, dimension)
            for (_, leaf), *pieces in zip(leaves, *received, strict=True)
        ]
    )
    return Joined(_rebuild(batch, lambda: next(extended)), samples, size)


def _open(data: Tensor, lines: list[str], rank: int) -> tuple[int, Tensor]:
    """Return the number of samples of a parcel, and the bytes of its values.

    Raises:
        MismatchError: The description differs from ``lines``, the one of this worker's batch.
    """
    length, samples = _PREFIX.unpack(data[: _PREFIX.size].numpy().tobytes())
    start = _PREFIX.size + length
    theirs = data[_PREFIX.size : start].numpy().tobytes().decode().split("\n")
    for i in range(max(len(theirs), len(lines))):
        ours, other = ((rows[i] if i < len(rows) else "nothing more") for rows in (lines, theirs))
        if ours != other:
            raise MismatchError(
                f"rank {rank} sent samples of {other}; this rank has {ours}: data injection needs "
                "batches with the same structure, dtypes and shapes on all workers, except for the "
                "number of samples"
            )
    return samples, data[start:]


# -- nested batches ------------------------------------------------------------------------------


def _is_column(node: Any) -> bool:
    """Return True if ``node`` is a list of numbers or of strings, one per sample."""
    plain = isinstance(node, list | tuple) and not hasattr(node, "_fields") and len(node) > 0
    return plain and any(all(isinstance(one, kind) for one in node) for kind in (int | float, str))


def _children(node: Any) -> list[tuple[str, Any]]:
    """Return the children of ``node``, each with its path relative to the node."""
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", node[key]) for key in node]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", value) for name, value in zip(node._fields, node, strict=True)]
    if isinstance(node, list | tuple):
        return [(f"[{i}]", value) for i, value in enumerate(node)]
    return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves of ``node`` with their paths, in a fixed order."""
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
    """Return a copy of ``node`` whose leaves are successive results of ``following``."""
    if isinstance(node, Tensor) or _is_column(node):
        return following()
    if node is None:
        return None
    values = [_rebuild(child, following) for _, child in _children(node)]
    if isinstance(node, MutableMapping):
        copied = copy.copy(node)  # keeps the other attributes of a subclass of dict
        copied.update(zip(node, values, strict=True))
        return copied
    if isinstance(node, Mapping):
        return type(node)(zip(node, values, strict=True))  # type: ignore[call-arg]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*values)
    if isinstance(node, list | tuple):
        return type(node)(values)
    names = [field.name for field in dataclasses.fields(node)]
    return dataclasses.replace(node, **dict(zip(names, values, strict=True)))


# -- leaves --------------------------------------------------------------------------------------


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
    """Return the description's line for one leaf. A star replaces a tensor's number of samples."""
    if not isinstance(leaf, Tensor):
        return f"{path}: list of {_kind(leaf)}"
    shape = [str(n) for n in leaf.shape]
    shape[dimension : dimension + 1] = "*"
    return f"{path}: {leaf.dtype} of shape [{', '.join(shape)}]"


def _kind(column: Column) -> str:
    """Return the narrowest of bool, int, float and str that fits all entries."""
    kinds = (("bool", bool), ("int", int), ("float", int | float))
    return next((name for name, k in kinds if all(isinstance(one, k) for one in column)), "str")


def _pack(leaf: Leaf, chosen: Tensor, dimension: int) -> Tensor:
    if isinstance(leaf, Tensor):
        return as_bytes(leaf.index_select(dimension, chosen.to(leaf.device)))
    entries = [leaf[i] for i in chosen.tolist()]
    kind = _kind(leaf)
    if kind != "str":
        return as_bytes(torch.tensor(entries, dtype=_DTYPES[kind], device="cpu"))
    texts = [str(one).encode() for one in entries]
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64, device="cpu")
    joined = torch.frombuffer(bytearray(b"".join(texts) or b"\0"), dtype=torch.uint8)
    return torch.cat([as_bytes(lengths), joined[: int(lengths.sum())]])


def _unpack(data: Tensor, leaves: Sequence[Leaf], samples: int, dimension: int) -> list[Leaf]:
    """Return the leaves of a parcel with the values ``data``.

    ``leaves`` are those of this worker's batch. They give the dtypes, and the shapes per sample.
    """
    offset = 0

    def read(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        nonlocal offset
        size = torch.Size(shape).numel() * dtype.itemsize
        piece, offset = data[offset : offset + size], offset + size
        return piece.clone().view(dtype).reshape(list(shape))  # ``view`` needs aligned data

    values: list[Leaf] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            shape = list(leaf.shape)
            shape[dimension] = samples
            values.append(read(leaf.dtype, shape))
        elif (kind := _kind(leaf)) != "str":
            values.append(read(_DTYPES[kind], [samples]).tolist())
        else:
            lengths = read(torch.int64, [samples]).tolist()
            values.append([read(torch.uint8, [n]).numpy().tobytes().decode() for n in lengths])
    return values


def _concatenate(own: Leaf, pieces: Sequence[Any], dimension: int) -> Leaf:
    if not isinstance(own, Tensor):
        entries = [*own, *(entry for piece in pieces for entry in piece)]
        return type(own)(entries)  # type: ignore[call-arg]
    tensor = torch.cat([own, *(piece.to(own.device) for piece in pieces)], dim=dimension)
    return tensor.pin_memory() if own.is_pinned() else tensor
