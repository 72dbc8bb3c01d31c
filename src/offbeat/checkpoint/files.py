"""Checkpoints in a directory: a file for each rank and step, written whole or not at all.

There is no list of what is complete, which a crash could leave wrong. A file is written under
another name, and gets its own when those of all workers are on the disk; only then is anything
older deleted. So where one worker has a file of a step, every other one has it, too, perhaps under
that other name; and before a first checkpoint is whole there is none. It is found by asking all
workers, whether they share the directory or each has one on a disk of its own.
"""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offbeat.checkpoint.state import digest
from offbeat.errors import CheckpointError

FORMAT = 1
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?\.rank(\d+)\.pt")
_WRITTEN = re.compile(rf"\.({_NAME.pattern})\.partial")
Number = tuple[int, int]
"""Of a checkpoint: the step, and how often that had been saved before."""


def path_of(folder: Path, number: Number, rank: int) -> Path:
    """Where ``rank`` keeps it."""
    step, again = number
    return folder / f"step-{step}{f'-{again}' if again else ''}.rank{rank}.pt"


def files_of(folder: Path, rank: int) -> dict[Number, Path]:
    """The files of one rank."""
    return {number: path for number, owner, path in all_files(folder) if owner == rank}


def all_files(folder: Path) -> list[tuple[Number, int, Path]]:
    """Number and rank of each file that is whole."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if parts := _NAME.fullmatch(path.name):
            step, again, rank = parts.groups()
            found.append(((int(step), int(again or 0)), int(rank), path))
    return found


def unnamed_of(folder: Path, rank: int) -> dict[Number, Path]:
    """Names that files of this rank would get: written, in full or in part, when a crash came."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if parts := _WRITTEN.fullmatch(path.name):
            name, step, again, owner = parts.groups()
            if int(owner) == rank:
                found[int(step), int(again or 0)] = path.with_name(name)
    return found


def held_by_all(lists: Sequence[Sequence[Sequence[int]]]) -> set[Number]:
    """Of the lists of all workers, as they come out of JSON, what is in each."""
    return set.intersection(*({(step, again) for step, again in one} for one in lists))


def sealed(contents: dict[str, Any]) -> dict[str, Any]:
    """With the format, and the digest of it all.

    Raises:
        CheckpointError: something that could not be read back.
    """
    return {"format": FORMAT, **contents, "digest": digest(contents, "the checkpoint")}


def write(path: Path, contents: dict[str, Any]) -> None:
    """All of it to the disk, where it waits for its name; or nothing."""
    partial = _unnamed(path)
    try:
        with partial.open("wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def give_name(path: Path) -> None:
    """Give its name to what was written."""
    _unnamed(path).replace(path)
    with contextlib.suppress(OSError):  # where a directory cannot be opened: to the disk, too
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def discard(path: Path) -> None:
    """Delete what was written and has no name."""
    _unnamed(path).unlink(missing_ok=True)


def _unnamed(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def read(path: Path) -> dict[str, Any]:
    """What was written: sealed, and with the ``id`` of all files that were saved together.

    Raises:
        CheckpointError: it is damaged, or none of ``save``.
    """
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: from the archive, the pickle, the disk
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read: {reason}") from None
    if not isinstance(contents, dict) or not {"format", "digest", "id"} <= contents.keys():
        raise CheckpointError(f"{path} is no file of offbeat.save()")
    if contents["format"] != FORMAT:
        raise CheckpointError(
            f"{path} is in format {contents['format']}, this version reads {FORMAT}"
        )
    values = {k: one for k, one in contents.items() if k not in ("format", "digest", "id")}
    if digest(values) != contents["digest"]:
        raise CheckpointError(f"{path} is damaged: its values are not those that were saved")
    return contents


def prune(folder: Path, kept: set[Number], rank: int, size: int) -> None:
    """Delete what this worker has written before; rank 0 also that of workers there are no more."""
    for number, owner, path in all_files(folder):
        if number not in kept and (owner == rank or (rank == 0 and owner >= size)):
            path.unlink(missing_ok=True)
    for path in folder.glob(f".step-*.rank{rank}.pt.partial"):  # of a crash
        path.unlink(missing_ok=True)
