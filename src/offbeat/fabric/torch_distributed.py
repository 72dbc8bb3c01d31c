"""The communicator of real workers, on ``torch.distributed`` (gloo or NCCL).

It opens process groups of its own, so that its operations never interleave with the user's: one
for the work, one (gloo) that is used only to find out who is missing after a failure.
"""

import atexit
import copy
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import AttachError, CommunicationError, CommunicationTimeout
from offbeat.fabric.communicator import Communicator, Handle, Promise
from offbeat.fabric.health import Health, hang_up

T = TypeVar("T")
_FOREVER = timedelta(days=365)
_FAREWELL_SECONDS = 5.0


class _Work(Handle[Tensor]):
    def __init__(
        self,
        communicator: "TorchCommunicator",
        start: Callable[[], dist.Work | None],
        result: Tensor,
        what: str,
        *,
        patient: bool = False,
    ) -> None:
        self._communicator, self._result, self._what = communicator, result, what
        self._patient = patient
        self._started = time.perf_counter()
        self._ended = False
        try:
            self._work = start()
        except RuntimeError as error:
            raise communicator.failure(what, self._started, error) from None

    def done(self) -> bool:
        return self._ended or self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        if not self._ended and self._work is not None:
            try:
                self._work.wait(*([_FOREVER] if self._patient else []))
            except RuntimeError as error:
                raise self._communicator.failure(self._what, self._started, error) from None
        self._ended = True
        return self._result


class _BackgroundError(CommunicationError):
    """An operation of a background activity failed."""

    def __init__(self, what: str, started: float, error: RuntimeError) -> None:
        super().__init__(f"{what} failed: {_first_line(error)}")
        self.origin = (what, started, error)


class _Late(Promise[T]):
    """A promise that, when it is late, asks who is missing."""

    def __init__(self, communicator: "TorchCommunicator", what: str) -> None:
        super().__init__(what, communicator.timeout_seconds)
        self._communicator, self._started = communicator, time.perf_counter()

    def late(self) -> CommunicationError:
        error = RuntimeError("no answer")
        return self._communicator.failure(self.what, self._started, error)


