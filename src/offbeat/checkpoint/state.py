"""Conversion of states to plain values and back, checks before loading, and a checksum.

A state is a dataclass, for example that of a strategy. *Plain values* are numbers, text, tensors,
None, and lists and dictionaries of these. ``save`` converts a dataclass to plain values, without
the fields that are declared as ``transient``. ``check`` tests whether plain values fit a dataclass,
and ``load`` writes them into it.
"""

import copy
import dataclasses
import math
import types
import typing
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat.arguments import types_of
from offbeat.errors import CheckpointError


def transient(**options: Any) -> Any:
    """Declare a dataclass field that checkpoints do not contain, such as a handle or a hook.

    ``options`` are arguments of ``dataclasses.field``.
    """
    return field(metadata={"transient": True}, **options)


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
    """Raise CheckpointError unless ``saved`` has exactly the fields of ``state``, and they fit.

    Values must have the annotated types, floats must be finite, and tensors must have the shapes
    and dtypes of the tensors in ``state``. ``where`` is the name of the values in the error.
    """
    if state is None:
        if saved is not None:
            raise CheckpointError(f"{where} must be None, got {_shown(saved)}")
        return
    names = [each.name for each in saved_fields(state)]
    require_keys(saved, names, where)
    kind: type = type(state)
    try:
        hints = types_of(kind)
    except (NameError, TypeError):  # annotations that exist for type checkers only
        hints = {}
    for name in names:
        _check(getattr(state, name), saved[name], hints.get(name, Any), f"{where}.{name}")


def require_keys(saved: Any, names: typing.Sequence[str], where: str) -> None:
    """Raise CheckpointError unless ``saved`` is a dictionary with exactly the keys ``names``."""
    if not isinstance(saved, dict):
        raise CheckpointError(f"{where} must be a dictionary, got {_shown(saved)}")
    missing = [name for name in names if name not in saved]
    unknown = [name for name in saved if name not in names]
    if missing or unknown:
        problems = [f"without {', '.join(missing)}"] * bool(missing)
        problems += [f"with unknown {', '.join(map(repr, unknown))}"] * bool(unknown)
        raise CheckpointError(f"{where} was saved {' and '.join(problems)}")


def _check(present: Any, saved: Any, hint: Any, where: str) -> None:
    if dataclasses.is_dataclass(present):
        check(present, saved, where)
    elif isinstance(present, Tensor):
        _check_tensor(present, saved, where)
    elif isinstance(present, list) and present and dataclasses.is_dataclass(present[0]):
        _require(isinstance(saved, list) and len(saved) == len(present), where, "a list", saved)
        for i, (target, source) in enumerate(zip(present, saved, strict=True)):
            check(target, source, f"{where}[{i}]")
    else:
        check_value(saved, hint, where)
        # An empty list fits: one of the two states may have sums in flight, and the other none.
        if isinstance(present, list) and present and saved and isinstance(present[0], Tensor):
            _require(isinstance(saved, list), where, f"a list of {len(present)} tensors", saved)
            if len(saved) != len(present):
                raise CheckpointError(f"{where} must be {len(present)} tensors, got {len(saved)}")
            for target, source in zip(present, saved, strict=True):
                _check_tensor(target, source, where)


def _check_tensor(present: Tensor, saved: Any, where: str) -> None:
    required = f"a tensor of shape {tuple(present.shape)}, {present.dtype}"
    _require(isinstance(saved, Tensor), where, required, saved)
    _require((saved.shape, saved.dtype) == (present.shape, present.dtype), where, required, saved)


def check_value(value: Any, hint: Any, where: str) -> None:
    """Raise CheckpointError unless ``value`` has the type ``hint``. Floats must be finite."""
    if hint is Any:
        return
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for each in inner:
            try:
                return check_value(value, each, where)
            except CheckpointError as error:
                reason = error
        raise reason
    if origin is Literal:
        _require(value in inner, where, f"one of {', '.join(map(repr, inner))}", value)
    elif hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(number and math.isfinite(value), where, "a finite number", value)
    elif hint in (int, bool, str, None, type(None)):
        kind = type(None) if hint is None else hint
        _require(type(value) is kind, where, _NAMES[kind], value)
    elif origin is list:
        _require(isinstance(value, list), where, "a list", value)
        for i, each in enumerate(value):
            check_value(each, inner[0], f"{where}[{i}]")
    elif origin is dict:
        _require(isinstance(value, dict), where, "a dictionary", value)
        for key, each in value.items():
            check_value(key, inner[0], f"a key of {where}")
            check_value(each, inner[1], f"{where}[{key!r}]")
    elif isinstance(hint, type):
        _require(isinstance(value, hint), where, f"a {hint.__name__}", value)


_NAMES = {int: "a whole number", bool: "true or false", str: "text", type(None): "None"}


def _require(holds: bool, where: str, required: str, value: object) -> None:
    if not holds:
        raise CheckpointError(f"{where} must be {required}, got {_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one of shape {tuple(value.shape)}, {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- digest ----------------------------------------------------------------------------------------


def digest(values: Any, where: str = "it") -> int:
    """Return the CRC-32 checksum of plain values. It does not depend on the device of tensors.

    The checksum detects damage by a disk or a link, but does not protect against an attacker. It
    takes about half a millisecond per megabyte. Raises CheckpointError if a value is not plain;
    bytes, sets and dtypes are also allowed.
    """
    crc = 0
    for piece in _pieces(values, where):
        crc = zlib.crc32(piece, crc)
    return crc


def _pieces(value: Any, where: str) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)};".encode()
        yield from _tensor_bytes(value.detach())
    elif isinstance(value, Mapping):
        yield f"dict {len(value)};".encode()
        for key, each in value.items():
            yield from _pieces(key, f"a key of {where}")
            yield from _pieces(each, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield f"list {len(value)};".encode()
        for i, each in enumerate(value):
            yield from _pieces(each, f"{where}[{i}]")
    elif isinstance(value, set | frozenset):
        yield f"set {sorted(map(repr, value))};".encode()
    elif isinstance(value, bytes | bytearray):
        yield b"bytes;"
        yield value
    elif value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
        yield f"{value!r};".encode()
    else:
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, and a checkpoint holds numbers, text, tensors "
            "and lists and dictionaries of them"
        )


def _tensor_bytes(value: Tensor) -> Iterator[Any]:
    if value.layout != torch.strided:
        value = value.to_dense()
    flat = (torch.view_as_real(value) if value.is_complex() else value).resolve_neg()
    yield flat.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
