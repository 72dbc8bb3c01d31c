"""The files of checkpoints in a directory: one file per worker and checkpoint.

A crash at any moment must leave a complete checkpoint, if there was one before. There is no index
file, because a crash could leave it out of date. Instead, saving has two phases:

1. Every worker writes its file under a temporary name and flushes it to the disk.
2. When the files of all workers are on their disks, every worker renames its file. Only then does
   it delete its files of older checkpoints.

So a checkpoint is complete as soon as one worker has renamed its file: the files of the other
workers are then on their disks too, perhaps still under their temporary names. Loading gathers the
file names of all workers. Therefore it works with a shared directory and with a separate disk for
each worker.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from offbeat.checkpoint.state import digest, without_numpy
from offbeat.errors import CheckpointError

FORMAT = 1
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?\.rank(\d+)\.pt")
_PARTIAL = re.compile(rf"\.{_NAME.pattern}\.partial")
CheckpointKey = tuple[int, int]
"""Step of a checkpoint, and its number among the checkpoints of this step, from 0."""


def path_of(folder: Path, key: CheckpointKey, rank: int) -> Path:
    """Return the final path of the file of worker ``rank`` in checkpoint ``key``."""
    step, repetition = key
    return folder / f"step-{step}{f'-{repetition}' if repetition else ''}.rank{rank}.pt"


def all_files(folder: Path) -> list[tuple[CheckpointKey, int, Path]]:
    """Return key, rank and path of all files with final names."""
    return list(_matching(folder, _NAME))


def files_of(folder: Path, rank: int) -> dict[CheckpointKey, Path]:
    """Return the files of worker ``rank`` with their final names, by checkpoint."""
    return {key: path for key, owner, path in _matching(folder, _NAME) if owner == rank}


def partial_files_of(folder: Path, rank: int) -> dict[CheckpointKey, Path]:
    """Return the final paths of the files of ``rank`` with temporary names, by checkpoint."""
    partial = _matching(folder, _PARTIAL)
    return {key: path_of(folder, key, rank) for key, owner, _ in partial if owner == rank}


def _matching(
    folder: Path, pattern: "re.Pattern[str]"
) -> Iterator[tuple[CheckpointKey, int, Path]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if parts := pattern.fullmatch(path.name):
            step, repetition, rank = parts.groups()
            yield (int(step), int(repetition or 0)), int(rank), path


def common_keys(lists: Iterable[Sequence[Sequence[int]]]) -> set[CheckpointKey]:
    """Return the keys that all ``lists`` contain."""
    sets = [{(step, repetition) for step, repetition in keys} for keys in lists]
    return set.intersection(*sets) if sets else set()


def with_digest(contents: dict[str, Any]) -> dict[str, Any]:
    """Return ``contents`` with the version of the format and a checksum of all values added.

    Scalars of numpy become Python's, for example a learning rate that a schedule computed with
    numpy. Raises CheckpointError if a value cannot be saved.
    """
    contents = without_numpy(contents)
    return {"format": FORMAT, **contents, "digest": digest(contents, "the checkpoint")}


def write(path: Path, contents: dict[str, Any]) -> None:
    """Write ``contents`` to the disk under the temporary name of ``path``.

    Removes the temporary file after an error.
    """
    partial = _partial(path)
    try:
        with partial.open("wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def rename(path: Path) -> None:
    """Give the temporary file its final name ``path``, and flush the directory to the disk."""
    _partial(path).replace(path)
    with contextlib.suppress(OSError):  # some systems cannot open directories
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def discard(path: Path) -> None:
    """Delete the temporary file of ``path``."""
    _partial(path).unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def read(path: Path) -> dict[str, Any]:
    """Return the contents of a file. Their entry ``id`` is equal in all files of a checkpoint.

    Raises:
        CheckpointError: the file is damaged, was not written by ``save``, or has another format.
    """
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # archive, pickle and disk raise errors of many types
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read: {reason}") from None
    if not isinstance(contents, dict) or not {"format", "digest", "id"} <= contents.keys():
        raise CheckpointError(f"{path} was not written by offbeat.save()")
    if contents["format"] != FORMAT:
        raise CheckpointError(
            f"{path} is in format {contents['format']}, this version reads {FORMAT}"
        )
    values = {k: value for k, value in contents.items() if k not in ("format", "digest", "id")}
    if digest(values) != contents["digest"]:
        raise CheckpointError(f"{path} is damaged: its values do not match their checksum")
    return contents


def prune(folder: Path, keep: set[CheckpointKey], rank: int, size: int) -> None:
    """Delete the temporary files of ``rank``, and its files of checkpoints not in ``keep``.

    Rank 0 also deletes the files that a run with more workers has left: those of ranks ≥ ``size``
    in checkpoints not in ``keep``.
    """
    for key, owner, path in all_files(folder):
        if key not in keep and (owner == rank or (rank == 0 and owner >= size)):
            path.unlink(missing_ok=True)
    for path in folder.glob(f".step-*.rank{rank}.pt.partial"):  # left by a crash
        path.unlink(missing_ok=True)
