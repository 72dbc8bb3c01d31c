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
"""Kind of a fault → relative frequency."""

BY_ITSELF = ("exception", "detach", "slow", "not finite")
"""Kinds that a worker injects into itself."""

SAVING = ("kill in save", "kill all in save", "kill in load")
"""Kinds that need checkpoints."""


@dataclass(frozen=True)
class Case:
    """One fault, and the training in which it happens.

    Attributes:
        index: Number of the fault.
        kind: Kind of the fault, a key of ``KINDS``.
        strategy: Strategy as text.
        wire: Argument of ``attach``.
        workers: Number of workers at the start.
        victim: Rank of the worker that the fault happens to.
        step: Local steps of the victim before the fault.
        delay_seconds: Time from that step to a fault from outside.
        elements: Approximate number of parameters.
        shaped_bits: Bandwidth of the links in bits a second; 0 for loopback.
        own_store: True if rank 0 serves the store of the process group. Otherwise it is a file.
        lingers: True if a survivor lives until all have noticed; otherwise it ends at once.
        timeout_seconds: Argument of ``attach``.
        non_finite: Argument of ``attach``.
        seed: Seed of the gradients and step times.
        steps: Steps of each worker.
        step_seconds: Longest computing time of a step; the shortest is a fifth.
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
    steps: int = STEPS
    step_seconds: float = 0.01

    @property
    def kills(self) -> bool:
        """True if a process dies of the fault."""
        return "kill" in self.kind or self.kind == "terminate"

    @property
    def silent(self) -> int:
        """Rank of the worker that is stopped or cut off; −1 if there is none."""
        return self.victim if self.kind in ("stop", "unplug") else -1

    @property
    def victims(self) -> frozenset[int]:
        """Ranks that the fault happens to."""
        if self.kind == "kill all in save":
            return frozenset(range(self.workers))
        return frozenset({self.victim})

    @property
    def repeatable(self) -> bool:
        """True if two runs without a fault end with the same bits."""
        return self.strategy in REPEATABLE

    @property
    def name(self) -> str:
        """Short description."""
        where = f"{self.shaped_bits / 1e6:g} Mbit/s" if self.shaped_bits else "loopback"
        return (
            f"{self.kind} of rank {self.victim} of {self.workers} at step "
            f"{self.step}, {self.strategy} --wire {self.wire}, {where}"
        )


def _shape(kind: str, rate: float, shaped: bool) -> tuple[str, float]:
    """Return kind and bandwidth on this machine; a cut link needs a shaped one."""
    if kind == "unplug":
        kind, rate = ("unplug", rate or 100e6) if shaped else ("stop", rate)
    return kind, rate if shaped else 0.0


def case(seed: int, index: int, *, shaped: bool) -> Case:
    """Return fault number ``index`` of ``seed``, the same each time.

    Args:
        seed: Seed of the plan.
        index: Number of the fault, from 0.
        shaped: True if links can be shaped here. Otherwise all faults run over loopback, and a cut
            link becomes a stopped worker.
    """
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
