"""Run-time errors of Offbeat.

Wrong arguments raise ``ValueError`` or ``TypeError``. Other failures raise:

    OffbeatError
    ├── AttachError              the model, optimizer or process group cannot be used
    │   └── MismatchError        workers have different models, optimizers or settings
    ├── CheckpointError          a saved state is damaged or belongs to another training
    └── CommunicationError       an operation between workers failed
        └── CommunicationTimeout an operation took longer than ``timeout_seconds``
"""


class OffbeatError(RuntimeError):
    """Base class of all errors that Offbeat raises at run time."""


class AttachError(OffbeatError):
    """The model, optimizer or process group given to ``attach`` cannot be used."""


class MismatchError(AttachError):
    """Two workers hold different models, optimizers or strategy settings."""


class CheckpointError(OffbeatError, ValueError):
    """A state is damaged, belongs to another training, or cannot be written.

    The failed attempt has changed nothing.
    """


class CommunicationError(OffbeatError):
    """An operation between workers failed, for example because one of them died."""


class CommunicationTimeout(CommunicationError, TimeoutError):  # noqa: N818 - like TimeoutError
    """An operation between workers did not end within ``timeout_seconds``."""
