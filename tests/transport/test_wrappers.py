"""Wrappers of a communicator: they override ``start`` and change nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
from typing_extensions import override

from faults import Faults
from offbeat.errors import OffbeatError
from offbeat.transport.accounting import Accounting
from offbeat.transport.communicator import Communicator, Wrapper
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team
from recording import Recording
from transport.communicators import World, worlds_without_processes
from transport.operations import expected, start_all

WRAPPERS: dict[str, Callable[[Communicator], Communicator]] = {
    "Wrapper": Wrapper,
    "Accounting": Accounting,
    "all": lambda inner: Accounting(Recording(Faults(inner, []))),
}


@worlds_without_processes
@pytest.mark.parametrize("name", WRAPPERS)
def test_operations_pass_through_a_wrapper(world: World, name: str) -> None:
    """Every class of operations gives the same results, also through the wrapper's twin."""

    def work(inner: Communicator) -> Any:
        one = WRAPPERS[name](inner)
        assert (one.rank, one.size, one.host) == (inner.rank, inner.size, inner.host)
        assert one.timeout_seconds == inner.timeout_seconds
        assert one.control_device == inner.control_device
        return start_all(one), start_all(one.twin())

    for rank, (original, twin) in enumerate(results := world(work)):
        assert original == twin == expected(rank, len(results))


def test_a_wrapper_has_the_board_of_the_innermost_communicator() -> None:
    """And a communicator without one says so."""
    assert Wrapper(Wrapper(SingleCommunicator())).board("b").add("n", 2) == 2
    with pytest.raises(OffbeatError, match="a _Bare has no board, so workers cannot lease data"):
        _Bare().board("b")


class _Bare(SingleCommunicator):
    board = Communicator.board


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", [*WRAPPERS, "Team"])
def test_closing_reaches_the_innermost_communicator(name: str, together: bool) -> None:
    """close() is called once, with its argument."""
    calls: list[bool] = []

    class Closing(SingleCommunicator):
        @override
        def close(self, *, together: bool = False) -> None:
            calls.append(together)

    wrap: Callable[[Communicator], Any] = Team if name == "Team" else WRAPPERS[name]
    wrap(Closing()).close(together=together)
    assert calls == [together]
