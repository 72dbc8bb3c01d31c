"""Rounds, run alike on workers that step and on those that take part without a step."""

from collections.abc import Sequence
from functools import partial

from offbeat.fabric import Completed
from offbeat.strategies.base import Strategy, Worker
from offbeat.strategies.roll import Ballot, Roll, Round
from offbeat.training.finite import Finite


class Rounds:
    """The rounds of one strategy on one worker.

    Every worker takes part in every round, with ``vote`` and ``act`` of the strategy, so no worker
    can miss an operation that the others start. Who does not step contributes weight 0, or what it
    has not contributed before.

    Attributes:
        acted: Rounds that were acted on, without those in which nobody stepped.
    """

    def __init__(self, strategy: Strategy, worker: Worker, finite: Finite) -> None:
        self._strategy, self._worker, self._finite = strategy, worker, finite
        self._number = 0
        self.acted = 0
        self._pending: Round | None = None  # called and not yet acted on

    def at_gradients(self, part: int, *, last: bool) -> bool:
        """The gradients of one optimizer are there; ``last`` if it is the last of its iteration.

        Returns:
            Whether this synchronized.
        """
        strategy, worker = self._strategy, self._worker
        if strategy.rounds == "gradients":
            return strategy.due(worker) and bool(self._act(self._call(part)))
        if strategy.rounds == "step" and last and strategy.due(worker):
            self._pending = self._call(0)
        return False

    def at_boundary(self) -> bool:
        """All optimizers have stepped. Returns whether this synchronized."""
        strategy, worker = self._strategy, self._worker
        synced = strategy.iterated(worker)
        if self._pending is None and strategy.rounds == "boundary" and strategy.due(worker):
            self._pending = self._call(0)
        if self._pending is not None:
            acted = self._act(self._pending)
            if acted is not None:  # else not decided yet: ask again after the next step
                self._pending = None
                synced = synced or acted
                if strategy.rounds == "boundary" and strategy.due(worker):
                    self._pending = self._call(0)  # on its way during the next step
        return synced

    def meet(self, order: Sequence[int], *, finishing: bool) -> Roll:
        """Take part in the others' rounds until nobody steps any more.

        Args:
            order: The optimizers as they stepped last; with ``rounds="gradients"`` each has a round
                of its own.
            finishing: Whether this worker is inside ``finish``.

        Returns:
            The last roll.
        """
        strategy, worker = self._strategy, self._worker
        strategy.meet(worker, finishing=finishing)
        parts = order if strategy.rounds == "gradients" else [0]
        while True:
            for part in parts:
                # A round that this worker has called as one that steps is everybody's next one.
                round, self._pending = self._pending, None
                if round is None:
                    round = self._call(part, stepping=False, finishing=finishing)
                roll = round.wait()
                if roll.stepping == 0:
                    strategy.catch_up(worker, roll)
                    worker.record.clear()
                    worker.wire.interrupted()
                    return roll
                self._act(Round(round.part, round.own, Completed(roll)))

    def _act(self, round: Round) -> bool | None:
        """Let the strategy act, and the wire see how long the workers wait."""
        worker, wire = self._worker, self._worker.wire
        acted = self._strategy.act(worker, round)
        self.acted += acted is not None
        self._finite.acted(synchronized=bool(acted))
        if acted is not None:
            wire.acted(round.then(lambda roll: roll.more))
            worker.details.update(wire.told())
        return acted

    def _call(self, part: int, *, stepping: bool = True, finishing: bool = False) -> Round:
        strategy, worker = self._strategy, self._worker
        looked = self._finite.look(part, stepping=stepping)
        vote = strategy.vote(worker, part, stepping=stepping, finishing=finishing)
        weight = float(stepping or worker.has_news) if vote.weight is None else vote.weight
        ballot = Ballot(
            weight=weight,
            stepping=stepping,
            finishing=finishing,
            flag=vote.flag,
            measure=vote.measure,
            view=worker.team.view,
            round=self._number,
            more=(*vote.more, *worker.wire.measured(worker.step, stepping=stepping)),
        )
        ballot = self._finite.mark(ballot, looked)
        self._number += 1
        heed = partial(self._finite.heed, step=worker.step)
        return Round(part, ballot, strategy.call(worker, part, ballot).then(heed))
