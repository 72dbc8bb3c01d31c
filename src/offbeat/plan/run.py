"""Simulated runs of a strategy on a placeholder model.

A placeholder model is small and represents a large one. If all workers behave alike, only one of
them runs and represents the others (see ``plan/cluster.py``). Otherwise all workers run, or with
nodes of several workers the first worker of each node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offbeat.plan.cluster import DivergedError, RepresentativeCluster, StepTime, workers_for
from offbeat.plan.communicator import team_of
from offbeat.plan.placeholder_model import PlaceholderModel, PlaceholderTraining, Shapes
from offbeat.plan.record import Record
from offbeat.quantization.wire import Precision
from offbeat.simulate import Network
from offbeat.simulate.randomness import RandomState
from offbeat.simulate.workers import SimulatedWorker
from offbeat.strategies import BSP, Strategy
from offbeat.strategies.registry import STRATEGIES

_DRAWS = 20_000  # random steps whose mean is the expected duration of a node's step
_NODE_STEPS = 3  # steps of a single node: all later ones take as long as the third

Ended = Callable[[Record], bool]
"""Function that returns True once a record is long enough."""


@dataclass(frozen=True)
class Setting:
    """A model on a cluster.

    Attributes:
        shapes: Sizes of the model's tensors.
        workers: Number of workers.
        network: The links, and the number of workers per node.
        step_seconds: Mean compute time of a step, seconds.
        jitter: Standard deviation of the compute time relative to ``step_seconds``.
        lssr: Share of steps in which SelSync does not synchronize.
        tail: Seconds from the end of computing until the gradients are averaged inside the node; 0
            without nodes, or if not measured yet.
        node_bytes: Memory for the mean inside the node, bytes; 0 in the same cases.
    """

    shapes: Shapes
    workers: int
    network: Network
    step_seconds: float
    jitter: float
    lssr: float = 0.9
    tail: float = 0.0
    node_bytes: float = 0.0

    @property
    def alone(self) -> bool:
        """True if there is only one worker, or one node."""
        return self.workers == self.network.workers_per_node

    @property
    def representatives(self) -> range:
        """Global ranks of the first worker of each node. All ranks if a node has one worker."""
        return range(0, self.workers, self.network.workers_per_node)

    @property
    def step_time(self) -> StepTime:
        """Duration of a step of a worker, or of a node."""
        return StepTime(self.step_seconds, self.jitter, self.network.workers_per_node, self.tail)

    @property
    def mean_step_seconds(self) -> float:
        """Mean duration of a step of a worker or node that does not wait for others."""
        step = self.step_time
        if step.workers == 1 or not step.jitter:
            return step.seconds + step.tail
        return float(step.draw(np.random.default_rng(0), _DRAWS).mean()) + step.tail


class _EndedError(Exception):
    """Stops the simulated workers once the record is long enough."""


def run(strategy: Strategy, wire: Precision, setting: Setting, ended: Ended) -> Record:
    """Simulate training with ``strategy`` until ``ended(record)`` returns True.

    Only one worker runs if it can represent all. That holds for the strategies of Offbeat, which
    treat all ranks alike, except with jitter and nodes of several workers, which the clocks of a
    ``RepresentativeCluster`` do not support. If the workers turn out to differ, the training is
    simulated again with the first worker of each node, and a new record begins.

    ``ended`` is called after each step of all running workers.
    """
    uneven_nodes = setting.network.workers_per_node > 1 and setting.jitter
    if type(strategy) in STRATEGIES.values() and not uneven_nodes:
        try:
            return run_members(strategy, wire, setting, setting.representatives[:1], ended)
        except DivergedError:
            pass
    return run_members(strategy, wire, setting, setting.representatives, ended)


def run_members(
    strategy: Strategy,
    wire: Precision,
    setting: Setting,
    members: Sequence[int],
    ended: Ended,
    *,
    averages: bool = False,
) -> Record:
    """Simulate training by the workers ``members``, which represent all workers.

    Args:
        strategy: The strategy.
        wire: Precision of what is sent.
        setting: Model and cluster.
        members: Global ranks: worker 0 alone, or ``setting.representatives``.
        ended: Returns True once the record is long enough. Called after each step of ``members``.
        averages: True if the run simulates the means of gradients inside each node. Otherwise the
            compute time contains their time, ``setting.tail``.

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
    """Measure the time and memory of averaging gradients inside a node. Add them to ``setting``.

    A single node is simulated for a few steps. Later simulations add this time to the compute time
    of a step, and send no gradients inside a node. Without nodes of several workers, ``setting`` is
    returned unchanged.
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
