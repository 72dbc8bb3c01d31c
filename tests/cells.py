"""Which cells of a grid every run of the tests takes; `make nightly` takes them all."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def nightly(values: Iterable[Any]) -> list[Any]:
    """Parameters that only the nightly run takes."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def some(values: Sequence[Any], *places: int) -> list[Any]:
    """All parameters; those at other places than these only nightly."""
    return [v if i in places else nightly([v])[0] for i, v in enumerate(values)]
