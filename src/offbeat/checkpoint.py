"""A strategy's state as plain values and back: all fields of its dataclass, so none is missed."""

import copy
import dataclasses
from dataclasses import field
from typing import Any

from torch import Tensor


def transient(**options: Any) -> Any:
    """A field of a strategy's state that no checkpoint holds: handles, buffers, hooks."""
    return field(metadata={"transient": True}, **options)


def save(state: Any) -> Any:
    """A dataclass as plain values, without its transient fields."""
    if dataclasses.is_dataclass(state):
        return {
            field.name: save(getattr(state, field.name))
            for field in dataclasses.fields(state)
            if not field.metadata.get("transient")
        }
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
        elif isinstance(present, list) and present and isinstance(present[0], Tensor):
            for one, old in zip(present, value, strict=True):
                one.copy_(old)
        else:
            setattr(state, name, copy.deepcopy(value))
