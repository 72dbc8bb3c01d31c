"""Simulated workers: one thread each, of which exactly one runs at a time.

A worker runs until it waits for something in virtual time. Then the kernel goes on, and resumes
whoever is next. Random state (torch, numpy, random) belongs to the worker, as in a process. What a
worker does in the background (a parameter server) has a thread of its own, and ends with the run.
"""

import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.simulate.kernel import Kernel, Signal
from offbeat.simulate.randomness import RandomState

_PACKAGE = str(Path(__file__).parent.parent)


class DeadlockError(OffbeatError):
    """Simulated workers wait for something that can never happen."""


class _StoppedError(BaseException):
    """Ends the thread of a worker whose simulation is over. No ``Exception``: nobody catches it."""


class SimulatedWorker:
    """One worker and its thread.

    Attributes:
        rank: Its number.
        result: What its function returned.
        error: What its function raised.
        started_seconds: Virtual time at its beginning.
        finished_seconds: Virtual time at its end; None while it runs.
        waits_in: The operation it waits in.
        random: Its random state, while another worker runs; None of an activity.
        background: Whether it is an activity beside the worker of this rank. It must not use
            random numbers.
        over: Whether it was killed.
    """

    def __init__(self, rank: int, seed: int, *, background: bool = False) -> None:
        self.rank = rank
        self.background = background
        self.over = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.started_seconds = 0.0
        self.finished_seconds: float | None = None
        self.waits_in = ""
        self.thread: threading.Thread | None = None
        self.turn = threading.Semaphore(0)
        self.random = None if background else RandomState.seeded(seed, rank)