class TorchCommunicator(Communicator):
    """Operations over a ``torch.distributed`` process group.

    Args:
        group: The group whose members take part; None is the default group.
        timeout_seconds: How long one operation may take before it fails on every worker.

    Raises:
        AttachError: no process group was initialised, or this process is not a member.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise AttachError("this process is not a member of the group given to attach()")
        self.backend = str(dist.get_backend(group))
        members = dist.get_process_group_ranks(group)
        self._members = members
        self._groups: list[dist.ProcessGroup | None] = []  # shared with twins, as is what follows
        self._failed: list[CommunicationError] = []
        self._failing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._group = self._new_group(self.backend)
        # Messages travel between CPUs: NCCL has none from any sender.
        self._messages = self._group if self.backend == "gloo" else self._new_group("gloo")
        self._health = Health(members)

    def _new_group(self, backend: str) -> dist.ProcessGroup | None:
        limit = timedelta(seconds=self.timeout_seconds)
        group: dist.ProcessGroup | None = dist.new_group(
            self._members, timeout=limit, backend=backend, use_local_synchronization=True
        )
        if backend == "gloo":
            self._groups.append(group)
        return group

    @property
    def control_device(self) -> torch.device:
        """The current GPU under NCCL, else the CPU."""
        if self.backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()

    def sum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """All-reduce by addition."""
        return _Work(
            self, lambda: dist.all_reduce(tensor, group=self._group, async_op=True), tensor, what
        )

    def maximum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """All-reduce by maximum."""
        operation = dist.ReduceOp.MAX
        return _Work(
            self,
            lambda: dist.all_reduce(tensor, op=operation, group=self._group, async_op=True),
            tensor,
            what,
        )

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str) -> Handle[Tensor]:
        """Broadcast from worker ``source`` of this communicator."""
        return _Work(
            self,
            lambda: dist.broadcast(tensor, group_src=source, group=self._group, async_op=True),
            tensor,
            what,
        )

    def gather(self, tensor: Tensor, *, what: str) -> Handle[list[Tensor]]:
        """All-gather."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        return _Work(
            self,
            lambda: dist.all_gather(parts, tensor, group=self._group, async_op=True),
            tensor,
            what,
        ).then(lambda _: parts)

    def send(self, tensor: Tensor, *, destination: int, tag: int = 0, what: str) -> Handle[Tensor]:
        """Point-to-point send."""
        return _Work(
            self,
            lambda: dist.isend(tensor, group=self._messages, group_dst=destination, tag=tag),
            tensor,
            what,
        )

    def receive(
        self, tensor: Tensor, *, source: int, tag: int = 0, what: str, patient: bool = False
    ) -> Handle[Tensor]:
        """Point-to-point receive."""
        return _Work(
            self,
            lambda: dist.irecv(tensor, group=self._messages, group_src=source, tag=tag),
            tensor,
            what,
            patient=patient,
        )

    def exchange(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """All-to-all."""
        result = torch.empty_like(tensor)
        return _Work(
            self,
            lambda: dist.all_to_all_single(result, tensor, group=self._group, async_op=True),
            result,
            what,
        )

    def twin(self) -> Communicator:
        """Another process group of the same workers."""
        twin = copy.copy(self)
        twin._group = self._new_group(self.backend)
        twin._messages = twin._group if self.backend == "gloo" else self._new_group("gloo")
        return twin

    def spawn(self, activity: Callable[[], None], *, what: str) -> None:
        """A daemon thread; one that still waits for a message when Python ends is woken first."""
        if not self._threads:
            atexit.register(self.close)  # Python would abort with a thread inside gloo
        thread = threading.Thread(target=activity, name=what, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Close the connections of all gloo groups, and let the threads end."""
        alive = [thread for thread in self._threads if thread.is_alive()]
        if alive:
            with self._failing:
                if not self._failed:
                    self._failed.append(CommunicationError(f"rank {self.rank} has given up"))
            for group in self._groups:
                hang_up(group)
            for thread in alive:
                thread.join(_FAREWELL_SECONDS)

    def promise(self, *, what: str) -> Promise[T]:
        """One that names who is missing when it is late."""
        return _Late(self, what)

    def failure(self, what: str, started: float, error: RuntimeError) -> CommunicationError:
        """The error to raise when an operation failed. Asks once who is still there."""
        elapsed = time.perf_counter() - started
        if threading.current_thread() in self._threads and not self._failed:
            return _BackgroundError(what, started, error)  # explained by the worker itself
        with self._failing:
            if not self._failed:
                self._failed.append(self._describe(what, elapsed, error))
        return self._failed[0]

    def explain(self, error: Exception) -> Exception:
        """With who is missing, which only the worker itself can find out, not its activities."""
        return self.failure(*error.origin) if isinstance(error, _BackgroundError) else error

    def _describe(self, what: str, elapsed: float, error: RuntimeError) -> CommunicationError:
        timed_out = elapsed >= 0.95 * self.timeout_seconds
        for group in self._groups:
            hang_up(group)
        gone, silent = self._health.missing()
        text = f"rank {self.rank}: {what} failed after {elapsed:.1f} s"
        if gone:
            text += f": lost the connection to {_ranks(gone)}, which died or gave up first"
        elif silent:
            text += (
                f": no answer from {_ranks(silent)}, busy elsewhere or stuck "
                "(one that skips a step under a GradScaler needs attach(..., scaler=scaler))"
            )
        if timed_out:
            text += (
                f". The time-out is timeout_seconds={self.timeout_seconds:g}: raise it in "
                "attach(..., timeout_seconds=...) if a worker may be that much slower"
            )
        kind = CommunicationTimeout if timed_out else CommunicationError
        return kind(f"{text}. {self.backend} said: {_first_line(error)}")


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _first_line(error: RuntimeError) -> str:
    """The backend's message without its source path and its small talk."""
    line = str(error).splitlines()[0]
    return line.rpartition("] ")[2].partition(". This is typically")[0][:200]
