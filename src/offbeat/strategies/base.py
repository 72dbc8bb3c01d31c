"""The contract between a strategy and the front door, and the round protocol they share.

A strategy is a frozen set of hyper-parameters with four methods that ``attach`` calls:

    start(worker)        once; returns the strategy's mutable state, kept in ``worker.state``
    before_step(worker)  gradients are ready, parameters have not moved (once per optimizer)
    after_step(worker)   every optimizer has stepped; returns whether workers synchronized
    answer(worker, …)    this worker takes no step, the others still may: take part with weight 0
    consensus(worker, roll) everybody is here: show the mean of all models
    drain(worker, roll)     everybody has finished: leave all workers with the same model

Rounds. Every synchronization begins with a *roll*: a sum over a few numbers of every worker. It
tells how many workers are still stepping, so a worker that has run out of data keeps answering
until all have, and workers may take different numbers of steps.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offbeat.fabric import Communicator, Completed, Handle, Wire
from offbeat.replica import Kind, Replica, unpack
from offbeat.strategies.optimizer_state import OptimizerState


@dataclass(frozen=True)
class Roll:
    """What every worker of a round put in, summed.

    Attributes:
        weight: Total weight of a mean of models: workers with own steps since the last one.
        stepping: Workers that take a step in this round; 0 once all have arrived.
        finishing: Workers inside ``finish``.
        flag: Workers that ask for a synchronization.
        measure: Sum of a number of the strategy's own.
        own_weight: What this worker put into ``weight``.
    """

    weight: float
    stepping: int
    finishing: int
    flag: int
    measure: float
    own_weight: float

    SLOTS: ClassVar[int] = 5

    @classmethod
    def read(cls, sums: Sequence[float], own_weight: float) -> "Roll":
        """A roll from the summed numbers of ``Worker.roll_values``."""
        weight, stepping, finishing, flag, measure = sums
        return cls(weight, round(stepping), round(finishing), round(flag), measure, own_weight)


@dataclass
class Part:
    """One optimizer and those of the model's parameters that it moves."""

    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]

    def gradients(self) -> list[Tensor]:
        """The gradients that are there now."""
        return [p.grad for p in self.parameters if p.grad is not None]