class Workers:
    """Runs one function per worker in virtual time.

    Args:
        kernel: The clock.
        size: How many workers.
        seed: Seed of their random states.
    """

    def __init__(self, kernel: Kernel, size: int, seed: int) -> None:
        self.kernel, self._seed = kernel, seed
        self.all = [SimulatedWorker(rank, seed) for rank in range(size)]
        self._background: list[SimulatedWorker] = []
        self._current: SimulatedWorker | None = None
        self._loaded: SimulatedWorker | None = None  # whose random state torch holds
        self._back = threading.Semaphore(0)
        self._stopping = False
        self._function: Callable[[SimulatedWorker], Any] = lambda worker: None
        self._paused: dict[int, float] = {}  # by rank: until when

    # -- called by the simulation, outside of the workers ----------------------------------------

    def run(self, function: Callable[[SimulatedWorker], Any]) -> None:
        """Run ``function`` on every worker to the end of all.

        Raises:
            DeadlockError: nobody can go on.
            Exception: what a worker raised, with a note that names its rank.
        """
        outside = RandomState.current()
        self._function = function
        for worker in self.all:
            self._start(worker, function, "starts")
        try:
            while self.kernel.step():
                everybody = (*self.all, *self._background)
                failed = next((worker for worker in everybody if worker.error), None)
                if failed is not None and failed.error is not None:
                    failed.error.add_note(
                        f"in simulated worker {failed.rank} at {self.kernel.now:.6f} virtual s"
                    )
                    raise failed.error
            if any(worker.finished_seconds is None for worker in self.all):
                raise DeadlockError(self._describe_deadlock())
        finally:
            self._stop()
            outside.load()

    def _start(
        self, worker: SimulatedWorker, function: Callable[[SimulatedWorker], Any], label: str
    ) -> None:
        worker.thread = threading.Thread(
            target=self._live,
            args=(worker, function),
            name=f"simulated worker {worker.rank}",
            daemon=True,
        )
        self._resume_at(worker, self.kernel.now, label)

    def _resume_at(self, worker: SimulatedWorker, seconds: float, label: str) -> None:
        self.kernel.at(seconds, lambda: self._resume(worker), f"rank {worker.rank} {label}")

    def _resume(self, worker: SimulatedWorker) -> None:
        if worker.over:
            return
        if self.kernel.now < self._paused.get(worker.rank, 0.0):
            return self._resume_at(worker, self._paused[worker.rank], "is let go on")
        self._let_run(worker)

    def _let_run(self, worker: SimulatedWorker) -> None:
        if self._loaded is not worker and not worker.background:
            self._load_random(worker)
        self._current = worker
        assert worker.thread is not None
        if worker.thread.ident is None:
            worker.thread.start()
        else:
            worker.turn.release()
        self._back.acquire()
        self._current = None

    def _load_random(self, worker: SimulatedWorker) -> None:
        """The random state of the process becomes that of ``worker``."""
        if self._loaded is not None and self._loaded.random is not None:
            self._loaded.random.save()
        assert worker.random is not None
        worker.random.load()
        self._loaded = worker

    def kill(self, rank: int) -> bool:
        """End a worker and its activities where they are; false if it has ended already."""
        if self.all[rank].finished_seconds is not None:
            return False
        for worker in (self.all[rank], *(one for one in self._background if one.rank == rank)):
            if worker.finished_seconds is None:  # else its thread may be about to end
                worker.over = True
                if worker.thread is not None and worker.thread.is_alive():
                    self._let_run(worker)
                worker.finished_seconds = self.kernel.now
        return True

    def pause(self, rank: int, seconds: float) -> None:
        """Let a worker and its activities stand still for so long."""
        self._paused[rank] = max(self._paused.get(rank, 0.0), self.kernel.now + seconds)

    def join(self) -> int:
        """Start another worker. Returns its rank."""
        worker = SimulatedWorker(len(self.all), self._seed)
        worker.started_seconds = self.kernel.now
        self.all.append(worker)
        self._start(worker, self._function, "starts")
        return worker.rank

    def _stop(self) -> None:
        """End the threads that still wait."""
        self._stopping = True
        for worker in (*self.all, *self._background):
            if worker.thread is not None and worker.thread.is_alive():
                worker.turn.release()
                worker.thread.join(timeout=10)

    def _describe_deadlock(self) -> str:
        lines = [f"deadlock at {self.kernel.now:.6f} virtual s (seed {self._seed}):"]
        for worker in self.all:
            if worker.finished_seconds is not None:
                lines.append(f"  rank {worker.rank} finished at {worker.finished_seconds:.6f} s")
            else:
                lines.append(
                    f"  rank {worker.rank} waits in {worker.waits_in} at {_user_line(worker)}"
                )
        lines.append("the last events:")
        lines += [f"  {seconds:.6f} s  {label}" for seconds, label in self.kernel.recent]
        return "\n".join(lines)

    # -- called on a worker's own thread ---------------------------------------------------------

    def _live(self, worker: SimulatedWorker, function: Callable[[SimulatedWorker], Any]) -> None:
        try:
            worker.result = function(worker)
            worker.finished_seconds = self.kernel.now
        except _StoppedError:
            pass
        except BaseException as error:
            worker.error = None if worker.over else error
        if not self._stopping:
            self._back.release()

    @property
    def current(self) -> SimulatedWorker:
        """The worker whose thread runs now."""
        assert self._current is not None
        return self._current

    def spawn(self, activity: Callable[[], None], what: str) -> None:
        """Run ``activity`` beside the running worker, with a thread of its own."""
        beside = SimulatedWorker(self.current.rank, self._seed, background=True)
        self._background = [one for one in self._background if one.finished_seconds is None]
        self._background.append(beside)
        self._start(beside, lambda _: activity(), f"starts {what}")

    def wait(self, signal: Signal, what: str) -> None:
        """Block the running worker until ``signal``; virtual time passes."""
        worker = self.current
        if worker.over:  # it still unwinds
            raise _StoppedError
        if signal.happened:
            return
        worker.waits_in = what
        signal.then(lambda: self._resume_at(worker, self.kernel.now, f"goes on after {what}"))
        self._back.release()
        worker.turn.acquire()
        if self._stopping or worker.over:
            raise _StoppedError
        worker.waits_in = ""

    def sleep(self, seconds: float, what: str) -> None:
        """Let virtual ``seconds`` pass for the running worker."""
        signal = Signal()
        rank = self.current.rank
        self.kernel.at(self.kernel.now + seconds, signal.fire, f"rank {rank} ends {what}")
        self.wait(signal, what)


def _user_line(worker: SimulatedWorker) -> str:
    """The innermost source line outside of Offbeat and torch at which a worker waits."""
    thread = worker.thread
    frame = sys._current_frames().get(thread.ident) if thread and thread.ident else None
    for entry in reversed(traceback.extract_stack(frame) if frame else ()):
        inside = entry.filename.startswith(_PACKAGE) or entry.filename == threading.__file__
        if not inside and "/torch/" not in entry.filename:
            return f"{entry.filename}:{entry.lineno} ({entry.line})"
    return "an unknown line"
