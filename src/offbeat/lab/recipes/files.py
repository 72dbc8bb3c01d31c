"""Data files: find them with a helpful error, and load them once per process."""

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def require_directory(data: Path | None, recipe: str, needs: str) -> Path:
    """Return ``data``.

    Raises:
        FileNotFoundError: ``data`` is None, because the run has no ``--data``.
    """
    if data is None:
        raise FileNotFoundError(f"the {recipe} recipe needs --data DIR with {needs}")
    return data


def find_file(folder: Path, names: Sequence[str]) -> Path:
    """Return the path of the first of ``names`` that exists in ``folder``.

    Raises:
        FileNotFoundError: none of the files exists. The message names the files and the folder.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise not_found(" or ".join(names), folder, several=len(names) > 1)


def not_found(wanted: str, folder: Path, *, several: bool) -> FileNotFoundError:
    """Return the error for files that are not in ``folder``."""
    missing = "but neither is there" if several else "but it is not there"
    problem = missing if folder.exists() else "which does not exist"
    return FileNotFoundError(f"looked for {wanted} in {folder}, {problem}")


def shared(load: Callable[P, T]) -> Callable[P, T]:
    """Let all workers of a process share the tensors that ``load`` returns.

    Simulated workers are threads of one process, so each would otherwise hold a copy. Only weak
    references to the tensors are stored: when the last task that uses them is deleted, the memory
    is freed, and a later call loads the data again.

    Args:
        load: Function that returns tensors and plain values, in tuples of any depth. Its result
            must depend on its arguments alone. No caller may write to the tensors.
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
    """Invert ``_weaken``.

    Raises:
        ReferenceError: a tensor has been freed.
    """
    if isinstance(value, tuple):
        return tuple(map(_resolve, value))
    if not isinstance(value, weakref.ref):
        return value
    tensor = value()
    if tensor is None:
        raise ReferenceError
    return tensor
