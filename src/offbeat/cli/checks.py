"""What a comparison is checked for before anything runs."""

from dataclasses import replace

from offbeat.cli.options import USUAL_LATENCY
from offbeat.lab.job import Job
from offbeat.lab.methods.registry import parse_method
from offbeat.lab.recipes import Task
from offbeat.strategies import Strategy


def check_method(job: Job, text: str, task: Task | None) -> Task:
    """Check the job under one strategy of a comparison; ``task`` is what it builds, or has built.

    Raises:
        ValueError, TypeError, FileNotFoundError: as ``Job.check``.
    """
    one = job.under(text)
    parse_method(one.strategy)
    try:
        one.check_method()
    except ValueError as error:
        if one != replace(job, strategy=one.strategy):  # its own options are to blame
            raise
        raise ValueError(
            f"{error}; an option for some strategies only goes with them, as in "
            "-s 'local:period=8 --wire int8'"
        ) from None
    return one.check(task)


def refuse_twice(job: Job, strategies: list[str]) -> None:
    """Raise ValueError if two of them train alike: their results would have one name."""
    seen: dict[object, str] = {}
    for text in strategies:
        one = job.under(text)
        method = parse_method(one.strategy)
        usual = method.default_wire if isinstance(method, Strategy) else None
        kind = replace(one, strategy="", wire=one.wire or usual), repr(method)
        if kind in seen:
            raise ValueError(
                f"{text!r} is given twice"
                if text == seen[kind]
                else f"{text!r} and {seen[kind]!r} are the same; leave one out, and repeat with "
                "--seeds"
            )
        seen[kind] = text


def refuse_virtual(
    *,
    latency: str,
    step_time: str | None,
    workers_per_node: int,
    inside: str | None,
    inside_latency: str | None,
) -> None:
    """Raise ValueError for an option that only simulated workers can honour."""
    asked = {
        "--step-time": step_time is not None,
        "--latency": latency != USUAL_LATENCY,
        "--workers-per-node": workers_per_node != 1,
        "--inside": inside is not None,
        "--inside-latency": inside_latency is not None,
    }
    for option in (name for name, given in asked.items() if given):
        raise ValueError(f"{option} is for simulated workers; add --simulate, or leave it out")


def parse_lr_scales(text: str) -> tuple[float, ...]:
    """The factors of ``--lr-scale``.

    Raises:
        ValueError: something else than numbers, or one of them twice.
    """
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError(
            f"lr-scale must be a number, or several as in 0.3,1,3, got {text!r}"
        ) from None
    if len(set(found)) < len(found):
        raise ValueError(f"lr-scale {text}: a factor is given twice")
    return found
