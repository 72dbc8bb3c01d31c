"""The contents of a checkpoint file: states of the user's objects and of random generators."""

import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from offbeat.errors import CheckpointError


class Stateful(Protocol):
    """An object with a state, such as a learning rate schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state that ``state_dict`` returned."""


def as_list(objects: Any) -> list[Any]:
    """Return ``objects`` as a list: the items of a sequence, one object, or nothing for None."""
    if objects is None:
        return []
    return list(objects) if isinstance(objects, Sequence) else [objects]


def states_of(objects: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the type name and the state of each object."""
    return [(type(each).__name__, each.state_dict()) for each in as_list(objects)]


def require_same_kinds(name: str, saved: Sequence[tuple[str, Any]], objects: Sequence[Any]) -> None:
    """Raise CheckpointError unless ``objects`` have the class names of the saved objects, in order.

    With ``name="optimizer"`` their parameter groups must also have the same sizes. ``saved`` is a
    result of ``states_of``.
    """
    saved_kinds, kinds = [kind for kind, _ in saved], [type(each).__name__ for each in objects]
    if saved_kinds != kinds:
        raise CheckpointError(
            f"it was saved with {name} {', '.join(saved_kinds) or 'none'}, here is "
            f"{', '.join(kinds) or 'none'}: give the same as to save()"
        )
    if name != "optimizer":
        return
    for (kind, values), optimizer in zip(saved, objects, strict=True):
        saved_groups = [len(group["params"]) for group in values["param_groups"]]
        groups = [len(group["params"]) for group in optimizer.param_groups]
        if saved_groups != groups:
            raise CheckpointError(
                f"the {kind} was saved with groups of {saved_groups} parameters, here they are "
                f"{groups}: build it as in the saved run"
            )


def require_same_tensors(present: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise CheckpointError unless two states of a model have the same names of entries.

    Tensors must also have the same shapes. Their dtypes may differ.
    """
    shapes, saved_shapes = (
        {name: getattr(value, "shape", None) for name, value in state.items()}
        for state in (present, saved)
    )
    for name in [*shapes, *saved_shapes]:
        if name not in saved_shapes or name not in shapes or shapes[name] != saved_shapes[name]:
            saved_shape, present_shape = (
                tuple(each[name] or ()) if name in each else "none"
                for each in (saved_shapes, shapes)
            )
            raise CheckpointError(
                f"it was saved for another model: {name!r} has the shape {saved_shape} there, and "
                f"{present_shape} here; build the model of the saved run"
            )


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the random states of torch, numpy, Python, and ``device`` if it is a CUDA device."""
    numpy_state = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"].tolist()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "python": random.getstate(),
    }


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore the random states that ``random_states`` returned; CUDA's only on a CUDA device."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    inner = states["numpy"]["state"]
    key = np.array(inner["key"], dtype=np.uint32)
    np.random.set_state({**states["numpy"], "state": {**inner, "key": key}})
    random.setstate(states["python"])
