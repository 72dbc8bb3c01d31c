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
import zipfile
from pathlib import Path
from typing import Any

import torch

from offbeat.checkpoint.plain_values import read_values, write_values
from offbeat.checkpoint.worker_state import require_format
from offbeat.errors import CheckpointError

_NAME = re.compile(r"(\.?)step-(\d+)(?:-(\d+))?\.rank(\d+)\.pt((?:\.partial)?)")
CheckpointKey = tuple[int, int]
"""Step of a checkpoint, and its number among the checkpoints of this step, from 0."""


class Files:
    """The files of one worker in the directory of the checkpoints.

    Args:
        folder: The directory.
        rank: Rank of the worker.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def path(self, key: CheckpointKey, rank: int | None = None) -> Path:
        """Return the final path of this worker's file in a checkpoint, or that of ``rank``."""
        step, repetition = key
        number = f"-{repetition}" if repetition else ""
        return self.folder / f"step-{step}{number}.rank{self.rank if rank is None else rank}.pt"

    def checkpoints(self, *, partial: bool = False) -> set[CheckpointKey]:
        """Return the checkpoints of which this worker has a file.

        ``partial`` is True for the files with temporary names.
        """
        found = self._all()
        return {key for _, key, *owner in found if owner == [self.rank, partial]}

    def _all(self) -> list[tuple[Path, CheckpointKey, int, bool]]:
        """Return path, checkpoint and rank of each file, and whether its name is temporary."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        found = [(path, parts) for path in paths if (parts := _NAME.fullmatch(path.name))]
        return [
            (path, (int(parts[2]), int(parts[3] or 0)), int(parts[4]), bool(parts[5]))
            for path, parts in found
            if bool(parts[1]) == bool(parts[5])
        ]

    # -- writing -----------------------------------------------------------------------------------

    def write(self, key: CheckpointKey, contents: dict[str, Any]) -> None:
        """Write ``contents`` to the disk under a temporary name.

        Raises CheckpointError, and leaves no file, if this fails or ``read`` would refuse a value.
        """
        partial = self._partial(key)
        try:
            if not torch.serialization.get_crc32_options():
                raise CheckpointError("torch.serialization.set_crc32_options(True) is required")
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                write_values(contents, file, "a checkpoint")
                file.flush()
                os.fsync(file.fileno())
            read_values(partial, "a checkpoint", mmap=True)
        except Exception as error:  # objects of the user raise errors of many types when pickled
            self.discard(key)
            raise CheckpointError(f"{self.path(key)} could not be written: {error}") from None

    def discard(self, key: CheckpointKey) -> None:
        """Delete the file with the temporary name, if it exists."""
        with contextlib.suppress(OSError):
            self._partial(key).unlink()

    def rename(self, key: CheckpointKey) -> None:
        """Give the file with the temporary name its final name, and flush the directory."""
        self._partial(key).replace(self.path(key))
        with contextlib.suppress(OSError):  # some systems cannot open directories
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _partial(self, key: CheckpointKey) -> Path:
        return self.folder / f".{self.path(key).name}.partial"

    def prune(self, keep: set[CheckpointKey], size: int) -> None:
        """Delete this worker's files of checkpoints not in ``keep``, and those of a crash.

        Rank 0 also deletes the files that a run with more workers has left: those of ranks ≥
        ``size`` in checkpoints not in ``keep``.
        """
        for path, key, owner, partial in self._all():
            left_by_others = self.rank == 0 and owner >= size and not partial
            if (owner == self.rank or left_by_others) and (partial or key not in keep):
                path.unlink(missing_ok=True)


def read(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Return the contents of a file. Their entry ``id`` is equal in all files of a checkpoint.

    ``mmap`` is that of ``read_values``.

    ``torch.save`` writes a zip archive with a CRC-32 of each record, which ``torch.load`` does not
    compare. ``testzip`` does: it detects damage by a disk, but does not protect against an
    attacker.

    Raises:
        CheckpointError: the file is damaged, was not written by ``save``, or has another format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{damaged} in it does not match its checksum")
        contents: dict[str, Any] = read_values(path, "a checkpoint", mmap=mmap)
        require_format(contents)
    except Exception as error:  # archive, pickle and disk raise errors of many types
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read: {reason}") from None
    return contents
