"""Workers that share a board, run in turns: a random order of their operations, deaths included."""

import random
import threading
from collections.abc import Callable

from typing_extensions import override

from offbeat.transport.board import Board, LocalBoard


class KilledError(BaseException):
    """Ends the thread of a worker that is killed."""


class Turns:
    """Runs threads in turns. A thread gives its turn away before and after each operation.

    Attributes:
        lost: Workers whose death the others have noticed.
    """

    def __init__(self, seed: int, kills: int = 0) -> None:
        self.random, self.kills = random.Random(seed), kills
        self.values = LocalBoard()
        self.lost: set[int] = set()
        self._turn: dict[int, threading.Semaphore] = {}
        self._given = threading.Semaphore(0)
        self._over: set[int] = set()
        self._killed: set[int] = set()
        self._boards: dict[int, TurnBoard] = {}
        self._errors: list[BaseException] = []

    def start(self, worker: int, work: Callable[[Board], None]) -> None:
        turn = self._turn[worker] = threading.Semaphore(0)
        board = self._boards[worker] = TurnBoard(self, worker)

        def run() -> None:
            turn.acquire()
            try:
                work(board)
            except KilledError:
                pass
            except BaseException as error:
                self._errors.append(error)
            self._over.add(worker)
            self._given.release()

        threading.Thread(target=run, daemon=True).start()

    def give(self, worker: int) -> None:
        """Let others run, until this worker has its turn again."""
        self._given.release()
        self._turn[worker].acquire()
        if worker in self._killed:
            raise KilledError

    def run(self, restart: Callable[[int], None] = lambda worker: None) -> None:
        """Run all threads to their ends. ``restart`` is called with each worker that was killed."""
        unnoticed: list[int] = []
        for _ in range(200_000):
            alive = [worker for worker in self._turn if worker not in self._over]
            if not alive:
                break
            worker = self.random.choice(alive)
            if self.kills and len(alive) > 1 and self.random.random() < 0.01:
                self.kills -= 1
                self._killed.add(worker)
                unnoticed.append(worker)
            if unnoticed and self.random.random() < 0.1:
                worker_lost = unnoticed.pop(0)
                self.lost.add(worker_lost)
                restart(worker_lost)
            if self.random.random() < 0.3:  # a write on its way arrives
                self.random.choice([*self._boards.values()]).arrive()
            self._turn[worker].release()
            assert self._given.acquire(timeout=20), "a worker hangs"
        else:
            raise AssertionError("the workers do not end")
        for board in self._boards.values():
            board.arrive()
        self.lost.update(unnoticed)
        if self._errors:
            raise self._errors[0]


class TurnBoard(Board):
    """One worker's access to the board. A write arrives late, but before the next request."""

    def __init__(self, turns: Turns, worker: int) -> None:
        self._turns, self._worker = turns, worker
        self._writes: list[tuple[str, str]] = []

    def arrive(self) -> None:
        for write in self._writes:
            self._turns.values.put(*write)
        self._writes.clear()

    def _request(self) -> LocalBoard:
        self._turns.give(self._worker)  # it may be killed before
        self.arrive()
        return self._turns.values

    @override
    def add(self, key: str, amount: int) -> int:
        total = self._request().add(key, amount)
        self._turns.give(self._worker)  # or after the operation
        return total

    @override
    def compare_set(self, key: str, expected: str, value: str) -> str:
        result = self._request().compare_set(key, expected, value)
        self._turns.give(self._worker)
        return result

    @override
    def get(self, key: str) -> str:
        result = self._request().get(key)
        self._turns.give(self._worker)
        return result

    @override
    def put(self, key: str, value: str) -> None:
        self._turns.give(self._worker)
        self._writes.append((key, value))
        self._turns.give(self._worker)
