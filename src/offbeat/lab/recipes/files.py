"""Functions that find data files and share the loaded tensors among the workers of a process."""

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def require_directory(data: Path | None, recipe: str, needs: str) -> Path:
    """Return ``data``, the path given by ``--data``. Does not check that it exists."""
    if data is None:
        raise FileNotFoundError(f"the {recipe} recipe needs --data DIR with {needs}")
    return data


def find_file(folder: Path, names: Sequence[str]) -> Path:
    """Return the path of the first of ``names`` that exists in ``folder``."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise not_found(" or ".join(names), folder, several=len(names) > 1)


def not_found(wanted: str, folder: Path, *, several: bool) -> FileNotFoundError:
    """Return an error that says that ``wanted`` is not in ``folder``.

    ``several`` is True if ``wanted`` names two or more files, of which one would suffice.
    """
    missing = "but neither is there" if several else "but it is not there"
    problem = missing if folder.exists() else "which does not exist"
    return FileNotFoundError(f"looked for {wanted} in {folder}, {problem}")


def share_tensors(load: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``load`` with a cache, so that all workers in one process share the loaded tensors.

    Simulated workers are threads of one process. Without the cache, each would hold a copy. They
    run one at a time, so the cache needs no lock. It holds weak references: the tensors are freed
    when no task uses them any more, and a later call loads them again.

    Args:
        load: Function that returns tensors and plain values, in nested tuples. Its result must
            depend only on its arguments, which must be hashable. Callers must not write to the
            tensors.
    """
    loaded: dict[Any, Any] = {}

    @wraps(load)
    def load_shared(*args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(sorted(kwargs.items())))
        try:
            result: T = _resolve(loaded[key])
        except (KeyError, ReferenceError):
            result = load(*args, **kwargs)
            loaded[key] = _weaken(result)
        return result

    return load_shared


def _weaken(value: Any) -> Any:
    """Replace each tensor in nested tuples by a weak reference."""
    if isinstance(value, tuple):
        return tuple(map(_weaken, value))
    return weakref.ref(value) if isinstance(value, Tensor) else value


def _resolve(value: Any) -> Any:
    """Invert ``_weaken``. Raise ReferenceError if a tensor has been freed."""
    if isinstance(value, tuple):
        return tuple(map(_resolve, value))
    if not isinstance(value, weakref.ref):
        return value
    tensor = value()
    if tensor is None:
        raise ReferenceError
    return tensor
