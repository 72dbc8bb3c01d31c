"""Agreement of the workers of a node on what has arrived.

Messages reach the workers of a node at different times, but these workers must land the same parts
and decide in the same step. So a part or a tally counts as arrived when it has arrived on all of
them.
"""

from offbeat.averaging.parts.pipeline import Pipeline
from offbeat.averaging.votes import Round
from offbeat.strategies.base import WorkerView
from offbeat.transport.team import Team


class NodeAgreement:
    """The last agreement of the workers of a node. Without a node, every worker is on its own.

    Attributes:
        parts: Number of parts that had arrived on all workers of the node, minus the parts that
            have landed since. None without a node.
        tally: True if the tally had arrived on all workers of the node.
    """

    def __init__(self) -> None:
        self.parts: int | None = None
        self.tally = False

    def update(
        self, team: Team, pipeline: Pipeline, view: WorkerView, pending: Round | None
    ) -> None:
        """Agree again, and update the measurements in ``view``. A collective of the node.

        ``view.clock`` is the latest of the workers' clocks. ``view.waited`` and each number in
        ``view.spent``, the duration of a launch or landing, are the longest among them.
        ``view.timed_out`` is True if it is True on any of them.
        """
        spent, pipeline.state.spent = pipeline.state.spent, []
        if team.node is None:
            view.clock, view.spent = team.host.now(), spent
            return
        late = pending is None or not pending.done()
        view.clock, least, any_late, view.waited, timed_out, *view.spent = team.agree(
            team.host.now(),
            float(-pipeline.arrived()),
            float(late),
            view.waited,
            float(view.timed_out),
            *spent,
        )
        view.timed_out = bool(timed_out)
        self.parts, self.tally = round(-least), not any_late
