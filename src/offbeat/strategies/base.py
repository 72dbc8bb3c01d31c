"""The contract of a strategy: what the workers average, and when.

A strategy is a frozen dataclass of hyper-parameters with a few methods. It holds no tensors
and sends no messages. On every worker a *flow* (``offbeat.averaging``) calls these methods and does
everything else: communication, checkpoints, and changes of the group of workers.

Terms:

- Each worker trains a *local model* x. If the workers average models, they share a *global model*
  P, which has the same bits on all of them and consists of one or several *parts*.
- To *launch* a part, every worker sends its update of the part, the change of x against P. The part
  is *in flight* until it *lands*: P moves by the mean update, and x moves with P (see
  ``GlobalModel``).
- In a *round* all workers decide together what to launch. Each worker sends a *vote*, and all
  workers receive their sum, the *summed votes*. With ``lands="arrived"`` no round precedes a
  launch: the votes travel in the *messages* that contain the updates.
- A *generation* is a period with the same group of workers.
- The *wire* is the precision at which sums over the workers are sent, such as "float32" or "int8".
- A *node* is a group of workers, usually on one machine, that average their gradients in every step
  and count as one worker.
- At a *barrier* all workers wait for each other.
- A *consensus* replaces the local model by one that is equal on all workers, usually the mean,
  temporarily or at the end of training. It begins with a barrier.
- A *step boundary* is the moment after all optimizers have stepped.

Only the method ``averages`` is required. ``LocalSGD`` is a short example; docs/extending.md has the
order of the calls.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from offbeat.arguments import Precision, check_settings, setting
from offbeat.strategies.averages import CustomFlow, GlobalModel, Gradients, Outer

__all__ = [
    "CustomFlow",
    "GlobalModel",
    "Gradients",
    "Outer",
    "Precision",
    "Strategy",
    "SummedVotes",
    "WorkerView",
    "common",
    "local",
    "setting",
    "transient",
]


# -- rounds ----------------------------------------------------------------------------------------


class SummedVotes:
    """The sums of a round over all workers. Reading an attribute waits until the sums have arrived.

    Args:
        read: Function that waits for the sums and returns ``stepping`` and ``votes``.

    Attributes:
        stepping: Number of workers that take a step in this round.
        votes: Element-wise sum of the tuples that ``vote`` returned on all workers.
    """

    def __init__(self, read: Callable[[], tuple[int, tuple[float, ...]]]) -> None:
        self._read = read

    @property
    def stepping(self) -> int:  # noqa: D102
        return self._read()[0]

    @property
    def votes(self) -> tuple[float, ...]:  # noqa: D102
        return self._read()[1]


# -- state of a strategy, and its view of the worker -----------------------------------------------


def common(**options: Any) -> Any:
    """Declare a field of ``state()`` whose value is equal on all workers.

    The strategy must change it equally on all workers, for example in ``decide``. When a generation
    begins, all workers copy it from the most advanced worker. ``options``: arguments of
    ``dataclasses.field``.
    """
    return field(metadata={"common": True}, **options)


def local(**options: Any) -> Any:
    """Declare a field of ``state()`` whose value each worker keeps in a new generation.

    Fields that are neither ``common`` nor ``local`` then get their new value from ``state()``. The
    marks also work inside nested dataclasses. ``options`` are arguments of ``dataclasses.field``.
    """
    return field(metadata={"local": True}, **options)


def transient(**options: Any) -> Any:
    """Declare a dataclass field that checkpoints do not contain, such as a handle or a hook.

    ``options`` are arguments of ``dataclasses.field``.
    """
    return field(metadata={"transient": True}, **options)


@dataclass(kw_only=True)
class WorkerView:
    """Data about one worker for the strategy. The flow keeps them up to date.

    The strategy may write ``state``, ``lr_factor``, ``record`` and ``details``. It only reads the
    rest.

    A value marked *common* is equal on all workers. ``decide`` must depend on common values and
    the summed votes only, so that all workers make the same decision.

    Attributes:
        rank: Rank of this worker.
        size: Number of workers (common).
        step: Number of local steps of this worker, including the current one: 1 in the first step.
        start_step: Number of local steps of the most advanced worker when the generation began
            (common).
        stepping: True if this worker takes a step in the current round. False if it waits for the
            other workers, for example in ``Synchronizer.finish`` or ``consensus``.
        state: The object that ``state()`` returned.
        lr_factor: Factor on the learning rates in this worker's next steps of SGD, and of Adam if
            ``adam_correction`` applies.
        count: Number of parts (common).
        launches: Number of launches in this generation (common; with ``lands="arrived"`` only in
            ``decide`` and ``outer_step``).
        since_launch: Number of local steps since this worker's newest launch, at first since the
            generation began.
        gradient_norm_squared: ‖g‖² of the current step before clipping, over all optimizers.
            Requires ``GlobalModel.gradient_norm``.
        squares: Exponentially weighted sums of ‖u‖² over the landed updates u of this worker, and
            of ‖D‖² over the landed means D. A weight decays to 1/e in the time in which each part
            lands five times. Requires ``error_feedback``.
        record: Values that the strategy adds to the telemetry record of this step.
        details: Totals that the strategy adds to ``Stats.details``.
    """

    rank: int = transient(default=0)
    size: int = transient(default=1)
    step: int = transient(default=0)
    start_step: int = 0
    stepping: bool = transient(default=True)
    state: Any = None
    lr_factor: float = 1.0
    count: int = transient(default=1)
    launches: int = 0
    since_launch: int = transient(default=0)
    gradient_norm_squared: float = transient(default=0.0)
    squares: tuple[float, float] = (0.0, 0.0)
    record: dict[str, Any] = transient(default_factory=dict)
    details: dict[str, Any] = transient(default_factory=dict)


# -- the contract ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategy(ABC):
    """An algorithm that decides what the workers average, and when; see the module's docstring."""

    name: ClassVar[str] = ""
    """Name in the text form, such as "local" in ``local:period=8``. Empty for a custom strategy."""

    @property
    def default_wire(self) -> Precision:
        """Default of the ``wire`` argument of ``attach``."""
        return "float32"

    def __post_init__(self) -> None:
        check_settings(self)

    @abstractmethod
    def averages(self) -> GlobalModel | Gradients | CustomFlow:
        """Return what is averaged, and when a mean takes effect.

        Called several times, and must always return equal values.
        """

    def due(self, worker: WorkerView) -> bool:
        """Return True if this worker requests a round in this step.

        The workers that still take steps must request a round at the same local step, for example
        in every eighth step.

        With ``lands="arrived"`` there is no round. The flow calls this method at the end of a step
        if no message is in flight and earlier messages have not taken too much processor time. If
        the result is True, this worker launches the next message at once. The workers may launch it
        at different steps: the sum of a message starts when the last worker has launched it.
        """
        return True

    def with_adam_correction(self) -> "Strategy":
        """Return the strategy that runs in place of this one if the steps of Adam are corrected."""
        return self

    def state(self, worker: WorkerView) -> object | None:
        """Return the strategy's mutable state: a dataclass of plain values, or None.

        Called when a generation begins. ``common``, ``local`` and ``transient`` determine what
        happens to a field when the next one begins.
        """
        return None

    def vote(self, worker: WorkerView) -> tuple[float, ...]:
        """Return numbers that are summed over all workers. Their count must never change.

        Called once in each round, or for each message with ``lands="arrived"``.
        ``worker.stepping`` is False on a worker that takes no step. With ``lands="arrived"`` it is
        also called when a generation begins, to count the numbers.
        """
        return ()

    def decide(self, worker: WorkerView, sums: SummedVotes) -> float:
        """Return the number of parts that all workers launch in this round.

        The parts take turns: with 4 parts and the result 3, the first round launches parts 0, 1 and
        2, and the next round parts 3, 0 and 1.

        With ``lands="arrived"`` it is called once for each message, before its launch. The result
        is the number of parts in the message, at least 1, and ``sums`` contains the votes that
        arrived with the previous message (zeros before the first one).

        The result must depend on the summed votes and common values only.

        Returns:
            A whole number, at most ``worker.count``. 0: none. ``inf``, the default: all parts. With
            ``lands="arrived"``, ``inf`` chooses the number that minimizes the mean age of the
            updates of other workers in the local model.
        """
        return math.inf

    def outer_step(self, worker: WorkerView, part: int, sums: SummedVotes) -> tuple[float, float]:
        """Return μ and a for the landing of ``part``: v ← μ·v + D, then P ← P + D + a·v.

        Only called with ``error_feedback`` and ``Outer.momentum`` > 0, once for each launch.
        ``sums`` has the values that ``decide`` received for this launch. All workers must return
        the same numbers.
        """
        raise NotImplementedError

    def after_step(self, worker: WorkerView) -> None:  # noqa: B027
        """Take measurements for later decisions. Called at the end of each local step."""

    # -- text ------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return the constructor call, with the settings that differ from the defaults."""
        settings = ", ".join(f"{name}={value!r}" for name, value in self._changed_settings())
        return f"{type(self).__name__}({settings})"

    def __str__(self) -> str:
        """Return the text form that ``parse_strategy`` reads, such as ``local:period=8``."""
        settings = ",".join(f"{name}={_as_text(value)}" for name, value in self._changed_settings())
        name = self.name or f"{type(self).__module__}:{type(self).__qualname__}"
        return f"{name}:{settings}" if settings else name

    def _changed_settings(self) -> list[tuple[str, Any]]:
        values = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        return [(name, value) for name, value, default in values if value != default]


def _as_text(value: object) -> str:
    """Return a setting as ``parse_strategy`` reads it, a tuple as ``a/b/c`` or ``a/``."""
    if not isinstance(value, tuple):
        return str(value)
    return "/".join(map(str, value)) + ("/" if len(value) == 1 else "")
