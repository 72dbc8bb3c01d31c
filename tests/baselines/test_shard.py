"""A shard without communication: the order and content of its answers, and the staleness."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offbeat_lab.baselines.shard import NO_CLOCK, Answer, Request, Rule, Shard


class Recorder:
    """Records which requests a shard has answered, in order, and the answers."""

    def __init__(self, workers: int = 3, rule: Callable[[Tensor], Rule] | None = None) -> None:
        values = torch.zeros(2, dtype=torch.float64)
        self.shard = Shard(values, Rule() if rule is None else rule(values), workers)
        self.answers: list[tuple[str, int, list[float] | None]] = []
        self.reached: dict[str, bool] = {}

    def ask(
        self, name: str, kind: Any, source: int, push: float | None = None, **clocks: int
    ) -> list[str]:
        """Return the names of all requests that were answered so far."""

        def deliver(answer: Answer, values: Tensor | None) -> None:
            self.reached[name] = answer.reached
            self.answers.append((name, answer.clock, None if values is None else values.tolist()))

        values = None if push is None else torch.full_like(self.shard.values, push)
        self.shard.handle(Request(kind, source, **clocks), values, deliver)
        return [name for name, *_ in self.answers]


def test_the_rule_is_notified_before_requests_for_a_higher_clock_are_answered() -> None:
    """This includes a clock that rises because the slowest worker has reached the barrier."""

    class Counting(Rule):
        def clock_advanced(self, shard: Tensor) -> None:
            shard.add_(100)

    it = Recorder(workers=2, rule=lambda values: Counting())
    it.ask("waits", "push_pull", 0, 1.0, clock=1, min_clock=1)
    it.ask("clock", "push", 1, 2.0, clock=1)
    it.ask("same clock", "pull", 1)
    it.ask("next", "push", 0, 4.0, clock=2)
    it.ask("barrier", "barrier", 1)
    it.ask("later", "pull", 0)
    assert it.answers == [
        ("waits", 1, [103.0, 103.0]),
        ("same clock", 1, [103.0, 103.0]),
        ("barrier", 2, None),
        ("later", 2, [207.0, 207.0]),
    ]


# -- barriers --------------------------------------------------------------------------------------


def test_a_worker_at_the_barrier_is_notified_that_others_are_alive() -> None:
    """So its wait for a worker that still trains does not time out, and it asks again."""
    it = Recorder(workers=2)
    assert it.ask("first", "barrier", 0) == [], "nothing has happened"
    it.ask("push", "push", 1, 1.0, clock=5)
    assert it.answers == [("first", 5, None)]
    assert it.ask("again", "wait", 0) == ["first"], "nothing has happened since"
    assert it.ask("last", "barrier", 1) == ["first", "again", "last"]
    assert it.reached == {"first": False, "again": True, "last": True}
    assert [clock for _, clock, _ in it.answers] == [5, 0, 0], "all clocks count again"
    it.ask("late", "wait", 0)
    assert it.reached["late"], "that barrier is completed"
    assert it.ask("next", "barrier", 0)[-1] == "late", "the next one is not"


def test_no_clock_counts_if_all_workers_wait_at_the_barrier_or_are_not_waited_for() -> None:
    it = Recorder(workers=2)
    it.shard.clocks[1] = NO_CLOCK
    it.ask("arrives", "barrier", 0)
    it.ask("asks", "pull", 1)
    assert it.answers == [("arrives", NO_CLOCK, None), ("asks", NO_CLOCK, [0.0, 0.0])]


def test_no_request_waits_for_a_clock_of_a_worker_at_the_barrier() -> None:
    """Neither one that already waits, nor one of that worker itself. Later its clock counts."""
    it = Recorder(workers=2)
    it.ask("ahead", "push_pull", 0, 1.0, clock=2, min_clock=2)
    it.ask("own", "pull", 1, min_clock=9)
    assert it.ask("arrives", "barrier", 1) == ["ahead", "own"]
    assert [clock for _, clock, _ in it.answers] == [2, 2]
    it.ask("last", "barrier", 0)
    assert it.answers[2:] == [("arrives", 0, None), ("last", 0, None)]
    assert it.ask("counts again", "pull", 0, min_clock=1)[4:] == []
    assert it.ask("released", "release", 0)[4:] == ["counts again"]


def test_a_pull_waits_for_the_minimum_clock() -> None:
    """Its answer contains every push up to that clock, from all workers."""
    it = Recorder(workers=3)
    for clock in (1, 2):
        for source in range(3):
            it.ask("push", "push", source, 1.0, clock=clock)
    assert it.ask("pull", "pull", 0, min_clock=3) == []
    it.ask("third", "push", 0, 1.0, clock=3)
    assert it.ask("third", "push", 1, 1.0, clock=3) == []
    it.ask("last", "push", 2, 1.0, clock=3)
    assert it.answers == [("pull", 3, [9.0, 9.0])]
