"""The communication of one shard of a parameter server: receives requests and sends the answers."""

from collections import deque
from functools import partial

import torch
from torch import Tensor

from offbeat.extend import Communicator, Completed, Handle, Promise, Team, explained
from offbeat_lab.baselines.shard import Answer, Request, Shard

REQUEST, PUSHED, ANSWER, PULLED, CONTROL = range(1, 6)
"""Message tags.

- ``REQUEST``, ``PUSHED``: header and values of a request.
- ``ANSWER``, ``PULLED``: header and values of an answer with values.
- ``CONTROL``: header of an answer without values.
"""


class ShardService:
    """Passes the requests of all workers to this rank's shard.

    One background thread for each other rank receives the requests of that rank. This rank's worker
    calls ``handle_own`` instead. If a background thread fails, this rank's worker raises the error
    in its unanswered requests and in its next request.
    """

    def __init__(self, team: Team, shard: Shard) -> None:
        self._team, self._shard = team, shard
        self._failure: Exception | None = None
        self._unanswered: list[Promise[Answer | Exception]] = []  # requests of this rank's worker
        self._left: dict[int, Promise[None]] = {}  # by rank; fulfilled when its thread ends
        for rank in team.ranks:
            if rank != team.rank:
                self._left[rank] = team.host.promise()
                team.host.spawn(partial(self._serve, rank), what=f"server of rank {rank}")

    # -- requests of other ranks -----------------------------------------------------------------

    def _serve(self, rank: int) -> None:
        """Handle the requests of one other rank until it leaves."""
        try:
            self._handle_requests(rank)
        except Exception as error:  # raised later on the training thread
            self._failure = self._failure or error
            self._fail_unanswered()
        self._left[rank].fulfil(None)

    def _handle_requests(self, rank: int) -> None:
        communicator = self._team.uncounted
        what = f"a request of rank {rank} to the parameter server"
        # One buffer is enough. This thread handles a push before it receives the next request, and
        # a worker that waits for pulled values pushes nothing.
        buffer = torch.empty_like(self._shard.values)
        sent: deque[Handle[Tensor]] = deque()  # gloo may lose a message whose handle is deleted

        def send(request: Request, answer: Answer, pulled: Tensor | None) -> None:
            numbers = torch.tensor([*map(int, answer)], device="cpu")
            messages = {ANSWER if request.pulls else CONTROL: numbers}
            if pulled is not None and pulled.numel():  # shards of a small vector may be empty
                messages[PULLED] = buffer.copy_(pulled)
            for tag, tensor in messages.items():
                what = f"answer to rank {rank}"
                sent.append(communicator.send(tensor, destination=rank, tag=tag, what=what))

        while True:
            header = torch.zeros(Request.NUMBERS, dtype=torch.int64, device="cpu")
            communicator.receive(header, source=rank, tag=REQUEST, what=what, patient=True).wait()
            request = Request.decode(header, rank)
            while sent:
                sent.popleft().wait()  # short, because the worker is already receiving its answers
            if request.kind == "leave":
                return
            values = buffer if request.pushes else None
            if request.pushes and buffer.numel():
                pushed = f"values of rank {rank} for the parameter server"
                communicator.receive(buffer, source=rank, tag=PUSHED, what=pushed).wait()
            self._shard.handle(request, values, partial(send, request))

    # -- requests of this rank's worker ----------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise the error of the first background thread that has failed, if any."""
        if self._failure is not None:
            raise explained(self._failure)

    def handle_own(
        self, request: Request, values: Tensor, communicator: Communicator, *, patient: bool
    ) -> Handle[Answer]:
        """Handle a request of this rank's worker, without a message.

        ``values`` are pushed, and replaced by the pulled values. ``communicator`` waits for the
        answer, without a time-out if ``patient``.
        """
        promise: Promise[Answer | Exception] = self._team.host.promise()

        def deliver(answer: Answer, pulled: Tensor | None) -> None:
            if promise.fulfilled:  # with an error, by ``_fail_unanswered``
                return
            if pulled is not None:
                values.copy_(pulled)
            promise.fulfil(answer)

        def read(outcome: Answer | Exception) -> Answer:
            if isinstance(outcome, Exception):
                # ``uncounted`` is used by background threads. Only the training thread may find out
                # which worker is lost (``explained``).
                raise outcome if communicator is self._team.uncounted else explained(outcome)
            return outcome

        self._shard.handle(request, values if request.pushes else None, deliver)
        if not request.answered:
            return Completed(Answer(0))
        if promise.fulfilled:
            return Completed(read(promise.result))
        self._unanswered = [other for other in self._unanswered if not other.fulfilled]
        self._unanswered.append(promise)
        self._fail_unanswered()
        what = f"{request.kind} at this rank's own parameter server"
        return communicator.await_promise(promise, what=what, patient=patient).then(read)

    def _fail_unanswered(self) -> None:
        """If a background thread has failed, end all unanswered requests with its error."""
        for promise in list(self._unanswered):
            if self._failure is not None and not promise.fulfilled:
                promise.fulfil(self._failure)

    def wait_for_leaves(self) -> None:
        """Block until the background threads of all other ranks have ended."""
        for rank, left in self._left.items():
            what = f"the end of the requests of rank {rank}"
            self._team.communicator.await_promise(left, what=what).wait()
