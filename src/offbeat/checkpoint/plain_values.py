"""Conversion of states to plain values and back, and of plain values to bytes and back.

A state is a dataclass, for example that of a strategy. *Plain values* are numbers, text, tensors,
None, and lists and dictionaries of these: what ``torch.load`` reads with ``weights_only=True``.
The marks of ``offbeat.strategies.base`` select fields: ``transient`` fields are never converted,
and with an argument ``mark`` only the fields with this mark are.
"""

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import CheckpointError


def values_of(state: Any, mark: str | None = None) -> Any:
    """Return a dataclass as plain values. Tensors are not copied.

    Args:
        state: The dataclass. It may contain further dataclasses, also in lists.
        mark: "common" or "local". The result then has only the fields with this mark, at any depth.
            None: all fields that are not transient.
    """
    if dataclasses.is_dataclass(state):
        return {
            name: values_of(getattr(state, name), inner)
            for name, inner in _selected(state, mark).items()
        }
    if isinstance(state, list):
        return [values_of(each, mark) for each in state]
    return state if isinstance(state, Tensor) else copy.deepcopy(state)


def restore(
    state: Any,
    values: Any,
    mark: str | None = None,
    *,
    where: str = "state",
    check_only: bool = False,
) -> None:
    """Write plain values, the result of ``values_of`` with the same ``mark``, into a dataclass.

    Tensors in lists are overwritten in place, and dataclasses field by field. All other values are
    replaced by copies.

    Args:
        state: The dataclass.
        values: The plain values.
        mark: As for ``values_of``.
        where: Name of the values in errors.
        check_only: True to write nothing. A check in advance makes the change all or nothing.

    Raises:
        CheckpointError: the dataclass has other fields, or a list of other tensors.
    """
    selected = _selected(state, mark)
    found = values.keys() if isinstance(values, dict) else set()
    if found != selected.keys():
        wrong = ", ".join(sorted(found ^ selected.keys()))
        raise CheckpointError(f"{where} was saved with other fields: {wrong}")
    for name, inner in selected.items():
        present, value, place = getattr(state, name), values[name], f"{where}.{name}"
        first = present[0] if isinstance(present, list) and present else present
        if _is_state(present):
            restore(present, value, inner, where=place, check_only=check_only)
        elif _is_state(first):
            for i, (target, source) in enumerate(zip(present, value, strict=True)):
                restore(target, source, inner, where=f"{place}[{i}]", check_only=check_only)
        elif isinstance(present, list) and isinstance(first, Tensor):
            shapes = [[tuple(each.shape) for each in tensors] for tensors in (value, present)]
            if shapes[0] != shapes[1]:
                raise CheckpointError(f"{place} has the shapes {shapes[0]}, here {shapes[1]}")
            for target, source in zip(present, value, strict=True):
                if not check_only:
                    target.copy_(source)
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


# -- plain values as bytes -------------------------------------------------------------------------


def write_values(values: Any, file: IO[bytes], what: str) -> None:
    """Write plain values to ``file``, with the scalars of numpy as Python's.

    For example, a schedule may have computed a learning rate with numpy. Raises CheckpointError if
    a value cannot be written. ``what`` names the values in errors.
    """
    try:
        torch.save(_without_numpy(values), file)
    except (pickle.PickleError, TypeError, AttributeError) as error:
        raise _not_plain(what, str(error)) from None


def read_values(file: Path | IO[bytes], what: str, *, mmap: bool = False) -> Any:
    """Return the plain values in ``file``, with all tensors on the CPU.

    ``mmap`` is True to map a file into memory, instead of reading the tensors. Raises
    CheckpointError if ``torch.load`` would have to execute code from the file to read a value.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise _not_plain(what, str(error)) from None


def _not_plain(what: str, message: str) -> CheckpointError:
    """Return the error for a value that is not plain, with the reason in torch's ``message``."""
    found = re.search(r"WeightsUnpickler error: (.*?)(?: was not an allowed|\n|$)", message)
    reason = found[1] if found else message.partition("\n")[0]
    return CheckpointError(
        f"{what} can only have numbers, text, tensors, lists and dictionaries of them: {reason}"
    )


def _without_numpy(value: Any) -> Any:
    """Return plain values with the scalars of numpy replaced by Python's, in new containers."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_without_numpy(key): _without_numpy(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_numpy, value))
    return value
