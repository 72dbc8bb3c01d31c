"""Runs of a strategy on a placeholder model: by one worker if possible, otherwise by all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offbeat.plan.cluster import DivergedError, RepresentativeCluster, StepTime, workers_for
from offbeat.plan.communicator import team_of
from offbeat.plan.placeholder_model import PlaceholderModel, PlaceholderTraining, Shapes
from offbeat.plan.record import Record
from offbeat.quantization.wire import Precision
from offbeat.registry import STRATEGIES
from offbeat.simulate import Network
from offbeat.simulate.randomness import RandomState
from offbeat.simulate.workers import SimulatedWorker
from offbeat.strategies import BSP, Strategy

_FEW_WORKERS = 4  # in the runs that check whether one worker represents all
_MOST_STEPS, _LEAST_STEPS, _LEAST_MEANS = 300, 30, 3  # of these runs
_TOLERANCE = 1e-9
_DRAWS = 20_000  # of the step of a node with jitter, for its mean
_NODE_STEPS = 3  # all later steps are like the last one

Ended = Callable[[Record], bool]


@dataclass(frozen=True)
class Setting:
    """A model on a cluster.

    Attributes:
        shapes: Sizes of the model's tensors.
        workers: Number of workers N.
        network: The links, with nodes of L workers.
        step_seconds: Compute time t of a step, seconds.
        jitter: Standard deviation of the compute time relative to t.
        lssr: Share of local steps of SelSync.
        tail: Seconds from the end of computing until the gradients are averaged inside the node.
        node_bytes: Memory for that mean, bytes.
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
        """True if there is only one worker, or one node."""
        return self.workers == self.network.workers_per_node

    @property
    def representatives(self) -> range:
        """Global ranks of one worker per node; all ranks without nodes."""
        return range(0, self.workers, self.network.workers_per_node)

    @property
    def step_time(self) -> StepTime:
        """Duration of a step of a worker, or of a node."""
        return StepTime(self.step_seconds, self.jitter, self.network.workers_per_node, self.tail)

    @property
    def mean_step_seconds(self) -> float:
        """Mean duration of a step of a worker, or of a node, that waits for no other."""
        step = self.step_time
        if step.workers == 1 or not step.jitter:
            return step.seconds + step.tail
        return float(step.draw(np.random.default_rng(0), _DRAWS).mean()) + step.tail


class _EndedError(Exception):
    """Ends the simulated workers once the record is long enough."""


def run(strategy: Strategy, wire: Precision, setting: Setting, ended: Ended) -> Record:
    """Run ``strategy`` until ``ended(record)``, which is called after each step of all workers.

    Args:
        strategy: The strategy.
        wire: Precision of the strategy, or "auto" for a strategy that chooses.
        setting: Model and cluster.
        ended: Returns True once the record is long enough. A second record restarts from the
            beginning if one worker turns out not to represent all.
    """
    if can_represent(strategy, wire, setting):
        try:
            return run_members(strategy, wire, setting, setting.representatives[:1], ended)
        except DivergedError:
            pass
    return run_members(strategy, wire, setting, setting.representatives, ended)


def can_represent(strategy: Strategy, wire: Precision, setting: Setting) -> bool:
    """Return True if one worker, or one node, is expected to represent all.

    Never true for nodes with jitter, which have no clocks. The strategies of this package treat all
    ranks alike. Another strategy is expected to do so if, with a few workers, a run of one of them
    equals a run of all.
    """
    if setting.network.workers_per_node > 1 and setting.jitter:
        return False
    if type(strategy) in STRATEGIES.values():
        return True
    few = min(_FEW_WORKERS * setting.network.workers_per_node, setting.workers)
    small = replace(setting, workers=few, jitter=0.0)

    def ended(record: Record) -> bool:
        steps = len(record)
        means = record.steps[-1].syncs if steps else 0
        return steps >= _MOST_STEPS or (means >= _LEAST_MEANS and steps >= _LEAST_STEPS)

    one, all_ = (
        run_members(strategy, wire, small, members, ended)
        for members in (small.representatives[:1], small.representatives)
    )
    return one.agrees(all_, _TOLERANCE)


def run_members(
    strategy: Strategy,
    wire: Precision,
    setting: Setting,
    members: Sequence[int],
    ended: Ended,
    *,
    averages: bool = False,
) -> Record:
    """Run the workers ``members``, which represent all, until ``ended(record)``.

    Args:
        strategy: See ``run``.
        wire: See ``run``.
        setting: See ``run``.
        members: Global ranks: worker 0, or one worker of each node.
        ended: See ``run``.
        averages: True if the gradients are averaged inside each node in the run; otherwise
            ``setting.tail`` accounts for the time.

    Raises:
        DivergedError: One worker does not represent all.
    """
    workers = workers_for(members)
    cluster = RepresentativeCluster(
        workers, members, setting.workers, setting.network, setting.step_time, setting.shapes.scale
    )
    record = Record(cluster, len(members), setting.step_seconds)

    def train(worker: SimulatedWorker) -> None:
        team = team_of(cluster, members[worker.rank], setting.workers)
        model = PlaceholderModel(setting.shapes, setting.lssr)
        training = PlaceholderTraining(strategy, wire, team, model, averages=averages)
        record.start(worker.rank, training, model)
        while True:
            training.step()
            if record.stepped(worker.rank) and ended(record):
                raise _EndedError

    before = RandomState.current()
    try:
        workers.run(train)
    except _EndedError:
        pass
    finally:
        before.load()
        record.close()
    return record


def with_node_cost(setting: Setting) -> Setting:
    """Return ``setting`` with the time and memory of averaging gradients inside a node.

    A single node is run for a few steps to measure them. Strategies then run with steps that are
    longer by this time, so their messages inside a node do not queue behind gradients.
    """
    workers = setting.network.workers_per_node
    if workers == 1:
        return setting
    node = replace(setting, workers=workers, jitter=0.0)

    def ended(record: Record) -> bool:
        return len(record) == _NODE_STEPS

    record = run_members(BSP(), "float32", node, [0], ended, averages=True)
    before, last = record.steps[-2:]
    tail = last.clock - before.clock - setting.step_seconds
    return replace(setting, tail=tail, node_bytes=float(record.memory))
