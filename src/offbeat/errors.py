"""Run-time errors of Offbeat.

Wrong arguments raise ``ValueError`` or ``TypeError``. What can only go wrong while running raises:

    OffbeatError
    ├── AttachError              the model, optimizer or process group cannot be used as given
    │   └── MismatchError        the workers were not started alike
    ├── CheckpointError          a saved state is damaged, or belongs elsewhere; nothing was loaded
    └── CommunicationError       an operation between workers failed; nothing was averaged by halves
        └── CommunicationTimeout it did not end within ``timeout_seconds``
"""


class OffbeatError(RuntimeError):
    """Base class of the errors Offbeat raises at run time."""


class AttachError(OffbeatError):
    """The model, optimizer or process group given to ``attach`` cannot be used."""


class MismatchError(AttachError):
    """Two workers hold different models, optimizers or strategy settings."""


class CheckpointError(OffbeatError, ValueError):
    """A saved state is damaged or was saved elsewhere, or it cannot be written.

    Nothing was changed by the attempt.
    """


class CommunicationError(OffbeatError):
    """An operation between workers failed, for example because one of them died."""


class CommunicationTimeout(CommunicationError, TimeoutError):  # noqa: N818 - as TimeoutError
    """An operation between workers did not end within ``timeout_seconds``."""
