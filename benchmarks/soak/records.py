"""Records of a run: what its workers are asked to do, their progress, and their reports."""

import os
import struct
from dataclasses import dataclass, field

# Values of ``Progress``: FIRST_STEP + n is the n-th step.
CONNECTED = 1
FIRST_STEP = 10
FINISHED = 1000
_WORD = struct.Struct("q")


@dataclass(frozen=True)
class Run:
    """One run of the workers; a fault may take several.

    Attributes:
        name: Name of the run, for messages.
        checkpoints: Directory of the checkpoints; None if none are saved.
        loads: True if the workers resume from the checkpoints.
        breaks: True if the fault is injected.
        until: Step after which all workers leave; None if they finish after the last step.
    """

    name: str
    checkpoints: str | None = None
    loads: bool = False
    breaks: bool = True
    until: int | None = None


@dataclass
class Report:
    """Report of one worker. Times are seconds of the machine's monotonic clock.

    Attributes:
        outcome: "finished", or the class name of the exception that ended the worker.
        kinds: Class names of the exception and its bases.
        text: Message of the exception.
        at: Time of the exception or of the end.
        left: Time after detaching.
        since: Start of the last call that may have blocked on other workers.
        fault_at: Time of the fault, if this worker injected it.
        step: Number of local steps.
        loaded: Step of the loaded checkpoint; −1 if none was loaded.
        spread: Largest relative difference between numbers that must be equal. It is not 0 after a
            mean that was applied in part.
        finite: True if all parameters are finite.
        values: First number of each tensor, in hexadecimal.
        warnings: Logged warnings.
        descriptors: File descriptors more than before ``attach``.
        threads: Threads more than before ``attach``.
    """

    outcome: str = ""
    kinds: list[str] = field(default_factory=list)
    text: str = ""
    at: float = 0.0
    left: float = 0.0
    since: float = 0.0
    fault_at: float | None = None
    step: int = 0
    loaded: int = -1
    spread: float = 0.0
    finite: bool = True
    values: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    descriptors: int = 0
    threads: int = 0


class Progress:
    """Progress of each worker in a shared file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, rank: int, value: int) -> None:
        """Record that worker ``rank`` has reached ``value``."""
        os.pwrite(self._file, _WORD.pack(value), _WORD.size * rank)

    def read(self, rank: int) -> int:
        """Return the last value of worker ``rank``; 0 if there is none."""
        found = os.pread(self._file, _WORD.size, _WORD.size * rank)
        return int(_WORD.unpack(found)[0]) if len(found) == _WORD.size else 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
