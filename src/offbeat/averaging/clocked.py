"""Self-clocked averaging: the landing of one message starts the next. Votes travel in messages."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.averager import Averager
from offbeat.averaging.flight import Flight
from offbeat.averaging.pace import STEP_END_SHARE, Pace
from offbeat.averaging.rounds import WaitingWarning
from offbeat.averaging.votes import Round, Vote, summed_votes
from offbeat.averaging.worker import Worker
from offbeat.quantization.kernels import to_device
from offbeat.strategies.base import GlobalModel, Strategy
from offbeat.transport.future import Completed, Future


class ClockedAverager(Averager):
    """Launches parts as soon as earlier ones have landed. No vote precedes a launch.

    A *message* contains one or several parts. All workers launch the same sequence of messages, and
    each has at most one in flight. A worker launches the next one at the end of the local step in
    which the previous one has landed. The sum starts when the last worker has launched it. The vote
    of a worker travels in its message, so the sum of the votes is known when the message lands,
    which is before this worker launches the next one. Contents and outer step of the next message
    depend on these sums and on values that are equal on all workers.

    At the end of a step a worker may wait for a message that is about to arrive. It then launches
    the next message at the end of this step, not one step later. So the workers stay in phase: they
    launch a message at about the same time, and none waits long for the others.

    At a barrier a worker continues to launch and land, with ``stepping=False``. The barrier ends
    with the first message in whose votes no worker steps. All workers were at the barrier
    when they launched it, and none has launched a later one.

    At a step boundary the training thread packs and lands for at most ``STEP_END_SHARE`` of the
    time of a step, but at least one *piece* (``flight.py``) of each message. This limit does not
    apply in a node, at a barrier, and at the bound on the staleness. Background threads add up the
    updates, and move P and v when the sum arrives.
    """

    def __init__(self, strategy: Strategy, worker: Worker, averages: GlobalModel) -> None:
        super().__init__(strategy, worker, averages)
        self.pace = Pace(averages.patience)

    @override
    def start(self) -> None:
        self._alone = self.worker.size == 1  # a single worker launches nothing
        self._memory: list[Tensor] = []  # of the shifts of a flight, one after the other
        super().start()
        # Measurements of the newest received message: time from sending to arrival and processor
        # time, both in steps; number of parts; summed votes.
        self._flight_steps, self._cost, self._received_parts = math.inf, 0.0, 0
        self._sums = Vote(numbers=(0.0,) * len(self._vote(stepping=False).numbers))
        self.vote_length = len(self._sums.row())

    # -- steps -----------------------------------------------------------------------------------

    @override
    def step_ended(self) -> bool:
        """Land and launch what can be landed and launched. Returns True if a part landed."""
        landings = self.state.landings
        if not self._alone:
            self.record_staleness()
            self._launch_and_land()
        if self._calls_after_step:
            self.strategy.after_step(self.view_of(stepping=True))
        if not self._alone:
            self.pace.began = self.worker.team.host.now()
        return self.state.landings > landings

    def _launch_and_land(self) -> None:
        state, worker, pace = self.state, self.worker, self.pace
        pace.step_ended(worker.team.host.now())
        arrived = self._await_arrival()
        # ``_await_arrival`` has made the credit equal on all processes of a node, so they agree.
        may_launch = pace.credit_seconds >= 0
        self._advance(arrived=arrived, may_launch=may_launch)
        while worker.step - state.fresh_step >= self.averages.bound:
            self._complete(self._flying[0] if self._flying else self._begin_message(stepping=True))
            if self.unsynced:
                self._advance(arrived=False, may_launch=may_launch)

    def _await_arrival(self) -> bool:
        """Wait briefly if the message in flight is about to arrive. Returns True if it has arrived.

        The processes of a node agree on the result, and on ``credit_seconds``.
        """
        team, pace, arrived, waited, in_vain = self.worker.team, self.pace, False, 0.0, False
        flight = self._flying[0] if self._flying else None
        if flight is not None and flight.moved is not None:
            moved, limit = flight.moved, pace.wait_seconds()
            expected = self.state.sizer.expected_steps * pace.step_seconds
            missing = expected - (team.host.now() - flight.sent_seconds)
            if limit and missing < limit and not moved.done():
                what = f"a message at step {self.worker.step}"
                waited = team.wait_while(lambda: not moved.done(), limit, what)
                in_vain = not moved.done()
            arrived = moved.done()
        late, waited, in_vain_, debt = team.maximum_over_node(
            float(not arrived), waited, float(in_vain), -pace.credit_seconds
        )
        pace.waited(waited, in_vain=bool(in_vain_))
        pace.credit_seconds = -debt
        return not late

    def _advance(self, *, arrived: bool, may_launch: bool) -> None:
        """Land the message in flight if it has arrived, and launch the next one, within limits."""
        host, node = self.worker.team.host, self.worker.team.node
        seconds = math.inf if node else STEP_END_SHARE * self.pace.step_seconds
        deadline = host.processor_seconds() + seconds
        flight = self._flying[0] if self._flying else None
        if flight is not None and flight.future is not None:
            if not arrived:
                return
            self._receive(flight)
            if not self._work(flight, deadline):
                return
            self.finish_landing(flight)
            flight = None
        if flight is None:
            if not (may_launch and self.strategy.due(self.view_of(stepping=True))):
                return
            flight = self._begin_message(stepping=True)
        if self._work(flight, deadline):
            self._send(flight)

    def _work(self, flight: Flight, deadline: float) -> bool:
        """Pack or land pieces until ``deadline``, at least one. Returns True if all are done."""
        host = self.worker.team.host
        began = host.processor_seconds()
        while True:
            done = next(flight.work, flight) is flight
            now = host.processor_seconds()
            if done or now >= deadline:
                self.pace.credit_seconds -= now - began
                flight.processor_seconds += now - began
                return done

    def _complete(self, flight: Flight) -> None:
        """Send a message if it was not sent, wait for it, and land it."""
        if flight.future is None:
            self._work(flight, math.inf)
            self._send(flight)
        assert flight.moved is not None
        flight.moved.wait()
        self._receive(flight)
        self._work(flight, math.inf)
        self.finish_landing(flight)

    # -- messages --------------------------------------------------------------------------------

    def _vote(self, *, stepping: bool) -> Vote:
        """Return this worker's vote. The last number is the processor time of a message."""
        return Vote(
            weight=float(stepping or self.unsynced),
            stepping=stepping,
            flight_steps=self._flight_steps if stepping else math.inf,
            numbers=(*self.strategy.vote(self.view_of(stepping=stepping)), self._cost),
        )

    def _begin_message(self, *, stepping: bool) -> Flight:
        """Begin the next message."""
        view, sums = self.view_of(stepping=stepping), self._sums
        votes = summed_votes(Completed(sums._replace(numbers=sums.numbers[:-1])))
        number = self.strategy.decide(view, votes)
        parts = self.next_parts(self.state.sizer.number if number == math.inf else number)
        steps = self.outer_steps(parts, votes)
        vote = self.rounds.number(self._vote(stepping=stepping))
        flight = self.begin_launch(parts, vote.weight, lambda: math.nan, steps)
        flight.vote = vote
        return flight

    def _send(self, flight: Flight) -> None:
        worker, team = self.worker, self.worker.team
        finite = self.check_launch(flight)
        if not flight.vote.stepping:
            finite = flight.finite = finite & worker.finite_model()
        vote = torch.tensor(flight.vote.row(), dtype=torch.float64, device="cpu")
        if isinstance(finite, Tensor):  # on a GPU, this worker learns the value from its message
            vote = to_device(vote, finite.device)
        vote[Vote._fields.index("finite")].mul_(finite)
        # If buffers are not finite under the policy "raise", the votes let all workers raise an
        # error, and none lands them.
        self.send(flight, vote)
        assert flight.future is not None
        # The thread that waits for the message must not keep this object or the worker.
        check, host, rank, details = self.rounds.check, team.host, team.rank, worker.details
        memory = self._memory

        def move(_: object) -> Future[None]:
            flight.arrived_seconds, began = host.now(), host.processor_seconds()
            flight.votes = [Vote.of(row) for row in flight.message.votes]
            flight.vote = flight.votes[rank]
            if not flight.vote.finite:
                details["non_finite"] = details.get("non_finite", 0) + 1
            flight.sums = check(flight.message.votes)
            total = _contributors(flight.votes)
            flight.total = lambda: total
            flight.move(memory)
            flight.background_seconds = host.processor_seconds() - began
            return Completed(None)

        like = (
            self.parts[0].slices[0].space.x.tensors[0] if self.parts[0].slices else torch.empty(0)
        )
        flight.moved = team.landings.start(flight.future, move, what=flight.message.what, like=like)

    def _receive(self, flight: Flight) -> None:
        """Prepare the landing of a message that has arrived. A second call does nothing."""
        if flight.received:
            return
        flight.received = True
        pace, state = self.pace, self.state
        assert flight.moved is not None
        flight.moved.wait()
        if flight.buffers is not None:
            flight.buffers.wait()
        self._sums = flight.sums
        flight.work = flight.add()
        pace.credit_seconds -= flight.background_seconds
        flight.processor_seconds += flight.background_seconds
        self.syncs += 1
        if pace.step_seconds and flight.arrived_seconds is not None:
            seconds = flight.arrived_seconds - flight.sent_seconds
            (self._flight_steps,) = self.worker.team.maximum_over_node(seconds / pace.step_seconds)
        # The votes in this message contain the workers' measurements of the previous message.
        fastest = min(vote.flight_steps for vote in flight.votes)
        if math.isfinite(fastest) and self._received_parts:
            cost = max(vote.numbers[-1] for vote in flight.votes)
            state.sizer.measure(fastest, self._received_parts, cost)
        self._received_parts = len(flight.parts)

    @override
    def finish_landing(self, flight: Flight, *, take: bool = True) -> None:
        super().finish_landing(flight, take=take)
        step = self.pace.step_seconds
        cost = flight.processor_seconds / step if step else 0.0
        (self._cost,) = self.worker.team.maximum_over_node(cost)

    @override
    def buffer_total(self, flight: Flight) -> float:
        return flight.sums.weight

    @override
    def consensus_weights(self, last: Round) -> tuple[float, float]:
        # Every model counts, because x − P may contain changes that its worker has not sent yet.
        return 1.0, float(self.worker.size)

    @override
    def update_details(self) -> None:
        super().update_details()
        self.worker.details.update(message_parts=self.state.sizer.number)

    # -- barrier ---------------------------------------------------------------------------------

    @override
    def wait_for_all(self) -> Round:
        worker = self.worker
        self.pace.began = None  # a barrier is no part of a step
        if self._alone:
            return super().wait_for_all()
        warning = None if worker.call == "finish()" else WaitingWarning(worker)
        while self._flying:
            self._complete(self._flying[0])
        while True:
            flight = self._begin_message(stepping=False)
            self._complete(flight)
            if not flight.sums.stepping:
                worker.record.clear()
                self._memory.clear()
                return Round(flight.vote, Completed(flight.sums))
            if warning is not None:
                warning(flight.sums)

    @override
    def vote(self, optimizer: int, *, stepping: bool) -> Round:
        """Return a round of a single worker, which has nothing to send."""
        return self.rounds.send(self._vote(stepping=stepping))

    @override
    def decide(self, round: Round) -> bool:
        return False


def _contributors(votes: Sequence[Vote]) -> float:
    """Return Σ w, the number of workers by which the sum of the updates in a message is divided.

    A worker that sends an update has w = 1. A worker without new steps has w = 1, too, with the
    update 0, as long as it has taken at least as many local steps as the slowest sender: it has
    sent its changes of these steps earlier. After that, w = 0.
    """
    slowest = min((vote.step for vote in votes if vote.weight), default=math.inf)
    return float(sum(vote.weight > 0 or vote.step >= slowest for vote in votes))
