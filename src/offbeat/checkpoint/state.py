"""Conversion of states to plain values and back, and a checksum.

A state is a dataclass, for example that of a strategy. *Plain values* are numbers, text, tensors,
None, and lists and dictionaries of these. ``save`` converts a dataclass to plain values, and
``load`` writes them into it. The marks of ``offbeat.strategies.base`` select fields: ``transient``
fields are never converted, and with an argument ``mark`` only the fields with this mark are.
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


def save(state: Any, mark: str | None = None) -> Any:
    """Return a dataclass as plain values. Tensors are not copied.

    Args:
        state: The dataclass. It may contain further dataclasses, also in lists.
        mark: "common" or "local". The result then has only the fields with this mark, at any depth.
            None: all fields that are not transient.
    """
    if dataclasses.is_dataclass(state):
        return {
            name: save(getattr(state, name), inner)
            for name, inner in _selected(state, mark).items()
        }
    if isinstance(state, list):
        return [save(each, mark) for each in state]
    return state if isinstance(state, Tensor) else copy.deepcopy(state)


def load(
    state: Any,
    saved: Any,
    mark: str | None = None,
    *,
    where: str = "state",
    check_only: bool = False,
) -> None:
    """Write plain values, the result of ``save`` with the same ``mark``, into a dataclass.

    Tensors in lists are overwritten in place, and dataclasses field by field. All other values are
    replaced by copies.

    Args:
        state: The dataclass.
        saved: The plain values.
        mark: As for ``save``.
        where: Name of the values in errors.
        check_only: True to write nothing. A check in advance makes the load all or nothing.

    Raises:
        CheckpointError: the dataclass has other fields, or a list of other tensors.
    """
    selected = _selected(state, mark)
    found = saved.keys() if isinstance(saved, dict) else set()
    if found != selected.keys():
        wrong = ", ".join(sorted(found ^ selected.keys()))
        raise CheckpointError(f"{where} was saved with other fields: {wrong}")
    for name, inner in selected.items():
        present, value, place = getattr(state, name), saved[name], f"{where}.{name}"
        if _is_state(present):
            load(present, value, inner, where=place, check_only=check_only)
        elif isinstance(present, list) and present and isinstance(present[0], Tensor):
            shapes = [[tuple(each.shape) for each in tensors] for tensors in (value, present)]
            if shapes[0] != shapes[1]:
                raise CheckpointError(f"{place} has the shapes {shapes[0]}, here {shapes[1]}")
            for target, source in zip(present, value, strict=True):
                if not check_only:
                    target.copy_(source)
        elif isinstance(present, list) and present and _is_state(present[0]):
            for i, (target, source) in enumerate(zip(present, value, strict=True)):
                load(target, source, inner, where=f"{place}[{i}]", check_only=check_only)
        elif not check_only:
            setattr(state, name, copy.deepcopy(value))


def _selected(state: Any, mark: str | None) -> dict[str, str | None]:
    """Return the names of the selected fields. Each value is the mark for what the field holds."""
    selected: dict[str, str | None] = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if field.metadata.get("transient"):
            continue
        if mark is None or field.metadata.get(mark):
            selected[field.name] = None
        elif not field.metadata and any(
            map(_is_state, value if isinstance(value, list) else [value])
        ):
            selected[field.name] = mark
    return selected


def _is_state(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


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
    dense = flat.cpu().contiguous()
    # Unlike ``reshape(-1)``, this also works for a single element with another stride than 1.
    yield dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
