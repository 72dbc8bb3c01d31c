"""A strategy's state as plain values and back: all fields of its dataclass, so none is missed.

Before anything is put back, ``check`` looks whether it fits, and ``digest`` whether it is whole.
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
    """A field of a strategy's state that no checkpoint holds: handles, buffers, hooks."""
    return field(metadata={"transient": True}, **options)


def kept(state: Any) -> "list[dataclasses.Field[Any]]":
    """The fields of a dataclass that a checkpoint holds."""
    return [one for one in dataclasses.fields(state) if not one.metadata.get("transient")]


def save(state: Any) -> Any:
    """A dataclass as plain values, without its transient fields."""
    if dataclasses.is_dataclass(state):
        return {one.name: save(getattr(state, one.name)) for one in kept(state)}
    if isinstance(state, list):
        return [save(one) for one in state]
    return state.clone() if isinstance(state, Tensor) else copy.deepcopy(state)


def load(state: Any, saved: dict[str, Any] | None) -> None:
    """Put plain values back into a dataclass of the same shape; tensors in place."""
    if saved is None:  # of a strategy that keeps nothing
        return
    for name, value in saved.items():
        present = getattr(state, name)
        if dataclasses.is_dataclass(present):
            load(present, value)
        elif isinstance(present, list) and present and dataclasses.is_dataclass(present[0]):
            for one, old in zip(present, value, strict=True):
                load(one, old)
        elif isinstance(present, list) and present and value and isinstance(present[0], Tensor):
            for one, old in zip(present, value, strict=True):
                one.copy_(old)
        else:
            setattr(state, name, copy.deepcopy(value))


# -- what fits -------------------------------------------------------------------------------------


def check(state: Any, saved: Any, where: str) -> None:
    """Raise unless ``load(state, saved)`` would put everything back, and nothing else.

    Types are those of the dataclass's annotations; numbers must be finite, and tensors of the
    shape and dtype that they have in ``state``.

    Args:
        state: The dataclass; None: of a strategy that keeps nothing.
        saved: Plain values.
        where: Names them in the error.

    Raises:
        CheckpointError: naming the first field that does not fit.
    """
    if state is None:
        if saved is not None:
            raise CheckpointError(f"{where} must be None, got {_shown(saved)}")
        return
    names = [one.name for one in kept(state)]
    require_keys(saved, names, where)
    kind: type = type(state)
    try:
        hints = types_of(kind)
    except (NameError, TypeError):  # annotations that are there for a type checker alone
        hints = {}
    for name in names:
        _check(getattr(state, name), saved[name], hints.get(name, Any), f"{where}.{name}")


def require_keys(saved: Any, names: typing.Sequence[str], where: str) -> None:
    """Raise unless ``saved`` is a dictionary with these keys and no others.

    Raises:
        CheckpointError: naming the keys that are missing, or too many.
    """
    if not isinstance(saved, dict):
        raise CheckpointError(f"{where} must be a dictionary, got {_shown(saved)}")
    missing = [name for name in names if name not in saved]
    unknown = [name for name in saved if name not in names]
    if missing or unknown:
        told = [f"without {', '.join(missing)}"] * bool(missing)
        told += [f"with {', '.join(map(repr, unknown))}, which there is not"] * bool(unknown)
        raise CheckpointError(f"{where} was saved {' and '.join(told)}")


def _check(present: Any, saved: Any, hint: Any, where: str) -> None:
    if dataclasses.is_dataclass(present):
        check(present, saved, where)
    elif isinstance(present, Tensor):
        check_tensors([present], [saved], where)
    elif isinstance(present, list) and present and dataclasses.is_dataclass(present[0]):
        _require(isinstance(saved, list) and len(saved) == len(present), where, "a list", saved)
        for i, (one, old) in enumerate(zip(present, saved, strict=True)):
            check(one, old, f"{where}[{i}]")
    else:
        check_value(saved, hint, where)
        # What is under way is there in one of them only, perhaps.
        if isinstance(present, list) and present and saved and isinstance(present[0], Tensor):
            check_tensors(present, saved, where)


def check_tensors(present: typing.Sequence[Tensor], saved: Any, where: str) -> None:
    """Raise unless ``saved`` are tensors of the same shapes and dtypes, one for each.

    Raises:
        CheckpointError: naming the first that is not.
    """
    _require(isinstance(saved, list), where, f"a list of {len(present)} tensors", saved)
    if len(saved) != len(present):
        raise CheckpointError(f"{where} must be {len(present)} tensors, got {len(saved)}")
    for one, old in zip(present, saved, strict=True):
        like = f"a tensor of shape {tuple(one.shape)}, {one.dtype}"
        _require(isinstance(old, Tensor), where, like, old)
        _require((old.shape, old.dtype) == (one.shape, one.dtype), where, like, old)


def check_value(value: Any, hint: Any, where: str) -> None:
    """Raise unless ``value`` has the annotated type ``hint``; numbers must be finite.

    Raises:
        CheckpointError: naming ``where``.
    """
    if hint is Any:
        return
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            try:
                return check_value(value, one, where)
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
        for i, one in enumerate(value):
            check_value(one, inner[0], f"{where}[{i}]")
    elif origin is dict:
        _require(isinstance(value, dict), where, "a dictionary", value)
        for key, one in value.items():
            check_value(key, inner[0], f"a key of {where}")
            check_value(one, inner[1], f"{where}[{key!r}]")
    elif isinstance(hint, type):
        _require(isinstance(value, hint), where, f"a {hint.__name__}", value)


_NAMES = {int: "a whole number", bool: "true or false", str: "text", type(None): "None"}


def _require(holds: bool, where: str, what: str, got: object) -> None:
    if not holds:
        raise CheckpointError(f"{where} must be {what}, got {_shown(got)}")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one of shape {tuple(value.shape)}, {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- what is whole ---------------------------------------------------------------------------------


def digest(values: Any, where: str = "it") -> int:
    """A CRC-32 of plain values: numbers, text, tensors, and lists and dictionaries of them.

    The same for equal values wherever their tensors are. It finds what a disk or a link has
    damaged, and is no protection against anyone. About half a millisecond a megabyte.

    Args:
        values: They.
        where: Names them in the error.

    Raises:
        CheckpointError: something else, which could not be read back without running its code.
    """
    crc = 0
    for piece in _pieces(values, where):
        crc = zlib.crc32(piece, crc)
    return crc


def _pieces(value: Any, where: str) -> Iterator[Any]:
    """The bytes that stand for ``value``."""
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)};".encode()
        yield from _tensor_bytes(value.detach())
    elif isinstance(value, Mapping):
        yield f"dict {len(value)};".encode()
        for key, one in value.items():
            yield from _pieces(key, f"a key of {where}")
            yield from _pieces(one, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield f"list {len(value)};".encode()
        for i, one in enumerate(value):
            yield from _pieces(one, f"{where}[{i}]")
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
