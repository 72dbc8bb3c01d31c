"""Lazy imports: a package imports its modules when one of its public names is first used.

The command line can then show its help without importing torch.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any


def import_lazily(
    package: str, names: Sequence[str], modules: Sequence[str]
) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` for ``package`` (PEP 562).

    Args:
        package: Full name of the package.
        names: Public names of the package: names that ``modules`` define, or names of modules.
        modules: Modules of the package. The first use of a name imports them in order, up to the
            one that defines the name.
    """

    def find(name: str) -> Any:
        namespace = vars(sys.modules[package])
        if name in names:
            for module in modules:
                defined = vars(importlib.import_module(f"{package}.{module}"))
                namespace.update({each: defined[each] for each in names if each in defined})
            if name in namespace:
                return namespace[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
