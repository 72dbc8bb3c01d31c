"""The contract of a strategy: what is averaged, when a round is due, and what the round decides.

A strategy is a frozen dataclass of hyper-parameters with up to seven methods. It holds no tensor,
sends no message and never waits. A *flow* (``offbeat.averaging``) calls it on every worker and does
the rest: rounds, means, landings, consensus, checkpoints, changes of membership.

    averages()             what is averaged, and when it takes effect
    due(worker)            0, or how many parts this worker would launch after the current step
    state(worker)          a dataclass for whatever the strategy remembers
    vote(worker)           this worker's numbers, to be summed over all workers
    decide(worker, tally)  what is launched, from those sums: the same on all workers
    outer_step(...)        momentum and outer gain of a launch
    after_step(worker)     measurements at the end of a step

An ordinary strategy defines ``name``, ``averages`` and ``due``. ``LocalSGD`` is the shortest
example, and docs/writing-a-strategy.md explains the order of the calls.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


# -- what is averaged ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outer:
    """A Nesterov step of the shared model P along the mean update D.

        v ← μ·v + D
        P ← P + η·(D + μ·v)

    Attributes:
        lr: η > 0.
        momentum: μ in [0, 1). With 0 no v is kept.
        dtype: Dtype in which P and v are kept, such as "bfloat16". None: the dtype in which the
            parameters are summed.
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
    """The workers average models. P is the shared model, the same bits on all workers.

    P is cut into parts. A worker *launches* a part: the mean D of the workers' updates of that part
    starts to travel. It *lands* later: P moves by an outer step along D, and the worker's model
    moves by the same difference, so the local steps since the launch are kept.

    Attributes:
        parts: Number of parts (≥ 1), or a function that computes it from the bytes of the model.
            Under ``fully_shard`` the function gets the bytes of the largest shard.
        lands: When a part lands. 0: before the next step, so workers wait. k > 0: k local steps
            after the launch, at the latest before the same part is launched again. "arrived": at
            the first step boundary after its arrival.
        bound: With "arrived": a worker waits once its last landed launch is this many local steps
            old.
        outer: The step of P.
        error_feedback: The quantization error of an update stays in the local model, as part of
            x − P, and is sent again with the next launch. Parts are then cut by bytes, through
            tensors if need be; otherwise they consist of whole tensors. With outer momentum the
            flow asks ``outer_step`` for μ and the gain of each launch.
        optimizer_state: Average the optimizers' state whenever the last part lands. Requires
            ``lands=0``.
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

    @property
    def blocking(self) -> bool:
        """True if workers wait for each mean before their next step."""
        return self.lands == 0

    @property
    def eager(self) -> bool:
        """True if parts land when they have arrived, so results depend on the network's timing."""
        return self.lands == "arrived"


@dataclass(frozen=True)
class Gradients:
    """The workers average gradients before the optimizer's step.

    Attributes:
        every_step: Gradients are averaged in every step. Buckets then leave during backward, and
            the vote travels in the last one. Otherwise votes are exchanged first, and ``decide``
            says whether the gradients are averaged.
    """

    every_step: bool = True


@dataclass(frozen=True)
class CustomFlow:
    """An algorithm that is neither of the two, such as a parameter server or gossip.

    It brings a flow of its own, and with it no quantization, nodes, ``fully_shard``, elastic
    membership or exclusion of non-finite workers; ``attach`` refuses these.

    Attributes:
        make: Called with the strategy and the ``offbeat.averaging.Worker``; returns the flow.
    """

    make: Callable[[Any, Any], Any]


# -- rounds ----------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """What a round has decided.

    Attributes:
        parts: Number of parts to launch, the next ones in turn. ``inf``: all parts. 0: none.
        precision: Precision of these parts. None: the ``wire`` given to ``attach``.
    """

    parts: float = math.inf
    precision: Precision | None = None


class Tally:
    """The sums over all workers of a round. Reading an attribute blocks until they have arrived.

    A strategy with a fixed schedule never reads them in ``decide``, so that no worker waits.

    Attributes:
        stepping: Number of workers that take a step in this round.
        wanted: Sum of ``due`` over the workers that take a step.
        votes: Sums of the numbers that the workers voted, in their order.
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


# -- what a strategy remembers and sees ------------------------------------------------------------


def common(**options: Any) -> Any:
    """A field of ``state()`` that is equal on all workers.

    A new view copies it from the most advanced worker. ``options`` are those of
    ``dataclasses.field``.
    """
    return field(metadata={"common": True}, **options)


def local(**options: Any) -> Any:
    """A field of ``state()`` that belongs to one worker, which keeps it in a new view.

    Fields without a mark are saved in checkpoints and start again in a new view. ``transient()``
    fields are not saved either.
    """
    return field(metadata={"local": True}, **options)


