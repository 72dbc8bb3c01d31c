"""Colours of methods in figures."""

from collections.abc import Sequence
from itertools import cycle

_USUAL = {
    **{"streaming": "C0", "diloco": "C1", "local": "C2", "bsp": "C3", "async": "C4"},
    **{"selsync": "C5", "ideal": "C7", "torch:ddp": "C3"},
}
"""Beginning of a method's text → its colour in all figures."""
_OTHERS = ("C6", "C8", "C9", "C0", "C1", "C2", "C3", "C4", "C5", "C7")


def colours_of(methods: Sequence[str]) -> list[str]:
    """Return a colour for each method, from matplotlib's cycle of ten colours.

    A strategy has the same colour in all figures. If several methods have the same strategy, the
    first one gets this colour. The other methods get the remaining colours in turn.
    """
    found: dict[str, str] = {}
    for method in methods:
        usual = next((one for name, one in _USUAL.items() if method.startswith(name)), None)
        if usual is not None and usual not in found.values():
            found[method] = usual
    free = cycle([one for one in _OTHERS if one not in found.values()] or _OTHERS)
    return [found.get(method) or next(free) for method in methods]
