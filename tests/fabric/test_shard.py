"""A shard by itself: who is answered when and with what, and how stale the pushes are."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.fabric.shard import Answer, Request, Rule, Shard
from offbeat.strategies.downpour import _Optimize


class Desk:
    """A shard without a network: remembers who was answered, when and with what."""

    def __init__(self, workers: int = 3, elements: int = 2, rule: Rule | None = None) -> None:
        values = torch.zeros(elements, dtype=torch.float64)
        self.shard = Shard(values, Rule() if rule is None else rule, workers)
        self.answers: list[tuple[str, int, list[float] | None]] = []
        self.headers: list[Answer] = []

    def ask(self, name: str, kind: Any, source: int, push: float | None = None, **more: int) -> Any:
        def deliver(answer: Answer, values: Tensor | None) -> None:
            self.headers.append(answer)
            self.answers.append((name, answer.clock, None if values is None else values.tolist()))

        values = None if push is None else torch.full_like(self.shard.values, push)
        self.shard.handle(Request(kind, source, **more), values, deliver)
        return [name for name, *_ in self.answers]


def test_waiting_requests_are_answered_in_the_order_of_their_arrival() -> None:
    """Those that are due; the others go on waiting, and values are those of the moment."""
    desk = Desk()
    desk.ask("push", "push", 1, 1.0, clock=2)
    desk.ask("push", "push", 2, 10.0, clock=3)
    assert desk.ask("b waits for 2", "pull", 2, least=2) == []
    assert desk.ask("a waits for 1", "pull", 1, least=1) == []
    assert desk.ask("now", "pull", 0) == ["now"]
    assert desk.ask("push", "push", 0, 100.0, clock=1) == ["now", "a waits for 1"]
    desk.ask("push", "push", 0, 100.0, clock=2)
    assert desk.answers == [
        ("now", 0, [11.0, 11.0]),
        ("a waits for 1", 1, [111.0, 111.0]),
        ("b waits for 2", 2, [211.0, 211.0]),
    ]
    desk.ask("x", "pull", 2, least=3)
    desk.ask("y", "pull", 1, least=3)
    desk.ask("z", "push_pull", 0, 0.0, clock=9, least=3)
    assert desk.ask("push", "push", 1, 0.0, clock=3)[3:] == ["x", "y", "z"]


def test_staleness_counts_from_the_download() -> None:
    """Pitfall 17: pushes of others between a worker's last download and its push."""
    desk = Desk()
    pull, push = "pull", "push"
    sequence: list[tuple[str, int, int | None]] = [  # kind, worker, staleness by hand
        (push, 0, 0),  # all start from the initial values
        (push, 1, 1),  # it has not seen the push of 0
        (push, 1, 1),  # its own push does not make it staler
        (pull, 1, None),
        (push, 1, 0),
        (push, 2, 4),  # 0, 1, 1, 1
        (push, 0, 4),  # 1, 1, 1, 2
        ("push_pull", 2, 5),  # 0, 1, 1, 1 and then 0 again
        (push, 0, 5),  # 1, 1, 1, 2, 2
        (push, 2, 1),  # downloaded with its push: only 0 since
        (pull, 0, None),
        (pull, 0, None),
        (push, 0, 0),
    ]
    want: dict[int, int] = {}
    for kind, worker, staleness in sequence:
        desk.ask("", kind, worker, None if kind == pull else 1.0)
        if staleness is not None:
            want[staleness] = want.get(staleness, 0) + 1
        assert desk.shard.staleness == want
    assert desk.shard.version == sum(want.values()) == 10


def test_a_waiting_pull_downloads_when_it_is_answered() -> None:
    """Pushes that arrive while it waits are part of the answer, so they do not make it stale."""
    desk = Desk(workers=2)
    desk.ask("", "push_pull", 0, 1.0, clock=1, least=1)
    desk.ask("", "push", 1, 1.0)
    desk.ask("", "push", 1, 1.0, clock=1)
    assert desk.answers == [("", 1, [3.0, 3.0])]
    desk.ask("", "push", 0, 1.0)
    assert desk.shard.staleness == {0: 2, 1: 2}


