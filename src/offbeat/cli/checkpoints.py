"""The command ``to-dcp``."""

from pathlib import Path

from offbeat.checkpoint import to_dcp as conversion
from offbeat.cli.view import console


def to_dcp(checkpoints: Path, output: Path, *, step: int | None) -> None:
    """Convert a checkpoint; see the command of this name."""
    found = conversion.to_dcp(checkpoints, output, step)
    console.print(f"{output} holds step {found} of {checkpoints}.", highlight=False)
