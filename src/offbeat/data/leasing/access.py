"""Access of leased data to a synchronizer.

This module uses private attributes of ``Synchronizer``.
"""

from collections.abc import Callable
from typing import Any

from offbeat.errors import AttachError, CommunicationError
from offbeat.synchronizer import Synchronizer, require_synchronizer
from offbeat.transport.board import Board
from offbeat.transport.team import Team


def team_of(sync: Synchronizer) -> Team:
    """Return the workers of ``sync``."""
    return sync._team


def is_elastic(sync: Synchronizer) -> bool:
    """Return True if training continues after the loss of a worker."""
    return sync._components.views is not None


def has_finishing(sync: Synchronizer) -> bool:
    """Return True if a worker took part in the last consensus from ``finish``."""
    return not sync._consensus.complete


def share_model(sync: Synchronizer) -> None:
    """Give all workers of an elastic training a common model, which contains all their steps.

    A collective between two steps. Workers that wait in ``consensus`` or ``finish`` take part, too.
    It begins a new view.
    """
    if sync.size > 1:
        assert sync._consensus.change_view is not None
        with sync._iteration.guard:
            sync._consensus.change_view(CommunicationError("the workers share one model"))


def share_with_joining(
    sync: Synchronizer, save: Callable[[], Any], load: Callable[[Any], object]
) -> None:
    """Call ``sync.share_state``, unless this worker has taken a step. Then that is refused."""
    if not sync._components.unfinished.steps:
        sync.share_state(save, load)


def prepare_collectives(sync: Synchronizer, what: str) -> None:
    """Let the caller ``what`` use collectives between two steps, or inside ``consensus``.

    A collective. Outside of ``consensus`` it completes the operations of the strategy, because
    workers at the same step may be in different rounds.

    Raises:
        AttachError: after ``finish`` or ``detach``, or in the middle of an iteration.
        CheckpointError: inside a consensus in which a worker takes part from ``finish``.
    """
    sync._require_active(what)
    sync._consensus.require_complete(what)
    if not sync._iteration.shows_consensus:
        sync._iteration.require_boundary(what)
        with sync._recorder.paused(), sync._team.account.paused(), sync._iteration.guard:
            sync._consensus.before_save()


def synced_step_of(sync: Synchronizer) -> int:
    """Return ``Flow.synced_step`` of ``sync``'s worker, counted as ``sync.step`` counts.

    After the state of a consensus was loaded, ``sync.step`` continues, and the flow begins at 0.
    """
    return sync.step - sync._worker.step + sync._iteration.flow.synced_step


def open_board(sync: Synchronizer, name: str, at_end: Callable[[], object]) -> Board:
    """Open a board for leases of data. All workers open the same boards in the same order.

    Args:
        sync: The synchronizer.
        name: Name of the caller, for keys and error messages.
        at_end: Function that is called when the training ends, before the connections are closed.

    Raises:
        AttachError: after ``finish`` or ``detach``, or the workers form nodes.
    """
    require_synchronizer(sync)
    sync._require_active(name)
    components = sync._components
    if components.team.node is not None:
        raise AttachError(
            f"{name} with node_group: the workers of a node must take equally many steps; give "
            "them equal shares of the data"
        )
    board = components.team.communicator.board(f"{name}/{components.lease_boards}")
    components.lease_boards += 1
    components.at_end.append(at_end)
    components.worker.leases_data = True
    return board
