"""Tables of the benchmark ``noniid``, on rows made by hand."""

from typing import Any

from benchmarks.papers import noniid


def row(strategy: str, injection: str | None, final: float) -> dict[str, Any]:
    return {"job": {"strategy": strategy, "injection": injection}, "final": final}


def test_an_order_is_shown_only_where_ranges_do_not_overlap():
    """a is above c; b overlaps with both, whatever their medians."""
    values = {"a": (0.90, 0.95), "b": (0.80, 0.91), "c": (0.70, 0.85)}
    rows = [row(name, None, one) for name, pair in values.items() for one in pair]
    text = noniid.apart([*rows, row("bsp", None, 0.99)])[0]
    assert "1 of 3 pairs" in text
    assert text.endswith("overlap: `a` above `c`.")
