"""What commands write: looked at before the work whose result would be lost."""

import importlib.util
import os
from pathlib import Path

_PICTURES = (".png", ".pdf", ".svg")


def require_file(option: str, path: Path | None) -> None:
    """Raise unless a file can be written at ``path``, in folders that may have to be made.

    Args:
        option: Names it in errors.
        path: None is fine.

    Raises:
        ValueError: it is a directory, or lies below a file, or may not be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path}: it is a directory; name a file")
    _require_writable(option, path)


def require_folder(option: str, path: Path) -> None:
    """Raise unless ``path`` is a folder, or can be made one, and files can be written there.

    Raises:
        ValueError: it is a file, or lies below one, or may not be written.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} {path}: it is a file; name a directory")
    _require_writable(option, path)


def require_picture(option: str, path: Path | None) -> None:
    """Raise unless a plot can be drawn to ``path``.

    Raises:
        ValueError: as ``require_file``, or no picture is called like that.
        ImportError: matplotlib is not installed.
    """
    if path is None:
        return
    require_file(option, path)
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(f"{option} {path}: its name must end in {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("plots need matplotlib: pip install 'offbeat[plot]'")


def _require_writable(option: str, path: Path) -> None:
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if there != path and not there.is_dir():
        raise ValueError(f"{option} {path}: {there} is a file")
    needed = os.W_OK | (os.X_OK if there.is_dir() else 0)
    if not os.access(there, needed):
        raise ValueError(f"{option} {path}: {there} may not be written")
