"""What a rank does that keeps a shard: it serves the other ranks, and its own worker."""

import functools

from torch import Tensor

from offbeat.fabric.handle import Completed, Handle, explained
from offbeat.fabric.host import Promise
from offbeat.fabric.service import Service
from offbeat.fabric.shard import Answer, Request, Shard
from offbeat.fabric.team import Team


class Serving:
    """Serves a shard: each other rank from an activity of its own, this one at once.

    Attributes:
        error: What has ended the service of a rank, if anything has.
    """

    def __init__(self, team: Team, shard: Shard) -> None:
        self._team, self._shard = team, shard
        self.error: Exception | None = None
        self._held: list[Promise[Answer | Exception]] = []  # of the own worker, not answered yet
        self._served: dict[int, Promise[None]] = {}  # by rank: it has left
        for rank in team.ranks:
            if rank != team.rank:
                served: Promise[None] = team.host.promise()
                self._served[rank] = served
                client = Service(team.uncounted, rank, shard)
                watch = functools.partial(self._watch, client, served)
                team.host.spawn(watch, what=f"server of rank {rank}")

    def _watch(self, client: Service, served: Promise[None]) -> None:
        try:
            client.serve()
        except Exception as error:  # the worker's next request raises it
            self.error = self.error or error
            self._give_up()
        served.fulfil(None)

    def _give_up(self) -> None:
        """Fail what the shard holds back of the own worker: it may be for one that is gone."""
        for promise in list(self._held):
            if self.error is not None and not promise.fulfilled:
                promise.fulfil(self.error)

    def ask(self, request: Request, part: Tensor, *, beside: bool, patient: bool) -> Handle[Answer]:
        """A request of the own worker, which pushes ``part`` and finds the answer there.

        Args:
            request: It.
            part: In place of a message; nothing is rounded.
            beside: Whether an activity waits for it: its waiting is not the training's.
            patient: Whether it may take as long as it likes.
        """
        fabric = self._team.uncounted if beside else self._team.fabric
        what = f"{request.kind} at this rank's own parameter server"
        promise: Promise[Answer | Exception] = self._team.host.promise()

        def deliver(answer: Answer, values: Tensor | None) -> None:
            if promise.fulfilled:  # given up
                return
            if values is not None:
                part.copy_(values)
            promise.fulfil(answer)

        def told(outcome: Answer | Exception) -> Answer:
            if isinstance(outcome, Exception):  # only the worker itself asks who is missing
                raise outcome if beside else explained(outcome)
            return outcome

        self._shard.handle(request, part if request.pushes else None, deliver)
        if not request.answered:
            return Completed(Answer(0))
        if promise.fulfilled:
            return Completed(told(promise.result))
        self._held = [*(one for one in self._held if not one.fulfilled), promise]
        self._give_up()
        return fabric.fulfilment(promise, what=what, patient=patient).then(told)

    def end(self) -> None:
        """Wait until all other ranks have left: their last requests need this rank."""
        for rank, served in self._served.items():
            self._team.fabric.fulfilment(served, what=f"the leave of rank {rank}").wait()
