"""What the race calls its methods and tracks, and which are of a kind."""

from offbeat.lab.methods.registry import PREFIXES

EARLIER = "earlier"
"""A track that is only shown, in ``late``: the default as it was before it was two bits."""
DILOCO = "diloco:period={},outer_lr=0.7,outer_momentum=0.5,fragments=4,overlap=4 --wire int4"
OURS = DILOCO.format(16)
"""The strongest rival among our own: fragments, overlap and few bits."""
_SETTINGS, _STRONG = DILOCO.partition("{}")[2], " (fragments, overlap, int4)"
_DEFAULT = "streaming"


def short(method: str) -> str:
    """A method's name where there is little room."""
    method = method.replace(OURS, f"diloco{_STRONG}")  # the period is that of most tables
    return method.replace(_SETTINGS, _STRONG).replace("--wire ", "")


def is_peer(method: str) -> bool:
    """Whether it is somebody else's."""
    return method.startswith(PREFIXES)


def is_default(method: str) -> bool:
    """Whether it is what ``attach`` takes if it is told nothing."""
    return method.partition(" ")[0].partition(":")[0] == _DEFAULT


def is_diloco(method: str) -> bool:
    """Whether it is our DiLoCo."""
    return method.startswith("diloco")
