"""Methods of the race: our DiLoCo's setting, short names for tables, and kinds of methods."""

from offbeat.lab.methods.registry import PREFIXES

DILOCO_OF_PERIOD = (
    "diloco:period={},outer_lr=0.7,outer_momentum=0.5,fragments=4,overlap=4 --wire int4"
)
"""Our DiLoCo with fragments, overlap and int4; takes the period."""
DILOCO = DILOCO_OF_PERIOD.format(16)
"""The strongest of our own rivals of the default."""
_SETTINGS, _SHORT_SETTINGS = DILOCO_OF_PERIOD.partition("{}")[2], " (fragments, overlap, int4)"


def short_name(method: str) -> str:
    """Return the method's name for a table cell or a legend."""
    method = method.replace(DILOCO, f"diloco{_SHORT_SETTINGS}")  # the period of most tables
    return method.replace(_SETTINGS, _SHORT_SETTINGS).replace("--wire ", "")


def is_peer(method: str) -> bool:
    """True for a method of another library."""
    return method.startswith(PREFIXES)


def is_default(method: str) -> bool:
    """True for streaming averaging, the strategy that ``attach`` uses by default."""
    return method.partition(" ")[0].partition(":")[0] == "streaming"
