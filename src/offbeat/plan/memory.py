"""Memory of a strategy: the size of the tensors that are reachable from its objects."""

import gc
import sys
from collections.abc import Iterable
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

from torch import Tensor, nn

from offbeat.simulate.cluster import SimulatedCluster
from offbeat.simulate.kernel import Kernel, Signal
from offbeat.simulate.workers import SimulatedWorker, Workers
from offbeat.transport.host import Host
from offbeat.transport.placeholder_tensors import storage_bytes

_LEAVES = (str, bytes, int, float, complex, type, type(None), ModuleType, BuiltinFunctionType)
# Objects that hold no tensor of the strategy, or refer to other workers.
_EXCLUDED = (nn.Module, Host, SimulatedCluster, Kernel, Signal, SimulatedWorker, Workers)
_Kind = Literal["nothing", "tensor", "function", "method", "container"]


def reachable_bytes(
    roots: Iterable[Any], excluded: set[int], scale: float, hidden: object = None
) -> int:
    """Return the bytes, in the full model, of all tensor storages that one worker can reach.

    References are followed from ``roots``, and from the local variables of Offbeat's functions on
    the call stack.

    Args:
        roots: Objects of the worker.
        excluded: Addresses of storages that do not count.
        scale: Elements of the full model per element of a model tensor (``Host.scale``).
        hidden: An object whose references are not followed.
    """
    stack = [*roots, *_caller_locals()]
    seen = {id(hidden)}
    sizes: dict[int, int] = {}
    while stack:
        value = stack.pop()
        cls: Any = type(value)
        kind = _kind(cls)
        if kind == "nothing" or id(value) in seen:
            continue
        seen.add(id(value))
        if kind == "container":
            stack += gc.get_referents(value)
        elif kind == "tensor":
            address = value.untyped_storage().data_ptr()
            if address not in excluded and address not in sizes:
                sizes[address] = storage_bytes(value, scale)
        elif kind == "function":  # not its globals, which refer to the whole program
            stack += [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        else:
            stack += [value.__self__, value.__func__]
    return sum(sizes.values())


@cache
def _kind(cls: type) -> _Kind:
    if issubclass(cls, Tensor):
        return "tensor"
    if issubclass(cls, FunctionType):
        return "function"
    if issubclass(cls, MethodType):
        return "method"
    return "nothing" if issubclass(cls, (*_LEAVES, *_EXCLUDED)) else "container"


def _caller_locals() -> list[Any]:
    """Return the local variables of the callers in Offbeat, up to a function of the planner."""
    values: list[Any] = []
    frame = sys._getframe(2).f_back
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("offbeat.plan."):
            break
        if name.startswith("offbeat."):
            values += frame.f_locals.values()
        frame = frame.f_back
    return values


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
