"""A parameter server: a vector that all workers push values to and pull values from.

The vector is divided into *shards*, which are held by all ranks or by some (the *servers*). Each
worker has a *clock*, for example its number of local steps. A request may contain a minimum clock.
The servers then answer when the clocks of all workers have reached it. This limits how far a worker
may be ahead. Workers that wait for each other at a *barrier* do not count.

**Protocol.** A request is a header of three int64 numbers. If the request pushes, the values
follow. A worker sends ``wait`` to a single server, and each other request to all servers. A server
answers with a header of two int64 numbers, except to ``push``, ``release`` and ``leave``. If the
request pulls, the values follow. A worker calls the shard of its own rank directly.

**Threads.** A server runs one background thread for each other rank, so a slow link delays only the
worker at its other end. A worker has at most one request with values in flight. A background thread
receives its answer while the worker computes. Meanwhile the worker may make requests without
values, for clocks and barriers. Their answers have another message tag, so that the two kinds of
answers cannot be confused.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from offbeat.extend import Completed, Handle, Promise, Team, explained
from offbeat_lab.baselines.shard import NO_CLOCK, Answer, Request, RequestKind, Rule, Shard
from offbeat_lab.baselines.shard_service import (
    ANSWER,
    CONTROL,
    PULLED,
    PUSHED,
    REQUEST,
    ShardService,
)


def shard_slices(elements: int, servers: int) -> list[slice]:
    """Return one slice of the vector per server. Their sizes differ by at most 1."""
    ends = [elements * i // servers for i in range(servers + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


class ParameterServer:
    """One worker's access to the parameter server, and the shard of its rank if it is a server.

    A request for values takes three steps: the worker writes ``vector`` (if it pushes), calls
    ``start``, and later calls ``take``. The pulled values are then in ``vector``. All workers must
    construct the object with the same arguments.

    Args:
        initial: Initial value of the server's vector, 1-D, on the CPU. The tensor becomes
            ``vector``.
        servers: Ranks that hold a shard each. None: all ranks.
        rule: Function that returns the update rule of a shard, given its initial values.

    Attributes:
        vector: Values to push, before ``start``. Pulled values, after ``take``. May be read and
            written only while ``idle``.
        shard: The shard of this rank. None if this rank is not a server.
        pulled_bytes: Bytes that this worker has pulled from other ranks with ``start``.
    """

    def __init__(
        self,
        team: Team,
        initial: Tensor,
        *,
        servers: Sequence[int] | None = None,
        rule: Callable[[Tensor], Rule] = lambda shard: Rule(),
    ) -> None:
        self._team, self.vector, self.pulled_bytes = team, initial, 0
        ranks = list(team.ranks if servers is None else servers)
        slices = zip(ranks, shard_slices(initial.numel(), len(ranks)), strict=True)
        # Each worker begins with the servers after its own rank, to spread the traffic.
        self._slices = dict(sorted(slices, key=lambda item: (item[0] - team.rank - 1) % team.size))
        self._sent: list[Handle[Tensor]] = []  # gloo may lose a message whose handle is deleted
        self._in_flight: Promise[int | Exception] | None = None
        self._what = ""  # name of the request in flight, for error messages
        self._answer: int | None = None  # minimum clock in an answer that was not taken yet
        self._left = False
        self.shard: Shard | None = None
        self._service: ShardService | None = None
        if team.rank in self._slices:
            values = initial[self._slices[team.rank]].clone()
            self.shard = Shard(values, rule(values), [0] * team.size)
            self._service = ShardService(team, self.shard)

    # -- requests for values ---------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if no request is in flight and the last answer was taken. ``start`` requires it."""
        return self._in_flight is None and self._answer is None

    def start(self, kind: RequestKind, *, clock: int = -1, min_clock: int = -NO_CLOCK) -> None:
        """Start a request that pushes or pulls ``vector``. Requires ``idle``.

        Does not wait for the answer. The request fails if the answer takes longer than the time-out
        of an operation. With ``min_clock``, a long delay is normal, so only the time in which the
        training thread waits for the answer counts.

        Args:
            kind: "push", "pull" or "push_pull".
            clock: New clock of this worker. −1 leaves it unchanged.
            min_clock: Minimum clock of the workers at which the servers answer a pull. Workers at a
                barrier do not count.
        """
        assert self.idle, "the answer of the last request was not taken"
        request = Request(kind, self._team.rank, clock, min_clock)
        answers = self._send_to_all(request, self.vector, background=True)
        if request.pulls:
            own = 0 if self.shard is None else self.shard.values.nbytes
            self.pulled_bytes += self.vector.nbytes - own
        sent, self._sent = self._sent, []
        if not sent and all(isinstance(answer, Completed) for answer in answers):
            self._answer = _min_clock(answers)  # this rank is the only server, and has answered
            return
        outcome: Promise[int | Exception] = self._team.host.promise()

        def receive() -> None:
            try:
                clock = _min_clock(answers)
                for handle in sent:
                    handle.wait()
                outcome.fulfil(clock)
            except Exception as error:  # raised later by ``await_answer``, on the training thread
                outcome.fulfil(error)

        self._in_flight, self._what = outcome, f"{kind} at the parameter server"
        self._team.host.spawn(receive, what=f"{kind} at the server")

    def take(self, *, wait: bool = False) -> int | None:
        """Take the answer of the last request, if it has arrived. Pulled values are in ``vector``.

        Raises the error of the request if it has failed. ``wait=True`` first blocks until the
        request in flight, if any, has been answered.

        Returns:
            The minimum clock of the workers (0 for a "push"). None if there is no answer to take.
        """
        if self._in_flight is not None and (wait or self._in_flight.fulfilled):
            self.await_answer()
        answer, self._answer = self._answer, None
        return answer

    def await_answer(self, *, release: bool = False) -> None:
        """Block until the request in flight, if any, has been answered.

        The next ``take`` returns the answer. Raises the error of the request if it has failed.
        With ``release`` the servers answer at once, without waiting for a clock.
        """
        if self._in_flight is None:
            return
        if release and not self._in_flight.fulfilled:
            self._send_to_all(Request("release", self._team.rank), self.vector[:0])
        outcome = self._team.communicator.await_promise(self._in_flight, what=self._what).wait()
        if isinstance(outcome, Exception):
            raise explained(outcome)
        self._in_flight, self._answer = None, outcome

    def read(self) -> Tensor:
        """Return a copy of the server's vector. No request may be in flight. Blocks."""
        assert self._in_flight is None, "a request is in flight"
        values = torch.empty_like(self.vector)
        _min_clock(self._send_to_all(Request("pull", self._team.rank), values))
        return values

    def own_part(self) -> Tensor:
        """Return the server's vector with zeros outside this rank's shard. Sends no messages."""
        values = torch.zeros_like(self.vector)
        if self.shard is not None:
            values[self._slices[self._team.rank]] = self.shard.copy()
        return values

    # -- barriers, shutdown ----------------------------------------------------------------------

    def barrier(self) -> int:
        """Block until all workers have reached the barrier.

        A worker at the barrier does not count in the minimum clock, so the other workers continue.
        The servers answer this worker's request in flight without waiting for a clock. The next
        ``take`` returns the answer. Each request of a worker that still trains restarts the
        time-out, because training may take longer than that.

        Returns:
            The minimum clock of all workers, equal on all workers.
        """
        answers = self._send_to_all(Request("barrier", self._team.rank), self.vector[:0])
        clocks = []
        for server, handle in zip(self._slices, answers, strict=True):
            while not (answer := handle.wait()).reached:
                handle = self._send(Request("wait", self._team.rank), server)
            clocks.append(answer.clock)
        self.await_answer()
        # This answer's minimum clock does not include the workers at the barrier.
        if self._answer is not None:
            self._answer = min(self._answer, *clocks)
        return min(clocks)

    def leave(self) -> None:
        """Tell all servers that this worker makes no more requests. A second call does nothing.

        On a server this blocks until all other workers have called ``leave``.
        """
        if not self._left:
            self._left = True
            self._send_to_all(Request("leave", self._team.rank), self.vector[:0])
            self._wait_for_sent()
            if self._service is not None:
                self._service.wait_for_leaves()

    def reset(self, vector: Tensor) -> None:
        """Replace the server's values, and ``self.vector``, by ``vector``. Sends no messages.

        All workers must call this with equal arguments and without a request in flight. No worker
        may make a request before all workers have called it.
        """
        self.vector.copy_(vector)
        if self.shard is not None:
            self.shard.reset(vector[self._slices[self._team.rank]])

    # -- messages --------------------------------------------------------------------------------

    def _send_to_all(
        self, request: Request, values: Tensor, *, background: bool = False
    ) -> list[Handle[Answer]]:
        """Send a request to all servers and start to receive their answers.

        ``values`` are pushed, and replaced by the pulled values. With ``background`` a background
        thread waits for the answers, and telemetry does not count the waiting time.
        """
        self._wait_for_sent()
        for server in self._slices:
            self._send_header(request, server, background=background)
        return [
            self._exchange(request, server, values[place], background=background)
            for server, place in self._slices.items()
        ]

    def _send(self, request: Request, server: int) -> Handle[Answer]:
        """Send a request without values to one server."""
        self._send_header(request, server, background=False)
        return self._exchange(request, server, self.vector[:0], background=False)

    def _send_header(self, request: Request, server: int, *, background: bool) -> None:
        if self._service is not None:
            self._service.raise_failure()
        if server != self._team.rank:
            self._send_tensor(request.encode(), server, REQUEST, background=background)

    def _exchange(
        self, request: Request, server: int, values: Tensor, *, background: bool
    ) -> Handle[Answer]:
        """Send the values of a request, if it pushes, and start to receive the answer."""
        communicator = self._team.uncounted if background else self._team.communicator
        patient = background and request.min_clock > -NO_CLOCK
        if server == self._team.rank:
            assert self._service is not None
            return self._service.handle_own(request, values, communicator, patient=patient)
        if request.pushes and values.numel():
            self._send_tensor(values, server, PUSHED, background=background)
        if not request.answered:
            return Completed(Answer(0))
        what = f"{request.kind} at the parameter server of rank {server}"
        receive = partial(communicator.receive, source=server, what=what, patient=patient)
        numbers = torch.zeros(len(Answer._fields), dtype=torch.int64, device="cpu")
        header = receive(numbers, tag=ANSWER if request.pulls else CONTROL)
        if request.pulls and values.numel():
            return receive(values, tag=PULLED).then(lambda _: Answer(*header.wait().tolist()))
        return header.then(lambda numbers: Answer(*numbers.tolist()))

    def _send_tensor(self, tensor: Tensor, server: int, tag: int, *, background: bool) -> None:
        communicator = self._team.uncounted if background else self._team.communicator
        what = f"request to the parameter server of rank {server}"
        self._sent.append(communicator.send(tensor, destination=server, tag=tag, what=what))
        if background:
            self._team.account.sent(tensor.nbytes)

    def _wait_for_sent(self) -> None:
        for handle in self._sent:
            handle.wait()
        self._sent = []


def _min_clock(answers: Sequence[Handle[Answer]]) -> int:
    """Wait for all answers and return their minimum clock."""
    return min([answer.wait().clock for answer in answers])
