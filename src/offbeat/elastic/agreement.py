"""Workers in processes of their own agree on who goes on, in the store of their process group.

A view change from view v to v + 1:

1. Each member writes that it is *here*. Awaited are those that have not, as long as their process
   exists, they have not left, and the time for silent ones has not passed.
2. When nobody is awaited, the lowest that is here proposes who goes on: they, and who asks to join.
   When the time has passed, everyone does. The store takes the first proposal of a view and no
   other, so that there is one list, wherever the network is cut.
3. Who is in the list opens groups with the others. Who is not was left behind.
4. If that fails, the same begins again from this list, for view v + 2.

The file is long because it is that protocol, whole: each step rests on what others leave behind.
"""

import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from typing_extensions import override

from offbeat.elastic.heartbeats import Lifelines
from offbeat.elastic.store import Board, StoreGoneError, base_of, kept_here, place_of
from offbeat.elastic.watch import Watch
from offbeat.errors import AttachError, CommunicationError, CommunicationTimeout
from offbeat.transport.communicator import Communicator
from offbeat.transport.membership import EndedError, Membership, View
from offbeat.transport.process_groups import GroupFactory, ranks_text
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_distributed import TorchCommunicator

T = TypeVar("T")
logger = logging.getLogger("offbeat")
SILENCE_SECONDS = 30.0
"""How long a view change waits for one that is silent, if timeout_seconds is not less."""
TRAINING = "offbeat/elastic"  # key: the name of the last that began in this store
_AGAIN_SECONDS = 3.0  # likewise, for who has had that time in an opening
_LEAVE_SECONDS = 1.0
_FAREWELL_SECONDS = 5.0  # how long threads of a view that has ended may take, at most
_BETWEEN_SECONDS = 0.01, 0.1  # between looks at the store: at first, and at most


class ElasticCommunicator(TorchCommunicator):
    """One whose workers can agree on who goes on."""

    membership: Membership

    @override
    def twin(self) -> Communicator:
        """It ends with the first one, and is opened anew with the next view."""
        twin = super().twin()
        del twin.__dict__["membership"]
        return twin


class ElasticSingle(SingleCommunicator):
    """The last one that is left, whom others can join."""

    membership: Membership


@dataclass(frozen=True)
class Decision:
    """Who goes on, as written in the store.

    Attributes:
        members: In the next view.
        newcomers: Those of them that have been in no view.
        asked: The first number that nobody had taken by then.
    """

    members: list[int]
    newcomers: list[int]
    asked: int


