"""Plays the rounds of a strategy on plain views: no torch, no models, no network."""

from collections.abc import Sequence
from typing import Any

from offbeat.strategies.base import Strategy, SummedVotes, WorkerView


def summed_votes(stepping: int = 1, votes: tuple[float, ...] = ()) -> SummedVotes:
    return SummedVotes(lambda: (stepping, votes))


def _unread() -> Any:
    raise AssertionError("the summed votes were read")


UNREAD = SummedVotes(_unread)
"""Summed votes that have not arrived: to read them would wait."""


class Workers:
    """N workers with the same number of steps, whose parts land at once.

    Args:
        strategy: The strategy.
        size: N.
        view: Further values of each worker's view.

    Attributes:
        views: What the strategy sees of each worker.
    """

    def __init__(self, strategy: Strategy, size: int = 1, **view: Any) -> None:
        self.strategy = strategy
        self.views = [WorkerView(rank=rank, size=size, **view) for rank in range(size)]
        for one in self.views:
            one.state = strategy.state(one)

    def step(self, norms: Sequence[float] = (), *, stepping: int | None = None) -> float | None:
        """One step of the first ``stepping`` workers. Returns the parts that its round launches.

        Args:
            norms: ‖g‖² of each worker.
            stepping: Number of workers that have data left. None: all.
        """
        strategy, due = self.strategy, []
        for rank, view in enumerate(self.views):
            view.stepping = stepping is None or rank < stepping
            view.record = {}
            if view.stepping:
                view.step += 1
                view.since_launch += 1
                view.gradient_norm_squared = norms[rank] if norms else 0.0
                due.append(strategy.due(view))
        assert len({bool(one) for one in due}) == 1, "the workers that step agree"
        if not due[0]:
            return None
        votes = [strategy.vote(view) for view in self.views]
        sums = tuple(map(sum, zip(*votes, strict=True)))
        votes_of_all = summed_votes(len(due), sums)
        launches = [strategy.decide(view, votes_of_all) for view in self.views]
        assert len({*launches}) == 1, "all workers decide alike"
        for view in self.views if launches[0] else []:
            view.since_launch = 0
            number = int(min(launches[0], view.count))
            view.launches += number
        return launches[0]

    def play(self, steps: int) -> list[float | None]:
        return [self.step() for _ in range(steps)]

    def launch_steps(self, steps: int) -> list[int]:
        """The steps, from 1, after which something is launched."""
        return [i for i, parts in enumerate(self.play(steps), 1) if parts]
