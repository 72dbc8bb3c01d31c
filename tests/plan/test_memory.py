"""Memory of the rows, in flat copies of the model, as the strategies' docstrings count them."""

from typing import Any

import pytest
import torch

from offbeat.plan.forecast import measure
from offbeat.plan.memory import reachable_bytes
from offbeat.strategies.registry import parse_strategy
from offbeat.transport.placeholder_tensors import blank
from plan_settings import ELEMENTS, FAST, TENSORS, setting

MODEL = 4 * TENSORS * ELEMENTS
W = 516 / 2048  # of int8


def copies(text: str, wire: Any) -> float:
    row = measure(parse_strategy(text), wire, setting(4, FAST)).forecast
    return row.memory_bytes / MODEL


@pytest.mark.parametrize(
    ("text", "exact", "lossy"),
    [
        ("bsp", 1, 1 + 1.25),
        ("local:period=8", 1, 1 + 1 + 1.25),
        ("selsync:target_lssr=0.75", 1, 1 + 1 + 1.25),
        ("selsync:delta=inf", 0, 2),
        ("selsync:target_lssr=0.75,aggregate=gradients", 1, 1 + 1.25),
        ("async:staleness=8", 2, 2 + 1 + 1.25),
        ("async:staleness=8,outer_lr=0.7", 3, 3 + 1.25),
        ("async:staleness=8,outer_momentum=0.5", 4, 4 + 1.25),
        ("diloco:period=8", 3, 3 + 1.25),
        ("diloco:period=8,fragments=4,outer_momentum=0", 1.25, 1.25 + 1.25),
        ("diloco:period=8,overlap=3", 4, 4 + 1.25),
        ("diloco:period=8,outer_dtype=bfloat16", 2, 2 + 1.25),
        ("streaming:parts=2,schedule=cyclic,staleness=8", 4, 2 + 2 * W + 0.25),
        ("streaming:parts=2,schedule=cyclic,staleness=8,outer_gain=1", 3, 1 + 2 * W + 0.25),
    ],
)
def test_copies(text: str, exact: float, lossy: float) -> None:
    """With a lossy wire, errors take 1.25 copies, and payloads up to half a copy."""
    assert copies(text, "float32") == pytest.approx(exact, abs=0.15)
    assert lossy - 0.6 <= copies(text, "int8") <= lossy + 2.2 * W + 0.15


def test_reachable_storages_count_once() -> None:
    """Views share a storage; excluded and blank tensors are recognised by theirs."""
    tensor, own = torch.zeros(100), torch.zeros(50)
    held: dict[str, Any] = {"a": tensor, "b": [tensor[:10], (tensor,)], "c": own}
    closure = lambda: held  # noqa: E731 - a function that leads to them
    excluded = {own.untyped_storage().data_ptr()}
    assert reachable_bytes([held, closure], excluded, 1.0) == 400
    assert reachable_bytes([closure], set(), 10.0) == 6000
    assert reachable_bytes([held, blank(12345).chunk(3)], excluded, 1.0) == 400 + 12345
    assert reachable_bytes([[held]], set(), 1.0, hidden=held) == 0