class Worker:
    """What a strategy sees of the worker it runs on.

    Attributes:
        fabric: The communicator.
        wire: Sums over the workers at the precision of the wire.
        replica: The model's tensors.
        optimizer_state: Averages the optimizers' state; None leaves it local.
        parts: One for each optimizer.
        part: Index of the optimizer that is about to step (in ``before_step``).
        completes_iteration: Whether it is the last one of this iteration.
        step: Iterations completed before this one.
        steps_since_sync: Own iterations since the models were last averaged.
        has_news: Whether this worker's model holds steps that no mean of models has seen.
        record: Numbers for this iteration's telemetry record.
        details: Totals of the strategy's own, shown as ``Stats.details``.
        state: What the strategy's ``start`` returned.
    """

    def __init__(
        self, fabric: Communicator, replica: Replica, parts: list[Part], wire: Wire | None = None
    ) -> None:
        self.fabric, self.replica, self.parts = fabric, replica, parts
        self.wire = Wire(fabric) if wire is None else wire
        self.optimizer_state: OptimizerState | None = None
        self.references: list[Tensor] = []  # the last mean of the models, with a lossy wire
        self.part = 0
        self.completes_iteration = False
        self.step = 0
        self.steps_since_sync = 0
        self.has_news = False
        self.norm_squared: float | None = None  # of this iteration's gradients, if measured
        self.record: dict[str, Any] = {}
        self.details: dict[str, Any] = {}
        self.state: Any = None

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.fabric.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.fabric.size

    def roll_values(
        self,
        *,
        stepping: bool,
        finishing: bool = False,
        flag: bool = False,
        measure: float = 0.0,
        weight: float | None = None,
    ) -> list[float]:
        """This worker's numbers for a roll: weight, stepping, finishing, flag, measure.

        Unless given, the weight is 1 for a worker that steps or has news, else 0.
        """
        if weight is None:
            weight = float(stepping or self.has_news)
        return [weight, stepping, finishing, flag, measure]

    def call_roll(
        self,
        *,
        stepping: bool,
        finishing: bool = False,
        flag: bool = False,
        measure: float = 0.0,
        weight: float | None = None,
    ) -> Handle[Roll]:
        """Start a roll; the arguments are those of ``roll_values``."""
        values = self.roll_values(
            stepping=stepping, finishing=finishing, flag=flag, measure=measure, weight=weight
        )
        if self.size == 1:
            return Completed(Roll.read(values, values[0]))
        tensor = torch.tensor(values, dtype=torch.float64, device=self.fabric.control_device)
        handle = self.fabric.sum(tensor, what=f"flag exchange at step {self.step}")
        return handle.then(lambda sums: Roll.read(sums.tolist(), values[0]))

    def keep_reference(self) -> None:
        """Prepare for means over a lossy wire; all workers hold the same model now.

        What then travels is how far the models have moved from the last mean.
        """
        if self.size > 1 and not self.wire.exact:
            self.references = [b.pack().clone() for b in self.replica.buckets("parameters")]

    def wire_state(self) -> dict[str, Any]:
        """What a lossy wire keeps between means, as plain values."""
        return {
            "precision": self.wire.precision,
            "errors": self.wire.state_dict(),
            "references": [reference.clone() for reference in self.references],
        }

    def load_wire_state(self, state: dict[str, Any]) -> None:
        """Continue from ``wire_state()``.

        Raises:
            ValueError: it is that of another precision.
        """
        if state["precision"] != self.wire.precision:
            raise ValueError(
                f"the state was saved with wire={state['precision']!r}, this is "
                f"wire={self.wire.precision!r}"
            )
        self.wire.load_state_dict(state["errors"])
        for reference, saved in zip(self.references, state["references"], strict=True):
            reference.copy_(saved)

    def average(
        self,
        roll: Roll,
        *,
        buffers_only: bool = False,
        exact: bool = False,
        lean: bool = False,
        take: bool = True,
        what: str = "mean",
    ) -> None:
        """x ← Σ w·x / Σ w over the workers, with the weights of ``roll``.

        Parameters and floating-point buffers are averaged (half types in float32), integer
        buffers take the maximum. Afterwards all workers hold the same bits. When nobody has news
        nothing is sent: the models are already the same.

        Args:
            roll: The weights.
            buffers_only: Leave the parameters alone.
            exact: Send float32 whatever the wire.
            lean: Stage few buckets at a time and keep no staging memory afterwards.
            take: False keeps this worker's own model.
            what: Names the operation in errors.
        """
        if roll.weight == 0:
            return
        if self.size > 1:
            what = f"{what} of the model at step {self.step}"
            lossy = bool(self.references) and not exact and not buffers_only
            if lossy:
                self._average_lossy(roll, take=take, what=what)
            kind: Kind = "buffers" if lossy or buffers_only else "averaged"
            buckets = self.replica.buckets(kind)
            ahead = 2 if lean else len(buckets)
            handles: list[Handle[Tensor]] = []
            for i in range(len(buckets) + ahead):
                if i >= ahead:
                    handles.pop(0).wait()
                    if take:
                        buckets[i - ahead].unpack(roll.weight)
                    if lean:
                        buckets[i - ahead].release()
                if i < len(buckets):
                    handles.append(self.fabric.sum(buckets[i].pack(roll.own_weight), what=what))
            self._maximum_of_integers(what, take=take)
        if not exact and not buffers_only:
            self.average_optimizer_state(roll, take=take)
        if take:
            self.steps_since_sync = 0
            self.has_news = False

    def average_optimizer_state(self, roll: Roll, *, take: bool = True) -> None:
        """The mean of the optimizers' state with the weights of ``roll``, if the user wants it."""
        if self.optimizer_state is not None and self.size > 1 and roll.weight:
            self.optimizer_state.average(roll.own_weight, roll.weight, take=take)

    def _average_lossy(self, roll: Roll, *, take: bool, what: str) -> None:
        """The parameters' mean by its distance from the last one, r: r ← r + Σ w·(x − r) / Σ w."""
        buckets, handles = self.replica.buckets("parameters"), []
        for i, (bucket, reference) in enumerate(zip(buckets, self.references, strict=True)):
            flat = bucket.pack(roll.own_weight)
            if roll.own_weight:
                flat.sub_(reference, alpha=roll.own_weight)
            handles.append(
                self.wire.sum(flat, stream=f"model {i}", what=what, contribute=roll.own_weight != 0)
            )
        for bucket, reference, handle in zip(buckets, self.references, handles, strict=True):
            reference.add_(handle.wait(), alpha=1 / roll.weight)
            if take:
                unpack(reference, bucket.tensors)

    def _maximum_of_integers(self, what: str, *, take: bool) -> None:
        integers = self.replica.integer_buffers()
        if not integers:
            return
        device = self.fabric.control_device
        flat = torch.cat([t.detach().reshape(-1).to(device, torch.int64) for t in integers])
        largest = self.fabric.maximum(flat, what=what).wait()
        if not take:
            return
        for tensor, values in zip(
            integers, largest.split([t.numel() for t in integers]), strict=True
        ):
            tensor.copy_(values.view(tensor.shape))


