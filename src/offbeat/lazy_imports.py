"""Public names whose modules are imported when the first of them is used.

The command line shows its help without waiting for torch.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any


def import_lazily(package: str, names: Sequence[str], homes: Sequence[str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``package``; see PEP 562.

    Args:
        package: Its full name.
        names: What it shows: things of its ``homes``, or modules of its own.
        homes: Modules inside of it, all imported at the first use of one of the ``names``.
    """

    def find(name: str) -> Any:
        shown = vars(sys.modules[package])
        if name in names:
            for home in homes:
                found = vars(importlib.import_module(f"{package}.{home}"))
                shown.update({one: found[one] for one in names if one in found})
            if name in shown:
                return shown[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
