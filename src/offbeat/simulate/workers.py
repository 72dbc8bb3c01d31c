"""Simulated workers. Each has its own thread, and only one of the threads runs at a time.

A worker runs until it has to wait. The kernel then executes events, in the order of *virtual time*
(the simulator's clock), until one of them resumes a worker. Every worker has its own random state
(torch, numpy, random), as if it were a process. A *background activity* of a worker, such as a
parameter server, has its own thread but no random state. It ends with the run at the latest.
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
    """Raised if no simulated worker can continue: they wait for events that never happen."""


class _StoppedError(BaseException):
    """Ends the thread of a stopped worker. ``except Exception`` in user code does not catch it."""


class SimulatedWorker:
    """One worker, or one of its background activities.

    Attributes:
        rank: Rank of the worker. A background activity has the rank of its worker.
        background: True for a background activity. It must not use random numbers.
        killed: True once the worker is killed.
        result: Return value of the worker's function.
        finished_seconds: Virtual time of the end; None before.
        waits_in: Name of the operation or computation that the worker awaits; empty while it runs.
        thread: The worker's thread; None before the start.
        turn: Semaphore for which the waiting thread blocks. Its release resumes the thread.
        random: Random state of the worker; None for a background activity.
    """

    def __init__(self, rank: int, seed: int, *, background: bool = False) -> None:
        self.rank = rank
        self.background = background
        self.killed = False
        self.result: Any = None
        self.finished_seconds: float | None = None
        self.waits_in = ""
        self.thread: threading.Thread | None = None
        self.turn = threading.Semaphore(0)
        self.random = None if background else RandomState.seeded(seed, rank)


class Workers:
    """Runs a function on all workers, in virtual time.

    Attributes:
        all: All workers, including those that joined later, by rank.
    """

    def __init__(self, kernel: Kernel, size: int, seed: int) -> None:
        self.kernel, self._seed = kernel, seed
        self.all = [SimulatedWorker(rank, seed) for rank in range(size)]
        self._background: list[SimulatedWorker] = []
        self._current: SimulatedWorker | None = None
        self._error: BaseException | None = None  # raised by a worker or background activity
        self._loaded: SimulatedWorker | None = None  # owner of the process's random state
        self._yielded = threading.Semaphore(0)  # released when the running worker waits or ends
        self._stopping = False
        self._function: Callable[[SimulatedWorker], Any] = lambda worker: None

    # -- called on the thread of the simulation --------------------------------------------------

    def run(self, function: Callable[[SimulatedWorker], Any]) -> None:
        """Run ``function`` on every worker until no event is left.

        Raises:
            DeadlockError: Some worker has not finished, and none can continue.
            Exception: A worker or background activity raised it. A note in it names the rank.
        """
        outside = RandomState.current()
        self._function = function
        for worker in self.all:
            self._start(worker, function, "starts")
        try:
            while self.kernel.step():
                if self._error is not None:
                    raise self._error
            if any(worker.finished_seconds is None for worker in self.all):
                raise DeadlockError(self._describe_deadlock())
        finally:
            self._stop()
            outside.load()

    def _start(
        self, worker: SimulatedWorker, function: Callable[[SimulatedWorker], Any], label: str
    ) -> None:
        worker.thread = threading.Thread(
            target=self._thread_main,
            args=(worker, function),
            name=f"simulated worker {worker.rank}",
            daemon=True,
        )
        self._resume_soon(worker, label)

    def _resume_soon(self, worker: SimulatedWorker, label: str) -> None:
        def resume() -> None:
            if not worker.killed:
                self._switch_to(worker)

        self.kernel.at(self.kernel.now, resume, f"rank {worker.rank} {label}")

    def _switch_to(self, worker: SimulatedWorker) -> None:
        """Let the thread of ``worker`` run until it waits or ends. Blocks until then."""
        if self._loaded is not worker and not worker.background:
            self._load_random(worker)
        self._current = worker
        assert worker.thread is not None
        if worker.thread.ident is None:
            worker.thread.start()
        else:
            worker.turn.release()
        self._yielded.acquire()
        self._current = None

    def _load_random(self, worker: SimulatedWorker) -> None:
        """Replace the random state of the process by that of ``worker``."""
        if self._loaded is not None and self._loaded.random is not None:
            self._loaded.random.save()
        assert worker.random is not None
        worker.random.load()
        self._loaded = worker

    def kill(self, rank: int) -> None:
        """End a worker and its background activities, as if its process were killed."""
        background = [activity for activity in self._background if activity.rank == rank]
        for worker in (self.all[rank], *background):
            if worker.finished_seconds is None:  # a finished thread ends by itself
                worker.killed = True
                if worker.thread is not None and worker.thread.is_alive():
                    self._switch_to(worker)
                worker.finished_seconds = self.kernel.now

    def add(self) -> None:
        """Start another worker. Its rank is the number of workers so far."""
        self.all.append(SimulatedWorker(len(self.all), self._seed))
        self._start(self.all[-1], self._function, "starts")

    def _stop(self) -> None:
        """End all threads that still run."""
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

    # -- called on the thread of a worker --------------------------------------------------------

    def _thread_main(
        self, worker: SimulatedWorker, function: Callable[[SimulatedWorker], Any]
    ) -> None:
        try:
            worker.result = function(worker)
            worker.finished_seconds = self.kernel.now
        except _StoppedError:
            pass
        except BaseException as error:
            if not worker.killed:
                error.add_note(
                    f"in simulated worker {worker.rank} at {self.kernel.now:.6f} virtual s"
                )
                self._error = error
        if not self._stopping:
            self._yielded.release()

    @property
    def current(self) -> SimulatedWorker:
        """The worker, or background activity, whose thread is running."""
        assert self._current is not None
        return self._current

    def spawn(self, activity: Callable[[], None], what: str) -> None:
        """Run ``activity`` as a background activity of the running worker."""
        background = SimulatedWorker(self.current.rank, self._seed, background=True)
        self._background = [each for each in self._background if each.finished_seconds is None]
        self._background.append(background)
        self._start(background, lambda _: activity(), f"starts {what}")

    def wait(self, signal: Signal, what: str) -> None:
        """Block the running worker until ``signal`` fires. Other workers run meanwhile."""
        worker = self.current
        if worker.killed:  # a ``finally`` block of the killed worker's function waits again
            raise _StoppedError
        if signal.happened:
            return
        worker.waits_in = what
        signal.then(lambda: self._resume_soon(worker, f"continues after {what}"))
        self._yielded.release()
        worker.turn.acquire()
        if self._stopping or worker.killed:
            raise _StoppedError
        worker.waits_in = ""

    def sleep(self, seconds: float, what: str) -> None:
        """Block the running worker for ``seconds`` of virtual time."""
        signal = Signal()
        rank = self.current.rank
        self.kernel.at(self.kernel.now + seconds, signal.fire, f"rank {rank} ends {what}")
        self.wait(signal, what)


def _user_line(worker: SimulatedWorker) -> str:
    """Return the source line of user code at which a worker waits."""
    thread = worker.thread
    frame = sys._current_frames().get(thread.ident) if thread and thread.ident else None
    for entry in reversed(traceback.extract_stack(frame) if frame else ()):
        inside = entry.filename.startswith(_PACKAGE) or entry.filename == threading.__file__
        if not inside and "/torch/" not in entry.filename:
            return f"{entry.filename}:{entry.lineno} ({entry.line})"
    return "an unknown line"
