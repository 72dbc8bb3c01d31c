"""Carried state: fields of a strategy's state that survive a change of membership.

Each composition of the group of workers is a *view*. A new view begins when a worker joins or is
lost. All workers then copy the fields marked ``common()`` from the worker that has made the most
progress. Each worker keeps its own values of the fields marked ``local()``. Other fields are
initialized again. Both marks also work inside nested dataclasses.
"""

import dataclasses
from typing import Any


def common_values(state: Any) -> dict[str, Any]:
    """Return the fields of ``state`` marked ``common()``, as plain values for JSON."""
    values: dict[str, Any] = {}
    if state is None:
        return values
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if field.metadata.get("common"):
            values[field.name] = dataclasses.asdict(value) if _is_state(value) else value
        elif _is_state(value) and not field.metadata.get("local"):
            values[field.name] = common_values(value)
    return values


def load_common_values(state: Any, values: dict[str, Any]) -> None:
    """Set the common fields of ``state`` to ``values``, a result of ``common_values``."""
    for name, value in values.items():
        current = getattr(state, name)
        if _is_state(current):
            load_common_values(current, value)
        else:
            setattr(state, name, value)


def keep_local_values(state: Any, before: Any) -> None:
    """Copy the fields marked ``local()`` from ``before``, the state of the previous view."""
    if state is None or before is None:
        return
    for field in dataclasses.fields(state):
        value = getattr(before, field.name)
        if field.metadata.get("local"):
            setattr(state, field.name, value)
        elif _is_state(value):
            keep_local_values(getattr(state, field.name), value)


def _is_state(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
