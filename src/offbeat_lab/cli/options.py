"""The options of ``compare`` that are not fields of ``Job``."""

from dataclasses import dataclass
from pathlib import Path

USUAL_LATENCY = "100us"


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of ``compare`` that are not fields of ``Job``; ``cli.commands`` explains them."""

    strategy: list[str] | None = None
    tune: int | None = None
    seeds: int = 1
    simulated: bool = False
    bandwidth: str | None = None
    latency: str | None = None
    step_time: str | None = None
    scenario: Path | None = None
    output: Path | None = None
