"""Parsing of methods: strategies such as ``local:period=8`` and references to compare with."""

import sys

from offbeat import Strategy, parse_strategy
from offbeat.extend import CustomFlow, did_you_mean, read_settings
from offbeat_lab.baselines import STRATEGIES
from offbeat_lab.methods.base import Reference
from offbeat_lab.methods.ddp import DDP, PostLocal
from offbeat_lab.methods.ideal import IDEAL, Ideal
from offbeat_lab.methods.peer import PREFIX

REFERENCES: dict[str, type[Reference]] = {kind.name: kind for kind in (Ideal, DDP, PostLocal)}


def parse_method(text: str) -> Strategy | Reference:
    """Return the strategy or reference that ``text`` names, with its settings."""
    if not is_reference(text):
        return parse_strategy(text, STRATEGIES)
    name, _, settings = text.strip().partition(",")
    if name not in REFERENCES:
        raise ValueError(
            f"unknown reference {name!r}{did_you_mean(name, REFERENCES)}; there are "
            f"{', '.join(REFERENCES)}, with settings as in torch:ddp,hook=bf16"
        )
    kind = REFERENCES[name]
    return kind(**read_settings(kind, name, settings, text, separator=","))


def parse_imported(text: str) -> Strategy | Reference | None:
    """Return the same as ``parse_method``, but import no module, which a file of results may name.

    None: the settings are invalid, or this is a custom strategy that is not imported yet.
    """
    name = text.strip().partition(":")[0]
    if not is_reference(text) and name not in {*STRATEGIES, *sys.modules}:
        return None
    try:
        return parse_method(text)
    except (ValueError, TypeError):
        return None


def is_reference(text: str) -> bool:
    """Return True if ``text`` names a reference. Its settings may be invalid."""
    return is_ideal(text) or is_peer(text)


def is_ideal(text: str) -> bool:
    """Return True if ``text`` names the reference ``ideal``. Its settings may be invalid."""
    return text.strip().replace(":", ",").partition(",")[0] == IDEAL


def is_peer(text: str) -> bool:
    """Return True if ``text`` begins with a peer's prefix. The rest may be invalid."""
    return text.strip().startswith(PREFIX)


def is_elastic(text: str) -> bool:
    """Return True if the method that ``text`` names continues when workers die and join."""
    method = parse_method(text)
    return isinstance(method, Strategy) and not isinstance(method.averages(), CustomFlow)


def require_virtual(text: str) -> None:
    """Raise ValueError unless the method that ``text`` names can run in the simulator."""
    method = parse_method(text)
    if isinstance(method, Reference) and not method.simulated:
        raise ValueError(f"{text} runs its own code on real processes, not on simulated workers")
