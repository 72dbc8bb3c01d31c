"""Conversion of states to plain values and back, checks before loading, and a checksum.

A state is a dataclass, for example that of a strategy. *Plain values* are numbers, text, tensors,
None, and lists and dictionaries of these. ``save`` converts a dataclass to plain values, without
the fields that ``offbeat.strategies.base.transient`` declares. ``check`` compares their structure
with that of a dataclass, and ``load`` writes them into it.
"""

import copy
import dataclasses
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import CheckpointError


def saved_fields(state: Any) -> "list[dataclasses.Field[Any]]":
    """Return the fields of a dataclass that a checkpoint contains."""
    return [each for each in dataclasses.fields(state) if not each.metadata.get("transient")]


def save(state: Any) -> Any:
    """Return a dataclass as plain values, without its transient fields. Copies all values."""
    if dataclasses.is_dataclass(state):
        return {each.name: save(getattr(state, each.name)) for each in saved_fields(state)}
    if isinstance(state, list):
        return [save(each) for each in state]
    return state.clone() if isinstance(state, Tensor) else copy.deepcopy(state)


def load(state: Any, saved: dict[str, Any] | None) -> None:
    """Write plain values, the result of ``save``, into the fields of a dataclass.

    Tensors in lists are overwritten in place, and nested dataclasses field by field. All other
    values are replaced by copies. If ``saved`` is None, nothing is written.
    """
    if saved is None:
        return
    for name, value in saved.items():
        present = getattr(state, name)
        if dataclasses.is_dataclass(present):
            load(present, value)
        elif isinstance(present, list) and present and dataclasses.is_dataclass(present[0]):
            for target, source in zip(present, value, strict=True):
                load(target, source)
        elif isinstance(present, list) and present and value and isinstance(present[0], Tensor):
            for target, source in zip(present, value, strict=True):
                target.copy_(source)
        else:
            setattr(state, name, copy.deepcopy(value))


# -- checks ----------------------------------------------------------------------------------------


def check(state: Any, saved: Any, where: str) -> None:
    """Raise CheckpointError unless ``saved`` has the structure of ``state``.

    Dataclasses must have the same fields, and tensors the same shapes. Other values are not
    checked, because the checksum of a checkpoint has shown that they are those that were saved.
    ``where`` is the name of the values in the error.
    """
    if dataclasses.is_dataclass(state):
        names = {each.name for each in saved_fields(state)}
        found = saved.keys() if isinstance(saved, dict) else set()
        if found != names:
            wrong = ", ".join(sorted(found ^ names))
            raise CheckpointError(f"{where} was saved with other fields: {wrong}")
        for name in names:
            check(getattr(state, name), saved[name], f"{where}.{name}")
    elif isinstance(state, Tensor):
        shape = tuple(saved.shape) if isinstance(saved, Tensor) else "none"
        if shape != tuple(state.shape):
            raise CheckpointError(f"{where} has the shape {shape}, here {tuple(state.shape)}")
    elif isinstance(state, list) and state and _has_structure(state[0]):
        # A list of tensors may be empty: the saved or the present state may have no sums in flight.
        if len(saved) != len(state) and (saved or not isinstance(state[0], Tensor)):
            raise CheckpointError(f"{where} has {len(saved)} entries, here {len(state)}")
        for i, (target, source) in enumerate(zip(state, saved, strict=False)):
            check(target, source, f"{where}[{i}]")


def _has_structure(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or isinstance(value, Tensor)


# -- digest ----------------------------------------------------------------------------------------


def digest(values: Any, where: str = "it") -> int:
    """Return the CRC-32 checksum of plain values. It does not depend on the device of tensors.

    The checksum detects damage by a disk or a link, but does not protect against an attacker. It
    takes about half a millisecond per megabyte.

    Raises CheckpointError if a value is not plain. Allowed are also bytes, tuples, sets, dtypes,
    OrderedDict, Counter and torch.Size, but no other subclasses of these types: ``torch.load``
    could not read them again without executing code from the file.
    """
    crc = 0
    for piece in _pieces(values, where):
        crc = zlib.crc32(piece, crc)
    return crc


def _pieces(value: Any, where: str) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)};".encode()
        yield from _tensor_bytes(value.detach())
    elif type(value) in (dict, OrderedDict, Counter):
        yield f"dict {len(value)};".encode()
        for key, each in value.items():
            yield from _pieces(key, f"a key of {where}")
            yield from _pieces(each, f"{where}[{key!r}]")
    elif type(value) in (list, tuple, torch.Size):
        yield f"list {len(value)};".encode()
        for i, each in enumerate(value):
            yield from _pieces(each, f"{where}[{i}]")
    elif type(value) is set:
        for each in value:
            digest(each, f"an element of {where}")  # raises if it is not plain
        yield f"set {sorted(map(repr, value))};".encode()
    elif type(value) in (bytes, bytearray):
        yield b"bytes;"
        yield value
    elif value is None or type(value) in (bool, int, float, complex, str, torch.dtype):
        yield f"{value!r};".encode()
    else:
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, and a checkpoint holds numbers, text, tensors "
            "and lists and dictionaries of them"
        )


def without_numpy(value: Any) -> Any:
    """Return plain values with the scalars of numpy replaced by Python's, in new containers."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {without_numpy(key): without_numpy(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(without_numpy, value))
    return value


def _tensor_bytes(value: Tensor) -> Iterator[Any]:
    if value.layout != torch.strided:
        value = value.to_dense()
    value = value.resolve_conj()
    flat = (torch.view_as_real(value) if value.is_complex() else value).resolve_neg()
    yield as_bytes(flat).numpy()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, as a 1-D uint8 tensor on the CPU."""
    dense = tensor.detach().cpu().contiguous()
    # Unlike ``reshape(-1)``, this also works for a single element with another stride than 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
