"""The state of a strategy that survives a change of membership.

Fields marked ``common()`` are copied from the most advanced worker to all; fields marked
``local()`` are kept by their worker. Both marks also work inside nested dataclasses.
"""

import dataclasses
from typing import Any


def common_values(state: Any) -> dict[str, Any]:
    """The common fields of a state as plain values, which JSON can hold."""
    values: dict[str, Any] = {}
    if state is None:
        return values
    for one in dataclasses.fields(state):
        value = getattr(state, one.name)
        if one.metadata.get("common"):
            values[one.name] = dataclasses.asdict(value) if _is_state(value) else value
        elif _is_state(value) and not one.metadata.get("local"):
            values[one.name] = common_values(value)
    return values


def load_common_values(state: Any, values: dict[str, Any]) -> None:
    """Replace the common fields of a state by ``values``."""
    for name, value in values.items():
        present = getattr(state, name)
        if _is_state(present):
            load_common_values(present, value)
        else:
            setattr(state, name, value)


def keep_local_values(state: Any, before: Any) -> None:
    """Copy the local fields of the state ``before`` to the new ``state``."""
    if state is None or before is None:
        return
    for one in dataclasses.fields(state):
        value = getattr(before, one.name)
        if one.metadata.get("local"):
            setattr(state, one.name, value)
        elif _is_state(value):
            keep_local_values(getattr(state, one.name), value)


def _is_state(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
