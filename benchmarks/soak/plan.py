"""The plan: everything about a fault follows from the seed and the number of the fault."""

import random
from dataclasses import dataclass

STEPS = 12
"""Usual number of steps of a run."""

REPEATABLE = (
    "bsp",
    "local:period=2",
    "selsync:delta=0.3",
    "selsync:delta=0.3,aggregate=gradients",
    "diloco:period=3",
    "diloco:period=4,fragments=2,overlap=1",
    "async:staleness=4",
    "async:staleness=4,outer_momentum=0.5,outer_lr=0.7",
    "streaming:parts=2,schedule=cyclic,staleness=4",
)
"""Strategies whose runs are the same bit for bit."""
EAGER = (
    "async:staleness=4,schedule=eager",
    "streaming:staleness=8",
    "streaming:parts=3,staleness=4,outer_gain=1",
)
STRATEGIES = (*REPEATABLE, *EAGER)
WIRES = ("float32", "float32", "bfloat16", "int8", "int4")

KINDS = {
    "kill": 5,
    "terminate": 1,
    "stop": 3,
    "pause": 2,
    "slow": 2,
    "exception": 3,
    "detach": 2,
    "interrupt": 3,
    "not finite": 3,
    "unplug": 2,
    "kill in save": 4,
    "kill all in save": 2,
    "kill in load": 2,
    "kill before attach": 1,
}
"""Kind of a fault → relative frequency, where training ends with a failure."""

CONTINUING = (*STRATEGIES, "diloco:period=3,outer_lr=1,outer_momentum=0")
"""Strategies that continue without a lost worker."""
CONTINUING_KINDS = {
    "kill": 5,
    "terminate": 1,
    "kill at end": 3,
    "kill two": 3,
    "kill in change": 4,
    "stop in change": 2,
    "below minimum": 2,
    "stop": 3,
    "pause": 1,
    "slow": 1,
    "exception": 2,
    "detach": 1,
    "interrupt": 2,
    "unplug": 2,
    "join": 2,
    "kill and join": 3,
    "kill newcomer": 3,
}
"""The same, where training continues."""

BY_ITSELF = ("exception", "detach", "slow", "not finite")
"""Kinds that a worker injects into itself."""

WITH_NEWCOMER = ("join", "kill and join", "kill newcomer")
"""Kinds in which a newcomer joins."""

SAVING = ("kill in save", "kill all in save", "kill in load")
"""Kinds that need checkpoints."""


@dataclass(frozen=True)
class Case:
    """One fault, and the training in which it happens.

    Attributes:
        index: Number of the fault.
        kind: Kind of the fault, a key of ``KINDS`` or ``CONTINUING_KINDS``.
        strategy: Strategy as text.
        wire: Argument of ``attach``.
        workers: Number of workers at the start.
        victim: Rank of the worker that the fault happens to.
        step: Local steps of the victim before the fault.
        delay_seconds: Time from that step to a fault from outside.
        elements: Approximate number of parameters.
        shaped_bits: Bandwidth of the links in bits a second; 0 for loopback.
        own_store: True if rank 0 serves the store of the process group. Otherwise it is in a file,
            or in a process of its own.
        lingers: True if a survivor lives until all have noticed; otherwise it ends at once.
        timeout_seconds: Argument of ``attach``.
        non_finite: Argument of ``attach``.
        seed: Seed of the gradients and step times.
        policy: Name of the policy: ``stop`` or ``continue``.
        steps: Steps of each worker.
        step_seconds: Longest computing time of a step; the shortest is a fifth.
        keeper: True if a process of its own, without faults, serves the store.
        min_workers: Argument of ``attach``.
        second: Rank of a second worker that is killed or stopped; −1 if there is none.
        second_delay_seconds: Time from the first event to the second: the fault of the second
            worker, the join of the newcomer, or its death. For an unresponsive worker it is the
            time from the others' continuing to its return.
        returns: True if an unresponsive worker returns while the others train; otherwise it
            returns afterwards.
    """

    index: int
    kind: str
    strategy: str
    wire: str
    workers: int
    victim: int
    step: int
    delay_seconds: float
    elements: int
    shaped_bits: float
    own_store: bool
    lingers: bool
    timeout_seconds: float
    non_finite: str
    seed: int
    policy: str = "stop"
    steps: int = STEPS
    step_seconds: float = 0.01
    keeper: bool = False
    min_workers: int = 1
    second: int = -1
    second_delay_seconds: float = 0.0
    returns: bool = False

    @property
    def continues(self) -> bool:
        """True if training continues after a loss."""
        return self.policy == "continue"

    @property
    def counts(self) -> bool:
        """True if the model counts steps; a quantized wire would need equal numbers."""
        return self.continues and self.wire == "float32"

    @property
    def kills(self) -> bool:
        """True if a process dies of the fault."""
        return "kill" in self.kind or self.kind in ("terminate", "below minimum", "stop in change")

    @property
    def silent(self) -> int:
        """Rank of the worker that is stopped or cut off; −1 if there is none."""
        if self.kind == "stop in change":
            return self.second
        return self.victim if self.kind in ("stop", "unplug") else -1

    @property
    def newcomers(self) -> int:
        """Number of newcomers; their ranks follow those of the workers."""
        return int(self.kind in WITH_NEWCOMER)

    @property
    def victims(self) -> frozenset[int]:
        """Ranks that the fault happens to."""
        if self.kind == "kill all in save":
            return frozenset(range(self.workers))
        if self.kind == "kill newcomer":
            return frozenset({self.workers})
        if self.kind == "join":
            return frozenset()
        return frozenset({self.victim, self.second} - {-1})

    @property
    def repeatable(self) -> bool:
        """True if two runs without a fault end with the same bits."""
        return self.strategy in REPEATABLE

    @property
    def name(self) -> str:
        """Short description."""
        where = f"{self.shaped_bits / 1e6:g} Mbit/s" if self.shaped_bits else "loopback"
        return (
            f"{self.policy}: {self.kind} of rank {self.victim} of {self.workers} at step "
            f"{self.step}, {self.strategy} --wire {self.wire}, {where}"
        )