class Participant:
    """This process in one training, through all its views.

    Args:
        worker: Its number.
        board: Of the training.
        lifelines: Of this process; the others have their address from ``address/worker``.
        timeout_seconds: Of an operation.
        silence_seconds: How long others are waited for that are silent.
    """

    def __init__(
        self,
        worker: int,
        board: Board,
        lifelines: Lifelines,
        *,
        timeout_seconds: float,
        silence_seconds: float,
    ) -> None:
        self.worker, self.board, self.lifelines = worker, board, lifelines
        self.timeout_seconds = timeout_seconds
        self.silence_seconds = min(silence_seconds, timeout_seconds)
        self.heard = time.monotonic()  # when this worker last took part

    def enter(self, number: int, decision: Decision, opening_seconds: float) -> View:
        """Open the view ``number``.

        Raises:
            CommunicationError: not all have come.
        """
        members = tuple(decision.members)
        self._watch(members)
        membership = StoreMembership(self, number, decision)
        communicator = self._communicator(number, members, opening_seconds, membership)
        view = View(number, members, communicator, frozenset(decision.newcomers))
        try:
            self._promptly(lambda: self.board.put("latest", number))
            if missed := self._watch(members):
                logger.warning(
                    "rank %d cannot watch %s: if they die it is noticed as silence, after %g s",
                    *(self.worker, ranks_text(missed), self.silence_seconds),
                )
        except BaseException:
            communicator.close()
            raise
        membership.view = view
        self.heard = time.monotonic()
        return view

    def begin(self, number: int, decision: Decision) -> View:
        """Likewise, as a newcomer; or open the first view after it that can be."""
        try:
            return self.enter(number, decision, self.silence_seconds)
        except StoreGoneError:
            raise
        except CommunicationError:
            return self.go_on(number, decision, step=None)

    def _communicator(
        self,
        number: int,
        members: tuple[int, ...],
        opening_seconds: float,
        membership: "StoreMembership",
    ) -> Communicator:
        made: ElasticCommunicator | ElasticSingle
        if len(members) == 1:
            made = ElasticSingle(self.timeout_seconds)
        else:
            factory = GroupFactory(
                self.board.store,
                members.index(self.worker),
                len(members),
                f"view/{number}/groups",
                itertools.count(),
                opening_seconds=opening_seconds,
                lost=partial(self._lost, members),
                over=f"view/{number + 1}/begun",
            )
            # It is closed before this worker says that it is there: who waited there for a thread
            # that gloo does not let go of, longer than the others wait, would be left behind.
            made = ElasticCommunicator(
                factory,
                timeout_seconds=self.timeout_seconds,
                farewell_seconds=min(_FAREWELL_SECONDS, self.silence_seconds / 4),
            )
        made.membership = membership
        return made

    def go_on(self, view: int, before: Decision, *, step: int | None) -> View:
        """The view after ``view``, or the first one after it that can be opened.

        Args:
            view: Number of the view that has ended, or could not be opened.
            before: Its members.
            step: Own steps so far; None: this worker has been in no view.

        Raises:
            EndedError: training has ended.
            CommunicationError: this worker cannot go on.
        """
        began, patience = time.monotonic(), self.silence_seconds
        for number in itertools.count(view + 1):
            before = self._agree(number, before, patience, new=step is None)
            if self.worker not in before.members:
                silent_for = time.monotonic() - self.heard
                raise CommunicationError(
                    f"rank {self.worker} was left behind at step {step or 0}: "
                    f"{ranks_text(before.members)} are in view {number}. It had not taken part for "
                    f"{silent_for:.1f} s, and they wait {self.silence_seconds:g} s for one that is "
                    "silent (timeout_seconds, but at most 30 s). Attach again as a newcomer, with "
                    "group=offbeat.join(...)"
                )
            started = time.monotonic()
            try:
                return self.enter(number, before, self.silence_seconds)
            except StoreGoneError:
                raise
            except CommunicationError as error:
                logger.info("rank %d: view %d was not opened: %s", self.worker, number, error)
                now, said = time.monotonic(), str(error)
            # One that falls silent having come costs three times that: it may be the one that is to
            # propose, then it is in the list, and then it is awaited once more.
            longest = max(self.timeout_seconds, 3 * self.silence_seconds) + self.silence_seconds
            if now - began > longest and not self._known(number + 1):
                raise CommunicationTimeout(
                    f"rank {self.worker}: agreeing on who goes on failed after {now - began:.1f} "
                    f"s, longer than timeout_seconds={self.timeout_seconds:g} allows: {said}"
                )
            # Who was late for the opening has had its time.
            late = now - started > 0.9 * self.silence_seconds
            patience = min(_AGAIN_SECONDS, self.silence_seconds) if late else self.silence_seconds
        raise AssertionError

    def _agree(self, number: int, before: Decision, patience: float, *, new: bool) -> Decision:
        """Who is in view ``number``, after that of ``before``; perhaps not this worker."""
        board, started = self.board.within(f"view/{number}"), time.monotonic()
        others, came = set(before.members) - {self.worker}, started

        def arrive() -> None:
            if board.get("decided") is None:
                board.put(f"here/{self.worker}", new)
                board.put("begun", True)  # for those who still open the view before
                board.put("wanted", True)  # for all others

        here: set[int] = set()
        left: set[int] = set()

        def look() -> tuple[Any, Any]:
            here.update(board.those("here/{}", others - here))
            left.update(self.board.those("left/{}", others - here))
            return board.get("decided"), self.board.get("ended")

        self._promptly(arrive)
        pause, longest = _BETWEEN_SECONDS
        while True:
            known = len(here)
            decided, ended = self._promptly(look)
            if len(here) > known:
                came = time.monotonic()
            if decided is not None:
                return Decision(**decided)
            if ended is not None:
                raise EndedError(f"rank {self.worker}: the others have ended the training")
            lost = self.lifelines.lost()
            awaited, alive = others - here - left - lost, {self.worker, *(here - lost)}
            # So that one with a bad link, by itself, does not leave all others behind too soon; nor
            # the first of them that comes, after a while, those who come a moment later.
            most, now = len(alive) >= len(awaited), time.monotonic()
            over = now - came > patience if most else now - started > self.timeout_seconds
            if over or (not awaited and self.worker == min(alive)):
                self._propose(number, before, sorted(alive))
                continue
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _known(self, number: int) -> bool:
        """Whether it is known who is in view ``number``, or that there is none.

        So it is for one that was stopped for a while, and is not told that it took too long.
        """
        decided = f"view/{number}/decided"
        return self._promptly(
            lambda: any(self.board.get(key) is not None for key in (decided, "ended"))
        )

    def leave(self, number: int, *, ended: bool) -> None:
        """Tell the others, of view ``number``, that this worker goes for good."""

        def tell() -> None:
            self.board.put("ended" if ended else f"left/{self.worker}", True)
            self.board.put(f"view/{number + 1}/wanted", True)

        with contextlib.suppress(StoreGoneError):
            self.board.promptly(tell, "leaving", seconds=_LEAVE_SECONDS)
        if not ended:  # else the others would take it for a death, and may still be at their end
            self.lifelines.close()

    def _propose(self, number: int, before: Decision, here: list[int]) -> None:
        """Of the workers that are ``here``, and those that ask to join and can be reached."""
        addresses = self._promptly(partial(self._asking, before.asked))
        asked = before.asked + len(addresses)
        missed = self.lifelines.watch(addresses)
        newcomers = sorted(set(addresses) - set(missed) - self.lifelines.lost())

        def propose() -> None:
            board = self.board.within(f"view/{number}")
            new = [worker for worker in here if board.get(f"here/{worker}")]
            decision = Decision(sorted({*here, *newcomers}), sorted([*new, *newcomers]), asked)
            board.first("decided", asdict(decision))

        self._promptly(propose)

    def _asking(self, first: int) -> dict[int, str]:
        """Addresses of those that have taken a number from ``first`` on."""
        found: dict[int, str] = {}
        while (address := self.board.get(f"address/{first + len(found)}")) is not None:
            found[first + len(found)] = address
        return found

    def _addresses(self, workers: Iterable[int]) -> dict[int, str]:
        """Of those that have one."""

        def read() -> dict[int, str]:
            found = {worker: self.board.get(f"address/{worker}") for worker in workers}
            return {worker: address for worker, address in found.items() if address is not None}

        return self._promptly(read)

    def _watch(self, members: tuple[int, ...]) -> list[int]:
        unwatched = [w for w in members if w != self.worker and not self.lifelines.leads_to(w)]
        return self.lifelines.watch(self._addresses(unwatched)) if unwatched else []

    def _lost(self, members: tuple[int, ...]) -> list[int]:
        """Their ranks in the view."""
        lost = self.lifelines.lost()
        return [rank for rank, worker in enumerate(members) if worker in lost]

    def _promptly(self, function: Callable[[], T]) -> T:
        who = f"rank {self.worker}: agreeing on who goes on failed"
        return self.board.promptly(function, who, seconds=self.timeout_seconds)


