"""Which fault comes next: everything about it follows from the seed and its number."""

import random
from dataclasses import dataclass

STEPS = 12
"""Of each run."""

# Of each the run is the same in every repetition, bit for bit.
REPEATABLE = (
    "bsp",
    "local:period=2",
    "fedavg:period=2,fraction=0.5",
    "fedavg:period=3,fraction=0.5,unselected=restart",
    "selsync:delta=0.3",
    "selsync:delta=0.3,aggregate=gradients",
    "diloco:period=3",
    "diloco:period=4,fragments=2,overlap=1",
    "async:staleness=4",
    "async:staleness=4,outer_momentum=0.5,outer_lr=0.7",
    "streaming:parts=2,schedule=cyclic,staleness=4",
)
EAGER = (
    "async:staleness=4,schedule=eager",
    "streaming:staleness=8",
    "streaming:parts=3,staleness=4,outer_gain=1",
)
SERVERS = (
    "ssp:staleness=2",
    "ssp:staleness=2,servers=0/",
    "downpour",
    "downpour:servers=0/",
    "easgd:period=2",
    "easgd:period=2,synchronous=true,alpha=0.2,servers=0/",
)
STRATEGIES = (*REPEATABLE, *EAGER, *SERVERS)
BASELINES = tuple(one for one in STRATEGIES if one.startswith("fedavg")) + SERVERS
"""Strategies with exact messages and a fixed number of workers."""
WIRES = ("float32", "float32", "bfloat16", "int8", "int4")