def transient(**options: Any) -> Any:
    """A field of a strategy's state that no checkpoint holds: handles, buffers, hooks."""
    return field(metadata={"transient": True}, **options)


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategy(ABC):
    """When workers synchronize, and whether anyone waits."""

    name: ClassVar[str]
    needs_unscaled: ClassVar[bool] = True
    """Whether ``before_step`` must see gradients after a GradScaler has unscaled them."""
    averages: ClassVar[bool] = True
    """Whether workers average anything, so that ``wire`` applies."""

    @property
    def averages_state(self) -> bool:
        """Whether ``optimizer_state="average"`` applies: all wait while models are averaged."""
        return False

    @abstractmethod
    def start(self, worker: Worker) -> Any:
        """Prepare; all workers hold the same model. Returns the mutable state, a dataclass."""

    @abstractmethod
    def before_step(self, worker: Worker) -> None:
        """The gradients of ``worker.parts[worker.part]`` are ready; it has not stepped yet."""

    def after_part(self, worker: Worker) -> None:  # noqa: B027 - most look at the end only
        """``worker.parts[worker.part]`` has stepped; its gradients are still there."""

    @abstractmethod
    def after_step(self, worker: Worker) -> bool:
        """All optimizers have stepped. Returns whether this iteration synchronized."""

    @abstractmethod
    def answer(self, worker: Worker, *, finishing: bool) -> Roll | None:
        """Take part in one round without a step.

        Returns:
            The roll that says whether anyone still steps; None when it is not known yet.
        """

    def consensus(self, worker: Worker, roll: Roll) -> None:
        """Everyone has arrived (``roll.stepping == 0``): put the mean of all into the model.

        The front door puts the worker's own model back afterwards.
        """
        worker.average(roll, exact=True, what="consensus")

    def drain(self, worker: Worker, roll: Roll) -> None:
        """Everyone has finished: settle what is in flight and leave all models equal."""
        self.consensus(worker, roll)

    def settle(self, worker: Worker) -> None:  # noqa: B027 - most keep nothing in flight
        """Wait until what is in flight has arrived, so that the state can be saved."""

    def resume(self, worker: Worker) -> None:  # noqa: B027 - likewise
        """The state was loaded."""

    def stop(self, worker: Worker) -> None:  # noqa: B027 - most strategies hold nothing
        """Release hooks. Not a collective; also called after a failure."""

    def __repr__(self) -> str:
        """The constructor call with the settings that differ from the defaults."""
        shown = ", ".join(f"{k}={v!r}" for k, v in self._settings().items())
        return f"{type(self).__name__}({shown})"

    def __str__(self) -> str:
        """The short text form that ``parse_strategy`` reads, such as ``local:period=8``."""
        shown = ",".join(f"{k}={_as_text(v)}" for k, v in self._settings().items())
        return f"{self.name}:{shown}" if shown else self.name

    def _settings(self) -> dict[str, Any]:
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


def _as_text(value: object) -> str:
    """A setting as ``parse_strategy`` reads it: a tuple as ``a/b/c``, of one number as ``a/``."""
    if not isinstance(value, tuple):
        return str(value)
    return "/".join(map(str, value)) + ("/" if len(value) == 1 else "")


def require_integer(name: str, value: object, *, least: int) -> None:
    """Raise unless ``value`` is an int ≥ ``least``.

    Raises:
        TypeError: it is not an int.
        ValueError: it is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def require_number(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a real number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
