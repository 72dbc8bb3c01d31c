"""Runs of a strategy on a phantom model: of one worker where that is enough, else of all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offbeat.plan.crew import team_of, workers_for
from offbeat.plan.mirror import DivergedError, MirrorCluster
from offbeat.plan.phantom import Phantom, Shapes
from offbeat.plan.record import Record
from offbeat.plan.steps import Steps
from offbeat.plan.trainee import Trainee
from offbeat.quantization.wire import Precision
from offbeat.registry import STRATEGIES
from offbeat.simulate import Network
from offbeat.simulate.randomness import RandomState
from offbeat.simulate.workers import SimulatedWorker
from offbeat.strategies import BSP, Strategy

_FEW_WORKERS = 4  # with which a mirror run of an unknown strategy is compared with a full one
_COMPARED_STEPS, _COMPARED_MEANS = 300, 3  # at most, at least
_LEAST_COMPARED = 30  # steps
_CLOSE = 1e-9
_DRAWS = 20_000  # of a node's step with jitter, for its mean
_NODE_STEPS = 3  # all later ones are like the last

Ended = Callable[[Record], bool]


@dataclass(frozen=True)
class Setting:
    """A model on a cluster.

    Attributes:
        shapes: The model.
        workers: N.
        network: The links, with nodes of L workers.
        step_seconds: t, a step computed alone.
        jitter: Its standard deviation / t.
        lssr: Share of local steps that SelSync has.
        tail: Seconds from the end of computing to the mean of the gradients of a node.
        node_bytes: Memory for that mean.
    """

    shapes: Shapes
    workers: int
    network: Network
    step_seconds: float
    jitter: float
    lssr: float
    tail: float = 0.0
    node_bytes: float = 0.0

    @property
    def alone(self) -> bool:
        """Whether there is one worker, or one node."""
        return self.workers == self.network.workers_per_node

    @property
    def computing(self) -> float:
        """Seconds of a step that waits for nobody, on average."""
        steps = self.steps
        if steps.workers == 1 or not steps.jitter:
            return steps.seconds + steps.tail
        return float(steps.draw(np.random.default_rng(0), _DRAWS).mean()) + steps.tail

    @property
    def steps(self) -> Steps:
        """The steps of a worker, or of a node."""
        return Steps(self.step_seconds, self.jitter, self.network.workers_per_node, self.tail)


class _EnoughError(Exception):
    """The record is long enough: ends the simulated workers."""


def play(strategy: Strategy, wire: Precision, setting: Setting, ended: Ended) -> Record:
    """Run ``strategy`` until ``ended(record)``, which is asked after each step of all workers.

    Args:
        strategy: The strategy.
        wire: Its wire: a precision, or "auto" for a strategy that chooses.
        setting: Model and cluster.
        ended: True once the record is long enough. It may be asked of a second record from the
            beginning, if a mirror run turns out to differ from a full one.
    """
    workers = setting.network.workers_per_node
    every = range(0, setting.workers, workers)
    if mirrors(strategy, wire, setting):
        try:
            return run(strategy, wire, setting, every[:1], ended)
        except DivergedError:
            pass
    return run(strategy, wire, setting, every, ended)


def mirrors(strategy: Strategy, wire: Precision, setting: Setting) -> bool:
    """Whether to try a run of one worker.

    Not in nodes with jitter, which have no clocks. Strategies of this package treat all ranks
    alike; another one is taken to do so if a run of one of a few workers equals one of all.
    """
    if setting.network.workers_per_node > 1 and setting.jitter:
        return False
    if type(strategy) in STRATEGIES.values():
        return True
    few = min(_FEW_WORKERS * setting.network.workers_per_node, setting.workers)
    small = replace(setting, workers=few, jitter=0.0)
    every = range(0, few, setting.network.workers_per_node)

    def ended(record: Record) -> bool:
        steps = len(record)
        means = record.steps[-1].syncs if steps else 0
        return steps >= _COMPARED_STEPS or (means >= _COMPARED_MEANS and steps >= _LEAST_COMPARED)

    one, all_ = (run(strategy, wire, small, members, ended) for members in (every[:1], every))
    return one.agrees(all_, _CLOSE)


def run(
    strategy: Strategy,
    wire: Precision,
    setting: Setting,
    members: Sequence[int],
    ended: Ended,
    *,
    averages: bool = False,
) -> Record:
    """Run the workers ``members``, which stand for all, until ``ended``.

    Args:
        strategy: See ``play``.
        wire: Likewise.
        setting: Likewise.
        members: Worker 0, or the first worker of each node.
        ended: See ``play``.
        averages: Whether the gradients of a node are averaged in the run; else ``setting.tail``
            stands for it.

    Raises:
        DivergedError: one worker cannot stand for all.
    """
    workers = workers_for(members)
    cluster = MirrorCluster(
        workers, members, setting.workers, setting.network, setting.steps, setting.shapes.scale
    )
    record = Record(cluster, len(members), setting.step_seconds)

    def work(one: SimulatedWorker) -> None:
        team = team_of(cluster, members[one.rank], setting.workers)
        model = Phantom(setting.shapes, setting.lssr)
        trainee = Trainee(strategy, wire, team, model, averages=averages)
        record.begin(one.rank, trainee, model)
        while True:
            trainee.step()
            if record.stepped(one.rank) and ended(record):
                raise _EnoughError

    before = RandomState.current()
    try:
        workers.run(work)
    except _EnoughError:
        pass
    finally:
        before.load()
        record.close()
    return record


def in_nodes(setting: Setting) -> Setting:
    """``setting`` with the cost of the mean of gradients inside a node, where there are nodes.

    A node by itself is run for a few steps. Strategies then run with steps that take so long, so
    what they send inside a node does not queue with gradients.
    """
    workers = setting.network.workers_per_node
    if workers == 1:
        return setting
    one = replace(setting, workers=workers, jitter=0.0)

    def ended(record: Record) -> bool:
        return len(record) == _NODE_STEPS

    record = run(BSP(), "float32", one, [0], ended, averages=True)
    before, last = record.steps[-2:]
    tail = last.clock - before.clock - setting.step_seconds
    return replace(setting, tail=tail, node_bytes=float(record.memory))
