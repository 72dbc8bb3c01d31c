"""One worker that trains the phantom: the parts that ``attach`` puts together, without hooks.

Whatever changes in how a step is driven changes here and nowhere else in ``plan``.
"""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from offbeat.averaging import AttachedOptimizer, Replica, Worker, flow_of
from offbeat.elastic.views import open_wire
from offbeat.nodes.gradients import NodeBuffers, NodeMean
from offbeat.plan.phantom import Phantom
from offbeat.quantization.wire import Precision
from offbeat.strategies import Strategy
from offbeat.telemetry import Stats
from offbeat.training.background import BackgroundTasks
from offbeat.training.iteration import Iteration
from offbeat.training.stats_recorder import StatsRecorder
from offbeat.transport.handle import Handle
from offbeat.transport.team import Team


class _Averaged(NodeBuffers):
    """Gradients that are the mean of the node already: the cluster counts that as computing."""

    def __init__(self) -> None:
        pass

    @override
    def average(self, index: int) -> None:
        pass


class Trainee:
    """A strategy at work on a phantom model.

    A collective, as ``attach`` is. ``Synchronizer`` is left out: it compares the workers, hooks
    optimizers (which imports torch's compiler), and does what needs an end of the training.

    Args:
        strategy: The strategy.
        wire: The precision, as in ``attach``.
        team: The workers.
        model: The phantom.
        averages: Whether the workers of a node average their gradients here.

    Attributes:
        roots: The objects from which the tensors of the training can be reached.
    """

    def __init__(
        self,
        strategy: Strategy,
        wire: Precision,
        team: Team,
        model: Phantom,
        *,
        averages: bool = False,
    ) -> None:
        scale = team.host.scale
        replica = Replica(model, model.tensors, scale)
        phantoms: Any = model.optimizers()
        optimizers = [
            AttachedOptimizer(i, one, model.tensors, scale) for i, one in enumerate(phantoms)
        ]
        with team.account.paused():
            opened = open_wire(team, strategy, wire)
        worker = Worker(team, replica, optimizers, opened)
        node: NodeBuffers | None = None
        if team.node is not None:
            node = NodeMean(team.node.inside, model, optimizers) if averages else _Averaged()
        tasks = BackgroundTasks(team, worker.details, lambda: worker.step)
        flow = flow_of(strategy, worker)
        self._iteration = Iteration(flow, worker, tasks, self._completed, node)
        self._recorder = StatsRecorder(worker, None)
        flow.start()
        self._iteration.watch_backward()
        self._recorder.restart()
        self._model, self._account = model, team.account
        self.roots = [worker, flow, self._iteration]

    def step(self) -> None:
        """One step of training: gradients, then the optimizer, which does nothing."""
        self._model.differentiate()
        self._iteration.report_buckets()
        self._iteration.prepare(0)
        self._iteration.complete(0)

    def _completed(self, synced: bool) -> None:
        self._recorder.completed(synced=synced)

    def before_waiting(self, callback: Callable[[Handle[Any]], None]) -> None:
        """Call ``callback`` each time that the worker is about to wait for a collective."""
        self._account.before_waiting.append(callback)

    @property
    def payload_bytes(self) -> int:
        """Bytes handed over so far, those of the step at hand included."""
        return self._account.payload_bytes

    @property
    def stats(self) -> Stats:
        """Totals since the start."""
        return self._recorder.stats
