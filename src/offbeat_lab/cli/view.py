"""Lines of output that several commands print."""

from pathlib import Path

import typer

from offbeat.extend import console, show_seconds
from offbeat_lab.timing.step_time import StepTime

_MOST_SPREAD = 3.0  # ratio of the longest steps to the shortest, above which a warning is printed


def print_path(what: str, path: Path) -> None:
    """Print the path of a written file."""
    console.print(f"{what} {path}", highlight=False, soft_wrap=True)


def print_step_time(recipe: str, step: StepTime) -> None:
    """Print a measured step time. Warn on standard error if its steps differed much."""
    console.print(
        f"a step of {recipe} takes {show_seconds(step.seconds)} here, as measured now; --step-time "
        "sets another time",
        highlight=False,
        soft_wrap=True,
    )
    if step.high > _MOST_SPREAD * step.low:
        typer.echo(
            f"warning: measured steps took {show_seconds(step.low)} to {show_seconds(step.high)} "
            "(10 % and 90 % quantiles), perhaps because other programs were running: set "
            "--step-time, or measure again on an idle machine",
            err=True,
        )
