"""Offbeat trains PyTorch models data-parallel on slow networks.

The first use of a public name imports its module, so the command line can show its help without
importing torch.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "BSP",
    "AsyncAveraging",
    "AttachError",
    "CheckpointError",
    "CommunicationError",
    "CommunicationTimeout",
    "Compute",
    "DiLoCo",
    "EndedError",
    "Forecast",
    "JsonLines",
    "LocalSGD",
    "MismatchError",
    "Network",
    "OffbeatError",
    "Plan",
    "SelSync",
    "Simulation",
    "Stats",
    "Strategy",
    "StreamingAveraging",
    "Synchronizer",
    "TensorBoard",
    "WandB",
    "attach",
    "data",
    "load",
    "parse_strategy",
    "plan",
    "save",
    "simulate",
]


def import_lazily(
    package: str, names: Sequence[str], modules: Sequence[str]
) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` for ``package`` (PEP 562).

    Args:
        package: Full name of the package.
        names: Public names of the package: names that ``modules`` define, or names of modules.
        modules: Modules of the package. The first use of a name imports all of them, in order:
            a module may have the name of a function, and must not replace it later.
    """

    def find(name: str) -> Any:
        namespace = vars(sys.modules[package])
        if name in names:
            for module in modules:
                defined = vars(import_module(f"{package}.{module}"))
                namespace.update({each: defined[each] for each in names if each in defined})
            if name in namespace:
                return namespace[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


if TYPE_CHECKING:
    from offbeat import data
    from offbeat.attach import attach
    from offbeat.checkpoint.save_load import load, save
    from offbeat.errors import (
        AttachError,
        CheckpointError,
        CommunicationError,
        CommunicationTimeout,
        EndedError,
        MismatchError,
        OffbeatError,
    )
    from offbeat.plan import Forecast, Plan, plan
    from offbeat.simulate import Compute, Network, Simulation, simulate
    from offbeat.strategies import (
        BSP,
        AsyncAveraging,
        DiLoCo,
        LocalSGD,
        SelSync,
        Strategy,
        StreamingAveraging,
    )
    from offbeat.strategies.registry import parse_strategy
    from offbeat.synchronizer import Synchronizer
    from offbeat.telemetry import JsonLines, Stats, TensorBoard, WandB
else:
    __getattr__ = import_lazily(
        __name__,
        __all__,
        (
            *("errors", "strategies", "strategies.registry", "data", "plan", "simulate"),
            *("telemetry", "attach", "synchronizer", "checkpoint.save_load"),
        ),
    )


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


class _Package(ModuleType):
    """Keeps ``offbeat.attach``, ``offbeat.plan`` and ``offbeat.simulate`` functions.

    Modules of the same names exist. Importing ``offbeat.attach`` makes Python set the attribute
    ``attach`` of the package to the module. This class ignores that assignment.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("attach", "plan", "simulate") or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Pickle the package by its name, because pickled functions may refer to it."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
