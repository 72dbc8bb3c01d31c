"""Choose the cells of a grid that every run tests; `make nightly` tests all of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def nightly(values: Iterable[Any]) -> list[Any]:
    """Mark parameters that only the nightly run tests."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def some(values: Sequence[Any], *places: int) -> list[Any]:
    """Return all parameters; those at other positions than ``places`` are marked nightly."""
    return [v if i in places else nightly([v])[0] for i, v in enumerate(values)]
