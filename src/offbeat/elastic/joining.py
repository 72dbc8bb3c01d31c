"""How a new process comes into a training that is under way."""

import os
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from offbeat.elastic.agreement import SILENCE_SECONDS, TRAINING, Decision, Participant
from offbeat.elastic.heartbeats import Lifelines
from offbeat.elastic.store import Board
from offbeat.errors import AttachError, CommunicationError, CommunicationTimeout
from offbeat.transport.communicator import Communicator, Transport
from offbeat.transport.membership import View

_LOOK_SECONDS = 0.05  # between looks whether the others have agreed
_CONNECT_SECONDS = 30.0
_MORE_SECONDS = 1.0  # than its time-out: how long torch may take to notice that
_ATTEMPTS = 2  # each ends a view of the members


def join(address: str | None = None) -> Transport:
    """What a new worker gives to ``attach(..., group=...)``, to join a training that goes on.

    That training was attached with ``min_workers``. The new process calls no
    ``init_process_group``. Its ``attach`` waits until the others take it in, at the end of a step
    of theirs, at most ``timeout_seconds``. If several trainings use the store, that which began
    last is joined.

    Args:
        address: Of the store of their process group: ``host:port``, or ``file://`` and a path.
            None takes it from ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        ValueError: no such address.
    """
    if address is None:
        variables = "MASTER_ADDR", "MASTER_PORT"
        if missing := [name for name in variables if not os.environ.get(name)]:
            raise ValueError(
                f"join() needs the address of the store, as in join('10.0.0.1:29500'), or "
                f"{' and '.join(missing)} in the environment"
            )
        address = ":".join(os.environ[name] for name in variables)
    host, _, port = address.rpartition(":")
    if not address.startswith("file://") and not (host and port.isdecimal()):
        raise ValueError(f"the address of a store is host:port or file://path, got {address!r}")
    return Newcomer(address)


class Newcomer(Transport):
    """Makes communicators that come with a view change of others.

    Args:
        address: Of the store.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        """Ask to join, and wait until the members have agreed.

        Raises:
            AttachError: that training has ended.
            CommunicationError: nobody keeps a store there.
            CommunicationTimeout: nobody has taken this worker in.
        """
        deadline = time.monotonic() + timeout_seconds
        everyone = Board(self._open_store(timeout_seconds), self._address)
        for _ in range(_ATTEMPTS):
            name = self._await(everyone, TRAINING, deadline, timeout_seconds)
            board = everyone.within(name)
            lifelines = Lifelines()
            try:
                worker = board.promptly(partial(_take_number, board, lifelines), "joining failed")
                participant = Participant(
                    worker,
                    board,
                    lifelines,
                    timeout_seconds=timeout_seconds,
                    silence_seconds=SILENCE_SECONDS,
                )
                view = self._ask(participant, deadline)
            except BaseException:
                lifelines.close()
                raise
            if view is not None:
                return view.communicator
            lifelines.close()
        raise CommunicationError(
            f"joining failed: the members cannot reach this process at {lifelines.address}. Name "
            "the network interface that joins you to them in GLOO_SOCKET_IFNAME"
        )

    def _ask(self, participant: Participant, deadline: float) -> View | None:
        """The view that has taken this worker in; None if one has passed it over."""
        board, worker = participant.board, participant.worker
        what = f"rank {worker}: joining failed"
        number = board.promptly(lambda: board.get("latest") or 0, what)
        asked = False
        while time.monotonic() < deadline:
            following = board.within(f"view/{number + 1}")
            ended = board.promptly(partial(board.get, "ended"), what)
            decided = board.promptly(partial(following.get, "decided"), what)
            if ended is not None:
                raise AttachError(f"rank {worker}: the training at {board.where} has ended")
            if decided is not None:
                number, asked = number + 1, False
                decision = Decision(**decided)
                if worker in decision.members:
                    return participant.begin(number, decision)
                if decision.asked > worker:
                    return None
            elif not asked:
                asked = True
                board.promptly(partial(following.put, "wanted", True), what)
            else:
                time.sleep(_LOOK_SECONDS)
        raise CommunicationTimeout(
            f"{what}: the members at {board.where} have not begun another view within "
            f"timeout_seconds={participant.timeout_seconds:g}: raise it in "
            "attach(..., timeout_seconds=...) if their steps may take that long"
        )

    def _open_store(self, timeout_seconds: float) -> Any:
        path = self._address.removeprefix("file://")
        if path != self._address:
            if not os.path.exists(path):
                raise CommunicationError(f"joining failed: there is no store at {self._address}")
            return dist.FileStore(path)  # type: ignore[attr-defined]
        host, _, port = self._address.rpartition(":")
        seconds = min(timeout_seconds, _CONNECT_SECONDS)
        made: list[Any] = []
        said = ["no answer"]

        def connect() -> None:
            try:
                made.append(
                    dist.TCPStore(  # type: ignore[attr-defined]
                        *(host, int(port)),
                        is_master=False,
                        wait_for_workers=False,
                        timeout=timedelta(seconds=seconds),
                    )
                )
            except RuntimeError as error:
                said[:] = [str(error).splitlines()[0][:200]]

        # It has no time-out for one that listens and does not answer, as one that is stopped.
        thread = threading.Thread(target=connect, name="store", daemon=True)
        thread.start()
        thread.join(seconds + _MORE_SECONDS)
        if made:
            return made[0]
        raise CommunicationError(
            f"joining failed: nobody keeps a store at {self._address} (none found within "
            f"{seconds:g} s): {said[0]}"
        )

    def _await(self, board: Board, key: str, deadline: float, timeout_seconds: float) -> str:
        while time.monotonic() < deadline:
            value = board.promptly(lambda: board.get(key), "joining failed")
            if value is not None:
                return str(value)
            time.sleep(_LOOK_SECONDS)
        raise CommunicationTimeout(
            f"joining failed: no training with min_workers has begun at "
            f"{self._address} within timeout_seconds={timeout_seconds:g}"
        )


def _take_number(board: Board, lifelines: Lifelines) -> int:
    """The first that nobody has, and with it the place among those that ask."""
    number = int(board.get("size"))
    while board.first(f"address/{number}", lifelines.address) != lifelines.address:
        number += 1
    return number