def test_who_does_not_wait_any_more_is_answered_at_once() -> None:
    """By a release, or by its arrival at a meeting; the others' requests go on waiting."""
    desk = Desk()
    desk.ask("push", "push", 0, 1.0, clock=4)
    desk.ask("0 waits", "push_pull", 0, 10.0, clock=5, least=3)
    desk.ask("1 waits", "pull", 1, least=3)
    desk.ask("2 waits", "clock", 2, least=3)
    assert desk.answers == []
    assert desk.ask("release", "release", 0) == ["0 waits"]
    assert desk.ask("arrival", "arrive", 2, seen=99) == ["0 waits", "2 waits"]
    assert desk.answers == [("0 waits", 0, [11.0, 11.0]), ("2 waits", 0, None)]
    assert desk.ask("clock", "push", 1, 0.0, clock=3)[2:] == ["1 waits", "arrival"]


# -- meetings --------------------------------------------------------------------------------------


def test_an_arrival_is_answered_when_others_give_a_sign_of_life() -> None:
    """So that waiting for one that trains on does not time out; the waiting asks again."""
    desk = Desk(workers=2)
    assert desk.ask("first", "arrive", 0) == [], "nothing has happened"
    desk.ask("push", "push", 1, 1.0, clock=5)
    assert desk.answers == [("first", 5, None)]
    last = desk.headers[-1]
    assert not last.met
    assert last.seen > 0
    assert desk.ask("again", "arrive", 0, seen=last.seen)[-1] == "first"
    assert desk.ask("met", "arrive", 1) == ["first", "again", "met"]
    assert [header.met for header in desk.headers] == [False, True, True]
    assert [clock for _, clock, _ in desk.answers] == [5, 0, 0], "all clocks count again"
    desk.ask("late", "arrive", 0, meeting=0, seen=99)
    assert desk.headers[-1].met, "that meeting is over"
    assert desk.ask("next", "arrive", 0, meeting=1, seen=99)[-1] == "late", "the next is not"


def test_who_asks_again_late_is_told_the_meetings_clock() -> None:
    """All get the same clock, that of the slowest, although one has gone on to the next meeting."""
    desk = Desk(workers=3)
    for worker, clock in ((0, 20), (1, 30), (2, 25)):
        desk.ask("push", "push", worker, 1.0, clock=clock)
    desk.ask("a sign of life", "arrive", 1)
    desk.ask("0 waits", "arrive", 0, seen=99)
    desk.ask("2 is the last", "arrive", 2, seen=99)
    desk.ask("0 goes on", "arrive", 0, meeting=1, seen=99)
    desk.ask("1 asks again", "arrive", 1, seen=99)
    clocks = {name: clock for name, clock, _ in desk.answers}
    assert clocks["0 waits"] == clocks["2 is the last"] == 20
    assert clocks["1 asks again"] == 20


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Rule, lambda: _Optimize("adagrad", 0.1)], ids=["add", "adagrad"])
def test_a_shard_goes_on_where_it_was_saved(make: Callable[[], Rule]) -> None:
    """Values, clocks, counters and the rule's memory, through plain values."""
    generator = torch.Generator().manual_seed(3)
    requests = [
        (["push", "push_pull", "pull"][int(kind)], int(worker), float(value), int(clock))
        for kind, worker, value, clock in zip(
            torch.randint(0, 3, (60,), generator=generator),
            torch.randint(0, 3, (60,), generator=generator),
            torch.randn(60, generator=generator, dtype=torch.float64),
            torch.arange(60) // 3,
            strict=True,
        )
    ]

    def serve(desk: Desk, some: list[tuple[str, int, float, int]]) -> None:
        for kind, worker, value, clock in some:
            push = kind != "pull"
            more = {"clock": clock} if push else {}
            desk.ask("", kind, worker, value if push else None, **more)

    whole, first, second = (Desk(rule=make()) for _ in range(3))
    serve(whole, requests)
    serve(first, requests[:31])
    state = torch.load(_saved(first.shard.state_dict()), weights_only=True)
    serve(first, requests[31:40])  # what was saved is a copy
    second.shard.load_state_dict(state)
    serve(second, requests[31:])
    a, b = whole.shard.state_dict(), second.shard.state_dict()
    assert a.keys() == b.keys()
    for key in a.keys() - {"values", "rule"}:
        assert a[key] == b[key], key
    assert torch.equal(a["values"], b["values"])
    assert whole.answers[-5:] == second.answers[-5:]
    assert whole.shard.slowest() == second.shard.slowest()


def _saved(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file
