"""The contract of a strategy: what the workers average, and when.

A strategy is a frozen dataclass of hyper-parameters with up to seven methods. It holds no tensors
and sends no messages. On every worker a *flow* (``offbeat.averaging``) calls the strategy and does
the rest: communication, consensus, checkpoints and changes of membership.

A *round* is one decision of all workers. Every worker sends a *vote*, and every worker receives the
sum of the votes, the *tally*. The decision may *launch* parts of the model: the workers start to
average their updates of these parts. A part is *in flight* until it *lands*, which means that the
average is applied to the model. A *view* is a period with the same set of workers; a new view
begins when workers join or leave.

    averages()             describe what is averaged, and when a mean takes effect
    due(worker)            say if the current step ends with a round
    state(worker)          create the strategy's mutable state, a dataclass
    vote(worker)           return this worker's numbers, to be summed over all workers
    decide(worker, tally)  choose what to launch, the same on all workers
    outer_step(...)        return momentum and outer gain of one launch
    after_step(worker)     take measurements at the end of a local step

An ordinary strategy defines ``name``, ``averages`` and ``due``. ``LocalSGD`` is the shortest
example, and docs/writing-a-strategy.md explains the order of the calls.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from offbeat.arguments import Precision, check_settings, setting
from offbeat.checkpoint.state import transient

__all__ = [
    "CustomFlow",
    "Gradients",
    "Launch",
    "Outer",
    "Precision",
    "SharedModel",
    "Strategy",
    "Tally",
    "WorkerView",
    "common",
    "local",
    "setting",
    "transient",
]


# -- averages(): the three kinds of strategies -----------------------------------------------------


@dataclass(frozen=True)
class Outer:
    """A Nesterov step of the shared model P along D, the mean of the workers' updates.

        v ← μ·v + D
        P ← P + η·(D + μ·v)

    Attributes:
        lr: η > 0.
        momentum: μ in [0, 1). With 0, v is not stored.
        dtype: Name of the dtype in which P and v are stored, such as "bfloat16". None: the dtype in
            which the parameters are summed.
    """

    lr: float = 1.0
    momentum: float = 0.0
    dtype: str | None = None

    @property
    def plain(self) -> bool:
        """True if the step is P ← P + D."""
        return (self.lr, self.momentum) == (1.0, 0.0)


@dataclass(frozen=True)
class SharedModel:
    """The workers average models. P is the shared model, bitwise equal on all workers.

    P is cut into parts. To *launch* a part, every worker sends its update of that part: its model
    minus P. When the mean D of the updates *lands*, P moves by an outer step along D. The worker's
    model moves by the same difference, so it keeps the local steps since the launch.

    Attributes:
        parts: Number of parts (≥ 1), or a function that computes it from the bytes of the model.
            Under ``fully_shard`` the function receives the bytes of the largest shard.
        lands: Time of a landing. 0: before the next step, so workers wait. k > 0: k local steps
            after the launch, or before the next launch of the same part if that is earlier.
            "arrived": at the first step boundary after the mean has arrived.
        bound: Staleness bound for "arrived", in local steps. A worker waits when its newest landed
            launch is this old.
        outer: The step of P along D.
        error_feedback: True if the quantization error of an update stays in the local model, as
            part of x − P, so that the next launch sends it. The parts then have equal bytes and may
            begin inside a tensor; otherwise they consist of whole tensors. With outer momentum the
            flow calls ``outer_step`` for each launch.
        optimizer_state: True if the optimizers' state is averaged whenever the last part lands.
            Requires ``lands=0``.
    """

    parts: int | Callable[[int], int] = 1
    lands: int | Literal["arrived"] = 0
    bound: float = math.inf
    outer: Outer = Outer()
    error_feedback: bool = False
    optimizer_state: bool = False

    def __post_init__(self) -> None:
        if not callable(self.parts) and self.parts < 1:
            raise ValueError(f"parts must be at least 1, got {self.parts}")
        if self.lands != "arrived" and self.lands < 0:
            raise ValueError(f'lands must be at least 0, or "arrived"; got {self.lands!r}')
        if self.optimizer_state and not self.blocking:
            raise ValueError(f"optimizer_state requires lands=0, got lands={self.lands!r}")

    @cached_property
    def blocking(self) -> bool:
        """True if workers wait for each mean before their next step."""
        return self.lands == 0

    @cached_property
    def eager(self) -> bool:
        """True if parts land on arrival, so that results depend on the network's timing."""
        return self.lands == "arrived"


