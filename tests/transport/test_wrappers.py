"""Wrappers of a communicator: they override ``start`` and change nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from typing_extensions import override

from faults import Faults
from offbeat.errors import OffbeatError
from offbeat.transport.accounting import Accounting
from offbeat.transport.communicator import Communicator, Wrapper
from offbeat.transport.handle import Handle
from offbeat.transport.host import Promise
from offbeat.transport.operation import Operation
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team
from recording import Recording
from transport.communicators import World, worlds_without_processes
from transport.operations import classes, expected, start_all


class Counting(Wrapper):
    """A minimal wrapper."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.kinds: list[str] = []

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        self.kinds.append(type(operation).__name__)
        return self.inner.start(operation)


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


@worlds_without_processes
def test_every_method_uses_start(world: World) -> None:
    """Every method of a communicator that starts an operation calls ``start``."""

    def work(inner: Communicator) -> Any:
        one, x = Counting(inner), torch.ones(inner.size)
        handles: list[Handle[Any]] = []
        if inner.size > 1:
            after, before = (one.rank + 1) % one.size, (one.rank - 1) % one.size
            handles += [one.send(x, destination=after, what="test")]
            handles += [one.receive(x.clone(), source=before, what="test")]
        promise: Promise[int] = one.host.promise()
        promise.fulfil(1)
        handles += [one.await_promise(promise, what="test")]
        handles += [one.sum(x, what="test"), one.maximum(x, what="test")]
        handles += [one.gather(x, what="test"), one.exchange(x, what="test")]
        handles += [one.broadcast(x, what="test")]
        for handle in handles:
            handle.wait()
        before_bytes = len(one.kinds)
        one.gather_bytes(b"abc", what="test")
        return set(one.kinds), one.kinds[before_bytes:]

    everything = {kind.__name__ for kind in classes()}
    for kinds, of_bytes in (results := world(work)):
        assert kinds == (everything if len(results) > 1 else everything - {"Send", "Receive"})
        assert of_bytes == ["Gather", "Gather"]


def test_only_start_twin_and_close_are_abstract() -> None:
    """The shorthands cannot be overridden. A communicator may have a board."""
    assert Communicator.__abstractmethods__ == {"start", "twin", "close"}
    helpers = {
        name
        for name, value in vars(Communicator).items()
        if not name.startswith("_")
        and callable(value)
        and name not in ("start", "twin", "close", "board")
    }
    assert helpers >= {"sum", "maximum", "broadcast", "gather", "exchange", "send", "receive"}
    for name in helpers:
        assert getattr(vars(Communicator)[name], "__final__", False), f"{name} is not final"


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
