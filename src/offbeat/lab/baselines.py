"""What strategies are compared with, by the names of the text form."""

from offbeat.lab.ideal import IDEAL, Ideal
from offbeat.lab.method import Baseline
from offbeat.lab.peers import PEERS, PREFIXES
from offbeat.registry import parse_strategy, read_settings
from offbeat.strategies import Strategy

_ALL: tuple[type[Baseline], ...] = (Ideal, *PEERS)
BASELINES: dict[str, type[Baseline]] = {one.name: one for one in _ALL}
"""By name."""


def parse_method(text: str) -> Strategy | Baseline:
    """A strategy, or a baseline: ``ideal``, or a peer as in ``torch:NAME,setting=value``.

    Raises:
        ValueError, TypeError: unknown names or impossible settings; see ``parse_strategy``.
    """
    if not is_baseline(text):
        return parse_strategy(text)
    name, _, settings = text.strip().partition(",")
    if name not in BASELINES:
        raise ValueError(
            f"unknown baseline {name!r}; there are {', '.join(BASELINES)}, with settings as in "
            "torch:ddp,hook=bf16"
        )
    kind = BASELINES[name]
    return kind(**read_settings(kind, name, settings, text, separator=","))


def is_baseline(text: str) -> bool:
    """Whether a text form names a baseline, perhaps a wrong one."""
    return is_ideal(text) or is_peer(text)


def is_ideal(text: str) -> bool:
    """Whether a text form is that of the ideal."""
    return text.strip().replace(":", ",").partition(",")[0] == IDEAL


def is_peer(text: str) -> bool:
    """Whether a text form is that of somebody else's method."""
    return text.strip().startswith(PREFIXES)


def require_virtual(text: str) -> None:
    """Raise unless the method also runs on simulated workers.

    Raises:
        ValueError: it does not.
    """
    method = parse_method(text)
    if isinstance(method, Baseline) and not method.simulated:
        raise ValueError(f"{text} runs its own code on real processes, not on simulated workers")