class StoreMembership:
    """See ``Membership``; through the store of the process group.

    Attributes:
        view: Set once the view is open.
    """

    view: View

    def __init__(self, participant: Participant, number: int, decision: Decision) -> None:
        self._participant, self._number, self._decision = participant, number, decision
        others = frozenset(decision.members) - {participant.worker}
        self._watch = Watch(
            participant.board, f"view/{number + 1}/wanted", participant.lifelines, others
        )

    def wanted(self) -> bool:
        """See there, as of all methods."""
        self._participant.heard = time.monotonic()
        return self._watch.look()

    def regroup(self, *, view: int, step: int) -> View:
        """Agree on who goes on."""
        self._watch.close()
        return self._participant.go_on(view, self._decision, step=step)

    def leave(self, *, ended: bool) -> None:
        """Go for good."""
        self._watch.close()
        self._participant.leave(self._number, ended=ended)


def open_elastic(
    group: dist.ProcessGroup | None,
    timeout_seconds: float,
    *,
    silence_seconds: float = SILENCE_SECONDS,
) -> Communicator:
    """A communicator of the members of ``group`` that has a ``membership``. A collective.

    Args:
        group: A process group of gloo; None is the default group.
        timeout_seconds: How long one operation may take.
        silence_seconds: How long a view change waits for one that is silent, if that is less.

    Raises:
        AttachError: another backend, or this process is not a member.
        CommunicationError: a worker did not come, or the store does not answer.
    """
    if dist.get_rank(group) < 0:
        raise AttachError("this process is not a member of the group given to attach()")
    backend = str(dist.get_backend(group))
    if backend != "gloo":
        raise AttachError(
            f"min_workers needs a process group of gloo, got {backend}: its groups "
            "cannot be opened without all that began (gloo takes tensors on a GPU, too)"
        )
    factory = GroupFactory.of(group)
    keys, size = factory.keys(), factory.size
    base = base_of(keys)
    everyone, lifelines = Board(base, place_of(base)), Lifelines()

    def begin() -> Board:
        name = f"{TRAINING}/{Board(keys, everyone.where).first('name', uuid.uuid4().hex)}"
        board = everyone.within(name)
        board.put(f"address/{factory.rank}", lifelines.address)
        if factory.rank == 0:
            board.put("size", size)
            everyone.put(TRAINING, name)
        if kept_here(base):
            board.put("keeper", factory.rank)
            logger.warning(
                "rank %d keeps the store of the process group: training cannot go on without it. "
                'Keep the store in a process of its own, see "Elastic training"',
                factory.rank,
            )
        return board

    who = f"rank {factory.rank}: attaching failed"
    board = everyone.promptly(begin, who)
    participant = Participant(
        factory.rank,
        board,
        lifelines,
        timeout_seconds=timeout_seconds,
        silence_seconds=silence_seconds,
    )
    first = Decision(list(range(size)), [], size)
    view = participant.enter(0, first, timeout_seconds)
    keeper = everyone.promptly(
        lambda: board.get("keeper"), f"rank {factory.rank}: attaching failed"
    )
    if keeper is not None:
        board.where += f", which rank {keeper} kept,"
    return view.communicator
