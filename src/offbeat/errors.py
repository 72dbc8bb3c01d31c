"""Run-time errors of Offbeat.

Wrong arguments raise ``ValueError`` or ``TypeError``. All other failures raise one of these:

    OffbeatError
    ├── AttachError              the model, optimizer or process group cannot be used
    │   └── MismatchError        workers have different models, optimizers or settings
    ├── CheckpointError          a saved state cannot be loaded or written
    └── CommunicationError       an operation between workers failed
        └── CommunicationTimeout an operation took longer than ``timeout_seconds``
"""


class OffbeatError(RuntimeError):
    """Base class of all errors that Offbeat raises at run time."""


class AttachError(OffbeatError):
    """The model, optimizer or process group given to ``attach`` cannot be used."""


class MismatchError(AttachError):
    """Two workers have different models, optimizers or settings."""


class CheckpointError(OffbeatError, ValueError):
    """A saved state is damaged, belongs to another training, or cannot be written.

    The failed call to save or load has changed nothing.
    """


class CommunicationError(OffbeatError):
    """An operation between workers failed, for example because one of them died."""


class CommunicationTimeout(CommunicationError, TimeoutError):  # noqa: N818 - like TimeoutError
    """An operation between workers did not end within ``timeout_seconds``."""
