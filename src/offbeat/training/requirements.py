"""What ``attach`` asks of its arguments and of the strategy together, before anything is sent.

Whoever trains later, or forecasts, asks the same with these: a job's check, and ``plan``.
"""

import math
from collections.abc import Sequence

from torch import nn

from offbeat.arguments import POSITIVE, require_choice, require_number
from offbeat.errors import AttachError
from offbeat.fabric.wire import Precision, require_precision
from offbeat.strategies.base import Strategy
from offbeat.strategies.streaming import StreamingAveraging

_LEAST_SECONDS, _YEAR_SECONDS = 0.001, 31_536_000


def require_nodes(
    strategy: Strategy, wire: Precision, distance_every: int | None, *, continues: bool
) -> None:
    """Raise unless nodes of several workers can train together.

    Raises:
        AttachError: naming what cannot.
    """
    if continues:
        raise AttachError(
            'on_failure="continue" with node_group: a node cannot go on without one of its '
            'workers; use on_failure="raise"'
        )
    if distance_every is not None:
        raise AttachError(
            "distance_every with node_group: when it measures depends on when messages arrive, "
            "which differs between the workers of a node; leave one of them away"
        )
    if not strategy.keeps_nodes:
        raise AttachError(
            f"the workers of a node would get different models: {strategy} depends on when "
            'messages arrive, which differs between them; it has to agree on it, see "Writing a '
            'strategy" (keeps_nodes), or leave node_group away'
        )
    if wire == "auto" and not strategy.chooses:
        raise AttachError(
            'the workers of a node would get different models: wire="auto" chooses by how long '
            "each of them waits. Name a precision, or leave node_group away"
        )


def require_timeout(seconds: float, name: str = "timeout_seconds") -> None:
    """Raise unless ``seconds`` can be the time-out of an operation.

    Raises:
        TypeError: it is no number.
        ValueError: it is not positive, or less than a millisecond, or more than a year, which a
            backend may not understand.
    """
    require_number(name, seconds)
    if _YEAR_SECONDS < seconds < math.inf:
        raise ValueError(f"{name} must be at most {_YEAR_SECONDS}, a year, got {seconds}")
    require_number(name, seconds, POSITIVE)
    if seconds < _LEAST_SECONDS:
        raise ValueError(f"{name} must be at least {_LEAST_SECONDS}, got {seconds}")


def require_wire(wire: Precision, strategy: Strategy) -> None:
    """Raise unless ``strategy`` can use a wire of this precision.

    Raises:
        ValueError: an unknown precision, a lossy one with a strategy that exchanges in a way of
            its own, or "auto" with one that cannot change it while training.
    """
    require_precision(wire)
    if wire == "auto" and not (strategy.chooses or strategy.adapts):
        why = 'it has to declare adapts = True, see "Writing a strategy"'
        if strategy.averages == "pushes":
            why = "both ends of a link to a parameter server keep to one precision from the start"
        if isinstance(strategy, StreamingAveraging):
            why = "the cyclic schedule gives the same bits in every run, whatever is measured"
        raise ValueError(
            f'wire="auto": {strategy} cannot change what it sends while training: {why}. Name a '
            "precision"
        )
    if wire != "float32" and strategy.averages == "nothing":
        raise ValueError(
            f'wire={wire!r}: {type(strategy).__name__} declares averages = "nothing": it '
            "exchanges in a way of its own, which no wire rounds"
        )


def require_optimizer_state(optimizer_state: str, strategy: Strategy) -> None:
    """Raise unless ``strategy`` can do that with the optimizer's state.

    Raises:
        ValueError: an unknown word, or "average" with a strategy that never waits for a mean.
    """
    if optimizer_state not in ("local", "average"):
        raise ValueError(f'optimizer_state must be "local" or "average", got {optimizer_state!r}')
    if optimizer_state == "average" and not strategy.averages_state:
        raise ValueError(
            f'optimizer_state="average" with {strategy}: there is no moment at which all workers '
            "wait for a mean of models; use LocalSGD, SelSync of parameters, FedAvg, or DiLoCo "
            "without overlap"
        )


def require_non_finite(non_finite: str, strategy: Strategy) -> None:
    """Raise unless ``strategy`` can do that with numbers that are not finite.

    Raises:
        ValueError: an unknown word, or one that it cannot honour.
    """
    require_choice("non_finite", non_finite, ("warn", "raise", "leave_out"))
    if non_finite not in strategy.non_finite:
        can = " or ".join(f'"{one}"' for one in strategy.non_finite)
        why = ": a server takes in push after push" if strategy.averages == "pushes" else ""
        raise ValueError(f'non_finite="{non_finite}" with {strategy}: it can {can}{why}')


def require_continuation(
    strategy: Strategy, optimizers: int, distance_every: object, companions: Sequence[nn.Module]
) -> None:
    """Raise unless training can go on after a loss.

    Raises:
        AttachError: naming what cannot.
    """
    cannot = ""
    if not strategy.continues:
        cannot = f"{strategy!r} cannot begin anew with other workers (Strategy.continues)"
    elif strategy.rounds == "gradients" and optimizers > 1:
        cannot = "several optimizers, whose gradients are averaged one after the other"
    elif distance_every is not None:
        cannot = "distance_every, which measures beside the training"
    elif companions:
        cannot = "companions, which no newcomer would get"
    if cannot:
        raise AttachError(f'on_failure="continue" with {cannot}: use on_failure="raise"')
