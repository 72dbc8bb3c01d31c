"""A parameter server: a vector that all workers push values to and pull values from.

The vector is divided into *shards*, one on each rank. The rank is the *server* of its shard. Each
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
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from offbeat.extend import Completed, Future, Promise, Team, explained
from offbeat_lab.baselines.shard import NO_CLOCK, Answer, Request, RequestKind, Rule, Shard

_REQUEST, _PUSHED, _ANSWER, _PULLED, _CONTROL = range(1, 6)
"""Message tags.

- ``_REQUEST``, ``_PUSHED``: header and values of a request.
- ``_ANSWER``, ``_PULLED``: header and values of an answer with values.
- ``_CONTROL``: header of an answer without values.
"""


class ParameterServer:
    """One worker's access to the parameter server, and the shard of its rank.

    A request for values takes three steps: the worker writes ``vector`` (if it pushes), calls
    ``start``, and later calls ``take``. The pulled values are then in ``vector``. All workers must
    construct the object with the same arguments.

    If a background thread of a server fails, the worker of this rank raises the error in its next
    request.

    Args:
        initial: Initial value of the server's vector, 1-D, on the CPU. The tensor becomes
            ``vector``.
        rule: The update rule of the shard.

    Attributes:
        vector: Values to push, before ``start``. Pulled values, after ``take``. May be read and
            written only while ``idle``.
        shard: The shard of this rank.
        pulled_bytes: Bytes that this worker has pulled from other ranks with ``start``.
    """

    def __init__(self, team: Team, initial: Tensor, rule: Rule) -> None:
        self._team, self.vector, self.pulled_bytes = team, initial, 0
        # One slice of the vector per server. Their sizes differ by at most 1.
        ends = [initial.numel() * i // team.size for i in range(team.size + 1)]
        slices = zip(team.ranks, itertools.starmap(slice, itertools.pairwise(ends)), strict=True)
        # Each worker begins with the servers after its own rank, to spread the traffic.
        self._slices = dict(sorted(slices, key=lambda item: (item[0] - team.rank - 1) % team.size))
        self._sent: list[Future[Tensor]] = []  # gloo may lose a message whose future is deleted
        self._in_flight: Promise[int | Exception] | None = None
        self._what = ""  # name of the request in flight, for error messages
        self._answer: int | None = None  # minimum clock in an answer that was not taken yet
        self.shard = Shard(initial[self._slices[team.rank]].clone(), rule, team.size)
        self._failure: Exception | None = None  # of the first background thread that has failed
        self._left: dict[int, Promise[None]] | None = {}  # by rank; fulfilled when its thread ends
        for rank in team.ranks:
            if rank != team.rank:
                self._left[rank] = team.host.promise()
                serve = partial(self._serve, self.shard, rank, self._left[rank])
                team.host.spawn(serve, what=f"server of rank {rank}")

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
        answers = self._ask(request, self.vector)
        if request.pulls:
            self.pulled_bytes += self.vector.nbytes - self.shard.values.nbytes
        sent, self._sent = self._sent, []
        if not sent and all(isinstance(answer, Completed) for answer in answers):
            self._answer = _min_clock(answers)  # a single worker, whose shard has answered
            return
        outcome: Promise[int | Exception] = self._team.host.promise()

        def receive() -> None:
            try:
                clock = _min_clock(answers)
                for future in sent:
                    future.wait()
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
            self._ask(Request("release", self._team.rank))
        outcome = self._team.communicator.await_promise(self._in_flight, what=self._what).wait()
        if isinstance(outcome, Exception):
            raise explained(outcome)
        self._in_flight, self._answer = None, outcome

    def read(self) -> Tensor:
        """Return a copy of the server's vector. No request may be in flight. Blocks."""
        assert self._in_flight is None, "a request is in flight"
        values = torch.empty_like(self.vector)
        _min_clock(self._ask(Request("pull", self._team.rank), values))
        return values

    def own_part(self) -> Tensor:
        """Return the server's vector with zeros outside this rank's shard. Sends no messages."""
        values = torch.zeros_like(self.vector)
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
        answers = self._ask(Request("barrier", self._team.rank))
        clocks = []
        for server, future in zip(self._slices, answers, strict=True):
            while not (answer := future.wait()).reached:
                (future,) = self._ask(Request("wait", self._team.rank), server=server)
            clocks.append(answer.clock)
        self.await_answer()
        # This answer's minimum clock does not include the workers at the barrier.
        if self._answer is not None:
            self._answer = min(self._answer, *clocks)
        return min(clocks)

    def leave(self) -> None:
        """Tell all servers that this worker makes no more requests. A second call does nothing.

        Blocks until all other workers have called ``leave``.
        """
        if self._left is not None:
            left, self._left = self._left, None
            self._ask(Request("leave", self._team.rank))
            self._wait_for_sent()
            for rank, promise in left.items():
                what = f"the end of the requests of rank {rank}"
                self._team.communicator.await_promise(promise, what=what).wait()

    # -- messages to servers ---------------------------------------------------------------------

    def _ask(
        self,
        request: Request,
        values: Tensor | None = None,
        *,
        server: int | None = None,
    ) -> list[Future[Answer]]:
        """Send a request and start to receive the answers.

        Args:
            request: The request.
            values: Values to push, which the pulled values replace. None: none.
            server: Rank of the server. None: all servers.
        """
        if self._failure is not None:
            raise explained(self._failure)
        values = self.vector[:0] if values is None else values
        places = self._slices
        if server is None:
            self._wait_for_sent()
        else:
            places = {server: places[server]}
        for rank in places:
            if rank != self._team.rank:
                self._send(request.encode(), rank, _REQUEST)
        return [self._exchange(request, rank, values[place]) for rank, place in places.items()]

    def _exchange(self, request: Request, server: int, values: Tensor) -> Future[Answer]:
        """Send the values of a request, if it pushes, and start to receive the answer."""
        communicator = self._team.communicator
        patient = request.min_clock > -NO_CLOCK
        if server == self._team.rank:
            promise: Promise[Answer] = self._team.host.promise()

            def deliver(answer: Answer, pulled: Tensor | None) -> None:
                if pulled is not None:
                    values.copy_(pulled)
                promise.fulfil(answer)

            self.shard.handle(request, values if request.pushes else None, deliver)
            if request.answered and not promise.fulfilled:
                what = f"{request.kind} at this rank's own parameter server"
                return communicator.await_promise(promise, what=what, patient=patient)
            return Completed(promise.result if request.answered else Answer(0))
        if request.pushes and values.numel():
            self._send(values, server, _PUSHED)
        if not request.answered:
            return Completed(Answer(0))
        what = f"{request.kind} at the parameter server of rank {server}"
        receive = partial(communicator.receive, source=server, what=what, patient=patient)
        numbers = torch.zeros(len(Answer._fields), dtype=torch.int64, device="cpu")
        header = receive(numbers, tag=_ANSWER if request.pulls else _CONTROL)
        if request.pulls and values.numel():
            return receive(values, tag=_PULLED).then(lambda _: Answer(*header.wait().tolist()))
        return header.then(lambda numbers: Answer(*numbers.tolist()))

    def _send(self, tensor: Tensor, server: int, tag: int) -> None:
        what, send = (
            f"request to the parameter server of rank {server}",
            self._team.communicator.send,
        )
        self._sent.append(send(tensor, destination=server, tag=tag, what=what))

    def _wait_for_sent(self) -> None:
        for future in self._sent:
            future.wait()
        self._sent = []

    # -- the server's background threads ---------------------------------------------------------

    def _serve(self, shard: Shard, rank: int, left: Promise[None]) -> None:
        """Handle the requests of one other rank until it leaves."""
        try:
            self._handle_requests(shard, rank)
        except Exception as error:  # raised later on the training thread
            self._failure = self._failure or error
        left.fulfil(None)

    def _handle_requests(self, shard: Shard, rank: int) -> None:
        communicator = self._team.communicator
        what = f"a request of rank {rank} to the parameter server"
        # One buffer is enough. This thread handles a push before it receives the next request, and
        # a worker that waits for pulled values pushes nothing.
        buffer = torch.empty_like(shard.values)
        sent: deque[Future[Tensor]] = deque()  # gloo may lose a message whose future is deleted

        def send(request: Request, answer: Answer, pulled: Tensor | None) -> None:
            numbers = torch.tensor([*map(int, answer)], device="cpu")
            messages = {_ANSWER if request.pulls else _CONTROL: numbers}
            if pulled is not None and pulled.numel():  # shards of a small vector may be empty
                messages[_PULLED] = buffer.copy_(pulled)
            for tag, tensor in messages.items():
                # A request of the training thread may cause this answer, which does not count.
                start, what = communicator.start, f"answer to rank {rank}"
                sent.append(start("send", tensor, what, peer=rank, tag=tag, patient=False))

        while True:
            header = torch.zeros(3, dtype=torch.int64, device="cpu")
            communicator.receive(header, source=rank, tag=_REQUEST, what=what, patient=True).wait()
            request = Request.decode(header, rank)
            while sent:
                sent.popleft().wait()  # short, because the worker is already receiving its answers
            if request.kind == "leave":
                return
            values = buffer if request.pushes else None
            if request.pushes and buffer.numel():
                pushed = f"values of rank {rank} for the parameter server"
                communicator.receive(buffer, source=rank, tag=_PUSHED, what=pushed).wait()
            shard.handle(request, values, partial(send, request))


def _min_clock(answers: Sequence[Future[Answer]]) -> int:
    """Wait for all answers and return their minimum clock."""
    return min([answer.wait().clock for answer in answers])