@dataclass(frozen=True)
class Gradients:
    """The workers average gradients, before the optimizer's step.

    Attributes:
        every_step: True if gradients are averaged in every round. Their buckets may then be sent
            during backward, the last bucket carries the vote, and ``decide`` is never called.
            False: the workers exchange votes first, and average if ``decide`` launches.
    """

    every_step: bool = True


@dataclass(frozen=True)
class CustomFlow:
    """Another algorithm with its own flow, such as a parameter server or gossip.

    ``attach`` refuses these options for it: a lossy ``wire``, nodes, ``fully_shard``, elastic
    membership and ``non_finite="exclude"``.

    Attributes:
        make: Function that makes the flow from the strategy and the ``offbeat.averaging.Worker``.
    """

    make: Callable[[Any, Any], Any]


# -- rounds ----------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """The decision of a round.

    Attributes:
        parts: Number of parts to launch, in cyclic order. ``inf``: all parts. 0: none.
        precision: Precision of these parts. None: the ``wire`` given to ``attach``.
    """

    parts: float = math.inf
    precision: Precision | None = None


class Tally:
    """The sums of a round over all workers. Reading an attribute blocks until they have arrived.

    With a fixed schedule ``decide`` reads no attribute, so no worker waits for the sums.

    Args:
        read: Function that waits for the sums and returns the three attributes.

    Attributes:
        stepping: Number of workers that take a step in this round.
        wanted: Sum of ``due`` over these workers.
        votes: Element-wise sums of the tuples that ``vote`` returned.
    """

    def __init__(self, read: Callable[[], tuple[int, float, tuple[float, ...]]]) -> None:
        self._read = read

    @property
    def stepping(self) -> int:  # noqa: D102
        return self._read()[0]

    @property
    def wanted(self) -> float:  # noqa: D102
        return self._read()[1]

    @property
    def votes(self) -> tuple[float, ...]:  # noqa: D102
        return self._read()[2]


# -- state of a strategy, and its view of the worker -----------------------------------------------


def common(**options: Any) -> Any:
    """Declare a field of ``state()`` that is equal on all workers.

    In a new view all workers copy it from the most advanced worker. ``options`` are those of
    ``dataclasses.field``.
    """
    return field(metadata={"common": True}, **options)


def local(**options: Any) -> Any:
    """Declare a field of ``state()`` that each worker keeps in a new view.

    A field without a mark is saved in checkpoints and is initialized again in a new view. A
    ``transient()`` field is not saved either.
    """
    return field(metadata={"local": True}, **options)


@dataclass(kw_only=True)
class WorkerView:
    """The data about its worker that a strategy may read. The flow keeps it up to date.

    Values marked *common* are equal on all workers of a view, provided that the workers take
    equally many steps. ``decide`` must not depend on other values.

    Attributes:
        rank: Rank of this worker.
        size: Number of workers (common).
        step: Number of local steps, including the current one.
        start_step: Step at which the current view began (common).
        stepping: True if this worker takes a step in the current round. False if it has run out of
            data or waits in a consensus.
        state: The object that ``state()`` returned.
        count: Number of parts (common).
        launches: Number of launches in this view. Launching two parts counts as two.
        landings: Number of landings in this view.
        rounds: Number of rounds since the last one that launched a part (common). In ``decide`` the
            current round counts.
        launch_step: Local step of the last launch.
        in_flight_steps: Local step at the launch of each part in flight, the oldest first.
        ready: True if the part that is launched next is not in flight.
        gradient_norm_squared: ‖g‖² of the current step before clipping, over all optimizers; with
            ``Gradients`` over the optimizer that this round belongs to. Requires ``gradient_norm``.
        sent_squared: Sum of ‖u‖² over this worker's landed updates u, with weights that decay
            exponentially over five passes of the model. Requires error feedback.
        mean_squared: The same sum of ‖D‖² over the means D that landed. Requires error feedback.
        clock: Seconds on this worker's clock at the current step boundary, equal inside a node.
            Requires ``lands="arrived"``.
        spent: Seconds spent on each launch and landing since the last step boundary, without
            waiting. Requires ``lands="arrived"``.
        precision: Precision of the wire (common). None: ``decide`` chooses it for each launch.
        bits: Bits per number of an update, by precision (common).
        two_stages: Precisions at which a sum takes a second message (common).
        record: Values that the strategy adds to the telemetry record of this step.
        details: Totals that the strategy adds to ``Stats.details``.
    """

    rank: int = transient(default=0)
    size: int = transient(default=1)
    step: int = transient(default=0)
    start_step: int = 0
    stepping: bool = transient(default=True)
    state: Any = None
    count: int = transient(default=1)
    launches: int = 0
    landings: int = 0
    rounds: int = 0
    launch_step: int = 0
    in_flight_steps: list[int] = field(default_factory=list)
    ready: bool = transient(default=True)
    gradient_norm_squared: float = transient(default=0.0)
    sent_squared: float = 0.0
    mean_squared: float = 0.0
    clock: float = transient(default=0.0)
    spent: list[float] = transient(default_factory=list)
    precision: Precision | None = transient(default="float32")
    bits: Mapping[str, float] = transient(default_factory=dict)
    two_stages: frozenset[str] = transient(default=frozenset())
    record: dict[str, Any] = transient(default_factory=dict)
    details: dict[str, Any] = transient(default_factory=dict)

    @property
    def since_launch(self) -> int:
        """Number of local steps since the last launch. Not common."""
        return self.step - self.launch_step

    @property
    def ages(self) -> list[int]:
        """Number of local steps since the launch of each part in flight, the oldest first."""
        return [self.step - launched for launched in self.in_flight_steps]


# -- the contract ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategy(ABC):
    """An algorithm that decides when workers synchronize, and how long they wait for each other."""

    name: ClassVar[str] = ""
    """Short name in the text form. A custom strategy needs none: its text form has the module and
    the class instead."""

    gradient_norm: ClassVar[bool] = False
    """True if ‖g‖² is measured in every step, before gradients are clipped."""

    @property
    def default_wire(self) -> Precision:
        """Default of the ``wire`` argument of ``attach``."""
        return "float32"

    @property
    def tally_delay(self) -> int:
        """Number of rounds by which ``decide`` lags behind the votes, 0 or 1.

        With 1, ``decide`` receives the tally of the previous round, so no worker waits for votes
        in flight. The first round is not decided.
        """
        return 0

    def __post_init__(self) -> None:
        check_settings(self)

    @abstractmethod
    def averages(self) -> SharedModel | Gradients | CustomFlow:
        """Describe what is averaged, and when the mean takes effect. Allocates nothing."""

    def due(self, worker: WorkerView) -> float:
        """Return the number of parts this worker would launch now. 0 requests no round.

        With ``lands="arrived"`` every worker may request a round at a step of its own. The round is
        decided when all workers have requested it, and the next round starts after the launches of
        this one. In all other cases all workers that step must request a round at the same step, as
        in a fixed schedule.
        """
        return 1.0

    def state(self, worker: WorkerView) -> object | None:
        """Return the mutable state for a view: a dataclass of plain values, or None.

        Called when a view begins. Mark its fields with ``common``, ``local`` or ``transient``.
        """
        return None

    def vote(self, worker: WorkerView) -> tuple[float, ...]:
        """Return the numbers to be summed over the workers, always equally many.

        Called once a round on every worker, with ``worker.stepping=False`` on a worker that takes
        no step. With ``Gradients`` it is also called when a view begins, to count the numbers.
        """
        return ()

    def decide(self, worker: WorkerView, tally: Tally) -> Launch:
        """Return the decision of the round. Called once a round on every worker.

        All workers must return the same, so the decision may depend on the tally and on common
        values only.
        """
        return Launch()

    def outer_step(self, worker: WorkerView, part: int, tally: Tally) -> tuple[float, float]:
        """Return μ and a for the landing of ``part``: v ← μ·v + D, then P ← P + η·(D + a·v).

        Called once for each launch, before it lands, with the tally of its round. Only called with
        ``error_feedback`` and outer momentum. All workers must return the same.
        """
        raise NotImplementedError

    def after_step(self, worker: WorkerView) -> None:  # noqa: B027
        """Take measurements. Called at the end of each local step, after the landings."""

    # -- text ------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return the constructor call with the settings that differ from the defaults."""
        settings = ", ".join(f"{name}={value!r}" for name, value in self._changed_settings())
        return f"{type(self).__name__}({settings})"

    def __str__(self) -> str:
        """Return the text form that ``parse_strategy`` reads, such as ``local:period=8``."""
        settings = ",".join(f"{name}={_as_text(value)}" for name, value in self._changed_settings())
        name = self.name or f"{type(self).__module__}:{type(self).__qualname__}"
        return f"{name}:{settings}" if settings else name

    def _changed_settings(self) -> list[tuple[str, Any]]:
        """Names and values of the settings that differ from the defaults."""
        values = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        return [(name, value) for name, value, default in values if value != default]


def _as_text(value: object) -> str:
    """Return a setting as ``parse_strategy`` reads it: a tuple is ``a/b/c``, or ``a/`` for one."""
    if not isinstance(value, tuple):
        return str(value)
    return "/".join(map(str, value)) + ("/" if len(value) == 1 else "")