@dataclass(kw_only=True)
class WorkerView:
    """What a strategy sees of the worker it runs on. The flow keeps it up to date.

    Values marked *common* are equal on all workers of a view, provided that the workers take
    equally many steps; ``decide`` must not depend on any other.

    Attributes:
        rank: Number of this worker.
        size: Number of workers (common).
        step: Local steps, the current one included.
        start_step: Step at which the current view began (common).
        stepping: True if this worker takes a step in the current round. False once it has run out
            of data or waits in a consensus.
        state: The value that ``state()`` returned.
        count: Number of parts (common).
        launches: Parts launched in this view.
        landings: Parts landed in this view.
        rounds: Rounds decided since the last one that launched something (common).
        launch_step: Local step of the last launch.
        in_flight_steps: Local step at the launch of each part in flight, the oldest first.
        ready: True if the next part in turn is not in flight.
        gradient_norm_squared: ‖g‖² of the current step before clipping, summed over the optimizers
            that a vote covers. Measured if the strategy sets ``gradient_norm``.
        sent_squared: ‖u‖² of the updates that landed, exponentially smoothed over five passes of
            the model. Maintained with error feedback, as is the next.
        mean_squared: ‖D‖², smoothed alike.
        clock: Seconds on this worker's clock at the current step boundary; equal inside a node.
            Maintained for ``lands="arrived"``, as is the next.
        spent: Seconds spent on each launch and landing since the last step boundary, waiting
            excluded.
        precision: Precision of the wire (common). None: ``decide`` chooses it for each launch.
        bits: Bits that each number of an update costs at each precision (common).
        two_stages: Precisions at which a sum takes a second message (common).
        record: Values for the telemetry record of this step.
        details: Totals for ``Stats.details``.
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
        """Local steps since the last launch. Not common."""
        return self.step - self.launch_step

    @property
    def ages(self) -> list[int]:
        """Local steps since the launch of each part in flight, the oldest first."""
        return [self.step - launched for launched in self.in_flight_steps]


# -- the contract ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategy(ABC):
    """When workers synchronize, and whether any worker waits."""

    name: ClassVar[str] = ""
    """Short name in the text form. Custom strategies are named by module and class."""

    gradient_norm: ClassVar[bool] = False
    """Measure ‖g‖² in every step, before gradients are clipped."""

    @property
    def default_wire(self) -> Precision:
        """The ``wire`` of ``attach`` if none is given."""
        return "float32"

    @property
    def tally_delay(self) -> int:
        """With 1, ``decide`` gets the tally of the round before, so that no worker waits for it."""
        return 0

    def __post_init__(self) -> None:
        check_settings(self)

    @abstractmethod
    def averages(self) -> SharedModel | Gradients | CustomFlow:
        """What is averaged, and when the mean takes effect. Holds no resources."""

    def due(self, worker: WorkerView) -> float:
        """0: no round after this step. Otherwise the number of parts this worker would launch.

        With ``lands="arrived"`` every worker starts a round when it likes, and the round is decided
        once all have; the next one starts after its parts were launched. Otherwise the workers that
        step must agree, as a fixed schedule does.
        """
        return 1.0

    def state(self, worker: WorkerView) -> object | None:
        """The mutable state: a dataclass whose fields are plain values. None: there is none.

        Called when a view begins. Mark its fields with ``common``, ``local`` or ``transient``.
        """
        return None

    def vote(self, worker: WorkerView) -> tuple[float, ...]:
        """Numbers that are summed over the workers in a round; always equally many.

        Called once a round on every worker, also where ``worker.stepping`` is False.
        """
        return ()

    def decide(self, worker: WorkerView, tally: Tally) -> Launch:
        """What the round launches. Must give the same on all workers: depend on common values."""
        return Launch()

    def outer_step(self, worker: WorkerView, part: int, tally: Tally) -> tuple[float, float]:
        """μ and a of the launch of ``part``, for v ← μ·v + D and P ← P + η·(D + a·v).

        Called once for each launch when it is about to land, with the tally of its round. Only with
        ``error_feedback`` and outer momentum. Must give the same on all workers.
        """
        raise NotImplementedError

    def after_step(self, worker: WorkerView) -> None:  # noqa: B027
        """A local step has ended, and the parts that were due have landed."""

    # -- text ------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """The constructor call with the settings that differ from the defaults."""
        shown = ", ".join(f"{k}={v!r}" for k, v in self._settings().items())
        return f"{type(self).__name__}({shown})"

    def __str__(self) -> str:
        """The short text form that ``parse_strategy`` reads, such as ``local:period=8``."""
        shown = ",".join(f"{k}={_as_text(v)}" for k, v in self._settings().items())
        name = self.name or f"{type(self).__module__}:{type(self).__qualname__}"
        return f"{name}:{shown}" if shown else name

    def _settings(self) -> dict[str, Any]:
        return {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if getattr(self, one.name) != one.default
        }


def _as_text(value: object) -> str:
    """A setting as ``parse_strategy`` reads it: a tuple as ``a/b/c``, a tuple of one as ``a/``."""
    if not isinstance(value, tuple):
        return str(value)
    return "/".join(map(str, value)) + ("/" if len(value) == 1 else "")
