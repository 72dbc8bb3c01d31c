"""Memory that a strategy takes: the live tensors that its worker can reach."""

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
from offbeat.transport.placeholder_tensors import kept_bytes

_LEAVES = (str, bytes, int, float, complex, type, type(None), ModuleType, BuiltinFunctionType)
# They hold no tensor of the strategy's, or lead to other workers.
_CLOSED = (nn.Module, Host, SimulatedCluster, Kernel, Signal, SimulatedWorker, Workers)
_Kind = Literal["nothing", "tensor", "function", "method", "container"]


def reachable_bytes(
    roots: Iterable[Any], excluded: set[int], scale: float, hidden: object = None
) -> int:
    """Bytes of all storages that can be reached from ``roots`` and from the calling functions.

    Args:
        roots: Objects of one worker.
        excluded: Addresses of storages that do not count.
        scale: ``Host.scale``.
        hidden: An object that is not looked into.
    """
    waiting = [*roots, *_locals()]
    seen = {id(hidden)}
    found: dict[int, int] = {}
    while waiting:
        one = waiting.pop()
        of: Any = type(one)
        kind = _kind(of)
        if kind == "nothing" or id(one) in seen:
            continue
        seen.add(id(one))
        if kind == "container":
            waiting += gc.get_referents(one)
        elif kind == "tensor":
            address = one.untyped_storage().data_ptr()
            if address not in excluded and address not in found:
                found[address] = kept_bytes(one, scale)
        elif kind == "function":  # whose globals lead everywhere
            waiting += [cell.cell_contents for cell in one.__closure__ or () if _filled(cell)]
        else:
            waiting += [one.__self__, one.__func__]
    return sum(found.values())


@cache
def _kind(of: Any) -> _Kind:
    if issubclass(of, Tensor):
        return "tensor"
    if issubclass(of, FunctionType):
        return "function"
    if issubclass(of, MethodType):
        return "method"
    return "nothing" if issubclass(of, (*_LEAVES, *_CLOSED)) else "container"


def _locals() -> list[Any]:
    """The local variables of the functions of this package that have led here, but for ``plan``."""
    found: list[Any] = []
    frame = sys._getframe(2).f_back
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("offbeat.plan."):
            break
        if name.startswith("offbeat."):
            found += frame.f_locals.values()
        frame = frame.f_back
    return found


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
