"""Run-time errors of Offbeat.

Wrong arguments raise ``ValueError`` or ``TypeError``. Failures at run time raise one of these:

    OffbeatError
    ├── AttachError              attach() cannot be used this way, or a call is not allowed now
    │   └── MismatchError        workers have different models, optimizers or settings
    ├── CheckpointError          a saved state cannot be loaded or written
    └── CommunicationError       an operation between workers failed
        ├── CommunicationTimeout an operation took longer than ``timeout_seconds``
        └── EndedError           the other workers have finished the training
"""


class OffbeatError(RuntimeError):
    """Base class of the run-time errors. Raised itself, for example, for NaN in a contribution."""


class AttachError(OffbeatError):
    """The objects or options given to ``attach`` cannot be used, or a call is not allowed now.

    For example, a checkpoint cannot be saved after ``finish`` or in the middle of an iteration.
    """


class MismatchError(AttachError):
    """Two workers have different models, optimizers or settings."""


class CheckpointError(OffbeatError, ValueError):
    """A saved state is damaged, belongs to another training, or cannot be written."""


class CommunicationError(OffbeatError):
    """An operation between workers failed, for example because one of them died."""


class CommunicationTimeout(CommunicationError, TimeoutError):  # noqa: N818 - like TimeoutError
    """An operation between workers did not end within ``timeout_seconds``."""


class EndedError(CommunicationError):
    """This worker cannot continue or join, because the other workers have finished the training."""
