"""Checks of command-line arguments before a run, so that mistakes are found at once."""

import tempfile
from dataclasses import replace
from pathlib import Path

from offbeat import Strategy
from offbeat_lab.job import Job
from offbeat_lab.methods.registry import parse_method
from offbeat_lab.recipes import Task


def require_writable(option: str, folder: Path) -> None:
    """Create the directory ``folder``. Raise ValueError unless files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option}: cannot write to {folder}: {error.strerror}") from None


def check_method(job: Job, text: str, task: Task | None, *, several: bool) -> Task:
    """Return the task of a comparison. Raise unless a method can train it with these settings.

    Args:
        job: Settings that all methods share.
        text: The method with its own options, such as ``local:period=8 --wire int8``.
        task: Result of an earlier call for the same comparison. None: build the task now.
        several: True if the comparison has other methods.
    """
    run = job.under(text)
    parse_method(run.strategy)
    try:
        run.check_method()
    except ValueError as error:
        if not several or run != replace(job, strategy=run.strategy):  # it has its own options
            raise
        raise ValueError(
            f"{error}; to give an option to some strategies only, write it after them, as in "
            "-s 'local:period=8 --wire int8'"
        ) from None
    return run.check(task)


def require_distinct(job: Job, strategies: list[str]) -> None:
    """Raise ValueError if two methods have the same settings, even if written differently."""
    seen: dict[object, str] = {}
    for text in strategies:
        run = job.under(text)
        method = parse_method(run.strategy)
        default_wire = method.default_wire if isinstance(method, Strategy) else None
        key = replace(run, strategy="", wire=run.wire or default_wire), repr(method)
        if key in seen:
            raise ValueError(
                f"{text!r} is given twice"
                if text == seen[key]
                else f"{text!r} and {seen[key]!r} are the same; leave one out, and repeat with "
                "--seeds"
            )
        seen[key] = text
