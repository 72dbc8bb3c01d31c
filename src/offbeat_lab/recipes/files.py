"""Functions that find data files."""

from collections.abc import Sequence
from pathlib import Path


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
    missing = "but neither is there" if len(names) > 1 else "but it is not there"
    problem = missing if folder.exists() else "which does not exist"
    raise FileNotFoundError(f"looked for {' or '.join(names)} in {folder}, {problem}")