KINDS = {
    "kill": 5,
    "terminate": 1,
    "kill server": 2,
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
"""What happens, and how often beside the others."""

CONTINUING = (
    *(one for one in STRATEGIES if one not in BASELINES),
    "diloco:period=3,outer_lr=1,outer_momentum=0",
)
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
"""Likewise, where training goes on."""

BY_ITSELF = ("exception", "detach", "slow", "not finite")
"""What a worker does; the others are done to it."""

JOINING = ("join", "kill and join", "kill newcomer")
"""In which a worker more comes."""

SAVING = ("kill in save", "kill all in save", "kill in load")


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        index: Its number.
        kind: A key of ``KINDS``.
        strategy: As text.
        wire: Of ``attach``.
        workers: How many processes.
        victim: The rank to which it happens.
        step: Own steps that the victim has taken then.
        delay_seconds: From that step on, where somebody else does it to the victim.
        elements: Numbers of the model, about.
        shaped_bits: Rate of the links; 0: loopback.
        own_store: Whether rank 0 keeps the process group's store, else a file is it, or ``keeper``.
        lingers: Whether a survivor lives on until all have noticed; else it ends at once.
        timeout_seconds: Of ``attach``.
        non_finite: Of ``attach``.
        seed: Of the gradients and of the time that steps take.
        policy: What must hold; where training goes on, the workers attach for that.
        steps: Of each worker.
        step_seconds: How long one takes at most, without what is exchanged; a fifth at least.
        keeper: Whether a process that nothing happens to keeps the store.
        min_workers: Of ``attach``.
        second: The other rank that is killed, or stopped; −1: none.
        second_delay_seconds: From the first thing that happens to the second: to the other rank,
            or the newcomer's coming or its death; or from when the others have gone on without one
            that is silent to its return.
        returns: Whether one that was silent returns while the others train on; else afterwards.
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
        """Whether training goes on after a loss."""
        return self.policy == "continue"

    @property
    def counts(self) -> bool:
        """Whether the model counts steps; numbers that are rounded together must be alike."""
        return self.continues and self.wire == "float32"

    @property
    def kills(self) -> bool:
        """Whether a process dies of it."""
        return "kill" in self.kind or self.kind in ("terminate", "below minimum", "stop in change")

    @property
    def silent(self) -> int:
        """The rank that is stopped or cut off, and lives; −1: none."""
        if self.kind == "stop in change":
            return self.second
        return self.victim if self.kind in ("stop", "unplug") else -1

    @property
    def newcomers(self) -> int:
        """How many come later; their ranks here follow those of the workers."""
        return int(self.kind in JOINING)

    @property
    def victims(self) -> frozenset[int]:
        """The ranks to which it happens."""
        if self.kind == "kill all in save":
            return frozenset(range(self.workers))
        if self.kind == "kill newcomer":
            return frozenset({self.workers})
        if self.kind == "join":
            return frozenset()
        return frozenset({self.victim, self.second} - {-1})

    @property
    def repeatable(self) -> bool:
        """Whether two runs without a fault end with the same bits."""
        return self.strategy in REPEATABLE

    @property
    def name(self) -> str:
        """In a few words."""
        where = f"{self.shaped_bits / 1e6:g} Mbit/s" if self.shaped_bits else "loopback"
        return (
            f"{self.policy}: {self.kind} of rank {self.victim} of {self.workers} at step "
            f"{self.step}, "
            f"{self.strategy} --wire {self.wire}, {where}"
        )


def case(seed: int, index: int, *, shaped: bool, policy: str = "stop") -> Case:
    """Fault number ``index`` of ``seed``.

    Args:
        seed: Of all.
        index: From 0.
        shaped: Whether links can be shaped here; else those faults run over loopback, and what
            needs a link of its own becomes another.
        policy: What must hold.
    """
    return (_continuing if policy == "continue" else _stopping)(seed, index, shaped=shaped)


def _stopping(seed: int, index: int, *, shaped: bool) -> Case:
    draw = random.Random(f"soak {seed} {index}")
    kind = draw.choices(list(KINDS), weights=list(KINDS.values()))[0]
    workers = draw.choice((2, 3, 3, 4))
    strategy = draw.choice(SERVERS if kind == "kill server" else STRATEGIES)
    wires = list(WIRES)
    if strategy in EAGER[1:] or (strategy in REPEATABLE and "streaming" not in strategy):
        wires.append("auto")
    wire = draw.choice(wires)
    wire = "float32" if strategy in BASELINES else wire
    victim = 0 if "servers=0/" in strategy and kind == "kill server" else draw.randrange(workers)
    rate = draw.choice((0.0, 0.0, 0.0, 20e6, 100e6))
    step, delay = draw.randrange(1, 6), draw.uniform(0, 0.2 if rate else 0.06)
    own_store, lingers, small = (draw.random() < p for p in (0.3, 0.5, 0.6))
    non_finite = draw.choice(("warn", "raise", "exclude"))
    if non_finite == "exclude" and (strategy in BASELINES or "gradients" in strategy):
        non_finite = "warn"
    if kind == "unplug":
        if shaped:
            rate = rate or 100e6
        else:
            kind = "stop"
    rate = rate if shaped else 0.0
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
    wires = list(WIRES)
    if strategy in EAGER[1:] or (strategy in REPEATABLE and "streaming" not in strategy):
        wires.append("auto")
    wire = draw.choice(wires)
    victim, second = draw.sample(range(workers), 2)
    rate = draw.choice((0.0, 0.0, 0.0, 20e6, 100e6))
    step, delay = draw.randrange(1, 6), draw.uniform(0, 0.2 if rate else 0.06)
    keeper, own_store, lingers, small, returns = (
        draw.random() < p for p in (0.6, 0.2, 0.5, 0.6, 0.7)
    )
    later = draw.uniform(0, 1)
    if kind == "kill at end":
        step, delay = STEPS - 1, later * (0.15 if rate else 0.04)
    if kind == "unplug":
        if shaped:
            rate = rate or 100e6
        else:
            kind = "stop"
    rate = rate if shaped else 0.0
    silent = kind in ("stop", "unplug", "stop in change")
    # Who is cut off is cut off from the store, too, as it would be on a network of machines.
    keeper = keeper or kind == "unplug"
    left = workers - (2 if two else kind not in ("pause", "slow", "join", "kill newcomer"))
    if kind == "kill two":
        later *= 0.01
    pace = 0.1 if kind in JOINING or silent else 0.03 if two else 0.01
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
        steps=40 if kind in JOINING else 24 if silent or two else STEPS,
        step_seconds=pace,
        keeper=keeper,
        min_workers=workers if kind == "below minimum" else draw.choice((1, 1, left)),
        second=second if two else -1,
        second_delay_seconds=later * (1.8 if kind == "kill newcomer" else 0.3),
        returns=returns,
    )