def case(seed: int, index: int, *, shaped: bool, policy: str = "stop") -> Case:
    """Return fault number ``index`` of ``seed``, the same each time.

    Args:
        seed: Seed of the plan.
        index: Number of the fault, from 0.
        shaped: True if links can be shaped here. Otherwise all faults run over loopback, and a cut
            link becomes a stopped worker.
        policy: ``stop`` or ``continue``.
    """
    return (_continuing if policy == "continue" else _stopping)(seed, index, shaped=shaped)


def _shape(kind: str, rate: float, shaped: bool) -> tuple[str, float]:
    """Return kind and bandwidth on this machine; a cut link needs a shaped one."""
    if kind == "unplug":
        kind, rate = ("unplug", rate or 100e6) if shaped else ("stop", rate)
    return kind, rate if shaped else 0.0


def _stopping(seed: int, index: int, *, shaped: bool) -> Case:
    draw = random.Random(f"soak {seed} {index}")
    kind = draw.choices(list(KINDS), weights=list(KINDS.values()))[0]
    workers = draw.choice((2, 3, 3, 4))
    strategy = draw.choice(STRATEGIES)
    wire = draw.choice(WIRES)
    victim = draw.randrange(workers)
    rate = draw.choice((0.0, 0.0, 0.0, 20e6, 100e6))
    step, delay = draw.randrange(1, 6), draw.uniform(0, 0.2 if rate else 0.06)
    own_store, lingers, small = (draw.random() < p for p in (0.3, 0.5, 0.6))
    # Three choices, because a seed must keep the faults that were recorded with it.
    non_finite = draw.choice(("warn", "raise", "raise"))
    kind, rate = _shape(kind, rate, shaped)
    return Case(
        index,
        kind,
        strategy,
        wire,
        workers,
        victim,
        step,
        delay,
        elements=1_000 if small else 30_000,
        shaped_bits=rate,
        own_store=own_store and not rate,
        lingers=lingers,
        timeout_seconds=2.0 if kind in ("stop", "unplug", "kill before attach") else 8.0,
        non_finite=non_finite if kind == "not finite" else "warn",
        seed=draw.randrange(2**31),
    )


def _continuing(seed: int, index: int, *, shaped: bool) -> Case:
    draw = random.Random(f"soak continue {seed} {index}")
    kind = draw.choices(list(CONTINUING_KINDS), weights=list(CONTINUING_KINDS.values()))[0]
    workers = draw.choice((2, 3, 3, 4))
    two = kind in ("kill two", "kill in change", "stop in change")
    workers = max(3, workers) if two else workers
    strategy = draw.choice(CONTINUING)
    wire = draw.choice(WIRES)
    victim, second = draw.sample(range(workers), 2)
    rate = draw.choice((0.0, 0.0, 0.0, 20e6, 100e6))
    step, delay = draw.randrange(1, 6), draw.uniform(0, 0.2 if rate else 0.06)
    keeper, own_store, lingers, small, returns = (
        draw.random() < p for p in (0.6, 0.2, 0.5, 0.6, 0.7)
    )
    later = draw.uniform(0, 1)
    if kind == "kill at end":
        step, delay = STEPS - 1, later * (0.15 if rate else 0.04)
    kind, rate = _shape(kind, rate, shaped)
    silent = kind in ("stop", "unplug", "stop in change")
    # A cut link also cuts the worker off from the store, as on a network of machines.
    keeper = keeper or kind == "unplug"
    left = workers - (2 if two else kind not in ("pause", "slow", "join", "kill newcomer"))
    if kind == "kill two":
        later *= 0.01
    step_seconds = 0.1 if kind in WITH_NEWCOMER or silent else 0.03 if two else 0.01
    return Case(
        index,
        kind,
        strategy,
        wire,
        workers,
        victim,
        step,
        delay,
        elements=1_000 if small else 30_000,
        shaped_bits=rate,
        own_store=own_store and not keeper and not rate and not silent,
        lingers=lingers,
        timeout_seconds=2.0 if silent else 8.0,
        non_finite="warn",
        seed=draw.randrange(2**31),
        policy="continue",
        steps=40 if kind in WITH_NEWCOMER else 24 if silent or two else STEPS,
        step_seconds=step_seconds,
        keeper=keeper,
        min_workers=workers if kind == "below minimum" else draw.choice((1, 1, left)),
        second=second if two else -1,
        second_delay_seconds=later * (1.8 if kind == "kill newcomer" else 0.3),
        returns=returns,
    )
