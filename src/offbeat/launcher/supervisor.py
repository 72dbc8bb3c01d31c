"""Keeps the workers of this machine running until the training has ended."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TypeAlias

from offbeat.elastic import reports
from offbeat.launcher.output import Lines, report, write
from offbeat.launcher.script import FINAL, TEMPORARY

_PAUSES_SECONDS = 0.1, 0.5, 2.0, 8.0, 30.0  # before each restart; the last one from then on
_FORGET_SECONDS = 60.0  # a worker that has trained this long has recovered from its last failure
_LAST_OUTPUT_SECONDS = 1.0  # wait for the output of an ended worker; others may hold its pipes
_END_SECONDS = 10.0  # limit for a killed process to end
# ``finish`` returns when all members of the training have called it. So the others have left a
# worker behind that still runs so long after it. It is stuck, unless it does something else.
_STUCK_SECONDS = 600.0
# In multiprocessing, if the fork server has ended. This process then has its workers as children.
_UNKNOWN = 255

StartProcess: TypeAlias = Callable[[Mapping[str, str], list[Connection]], BaseProcess]
"""Starts a process with additional environment variables and three pipes, which it writes to:
standard output, standard error and reports."""


class Supervisor:
    """Starts workers, copies their output, and restarts those that fail.

    Args:
        start: Starts a process of a worker.
        workers: Number of workers of this machine.
        max_restarts: Number of restarts after which a worker is given up. Training for a minute
            resets the count.
        grace_seconds: Time from a signal until workers that still run are killed.
    """

    def __init__(
        self, start: StartProcess, workers: int, max_restarts: int, grace_seconds: float
    ) -> None:
        self._start, self._workers = start, workers
        self._max_restarts, self._grace_seconds = max_restarts, grace_seconds
        self._signal: int | None = None  # the signal that ends this launcher
        self._stopping = asyncio.Event()  # set when no worker is to be started any more
        self._running: dict[int, BaseProcess] = {}
        self._finished: set[int] = set()  # the workers whose process has finished the training
        self._trains_since: dict[int, float] = {}  # when workers have begun to train
        self._failures: list[tuple[int, int]] = []  # worker and code, if no restart followed

    async def run(self) -> int:
        """Run the workers until none is left, and return the exit code of the launcher.

        The first of these cases determines the code:

        - A signal n has arrived: 128 + n.
        - The training has ended: the code of the first process that finished it and failed
          afterwards, or 0.
        - A worker was given up: its code, that of the first one if there are several.
        - Otherwise: 0.

        The first SIGTERM or SIGINT is forwarded to the workers. A second one ends this process at
        once, and the workers notice that.
        """
        loop = asyncio.get_running_loop()

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self._signal is not None:
                os._exit(128 + number)
            self._signal = number
            loop.call_soon_threadsafe(self._stopping.set)

        for number in (signal.SIGTERM, signal.SIGINT):
            # A background job of a shell script ignores SIGINT, and must continue to ignore it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        keepers = [asyncio.create_task(self._keep(number)) for number in range(self._workers)]
        done = asyncio.gather(*keepers)
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((done, stopped), return_when=asyncio.FIRST_COMPLETED)
            if self._signal is not None:
                grace = f"those that still run after {self._grace_seconds:g} s are killed"
                report(f"{signal_name(self._signal)}: forwarded to the workers; {grace}")
                for process in self._running.values():
                    assert process.pid is not None
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, self._signal)
                await asyncio.wait((done,), timeout=self._grace_seconds)
        finally:
            self._stopping.set()
            for process in self._running.values():
                _kill(process)
            await asyncio.wait(keepers, timeout=_END_SECONDS)
        await done
        if self._signal is not None:
            return 128 + self._signal
        finished = self._finished
        codes = (code for number, code in self._failures if number in finished or not finished)
        return next(codes, 0)

    async def _keep(self, number: int) -> None:
        """Run worker ``number``, and restart it after failures."""
        starts = restarts = 0
        while self._signal is None and not self._stopping.is_set():
            if starts and self._finished:
                report(f"worker {number} is not started again: the training has ended")
                return
            began = time.monotonic()
            status, how = await self._run(number, starts)
            starts += 1
            # One that has only waited, for others or for the model, may do so again and again.
            trained = self._trains_since.get(number, 0.0)
            if trained >= began and time.monotonic() >= trained + _FORGET_SECONDS:
                restarts = 0
            if status == 0 or self._stopping.is_set():
                report(f"worker {number} {how}")
                return
            if reason := self._why_final(number, status, restarts):
                report(f"worker {number} {how}; not again: {reason}")
                self._failures.append((number, status if status > 0 else 128 - status))
                return
            pause = _PAUSES_SECONDS[min(restarts, len(_PAUSES_SECONDS) - 1)]
            restarts += 1
            report(
                f"worker {number} {how}; again in {pause:g} s ({restarts} of {self._max_restarts})"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def _why_final(self, number: int, status: int, restarts: int) -> str | None:
        """Return why no restart follows an exit status. None if one does."""
        if number in self._finished:
            return "it had finished the training"
        if status == FINAL:
            return "a restart would not mend this error"
        if status > 0 and status != TEMPORARY and not self._trains_since:
            self._stopping.set()
            return "the script fails before training begins"
        return f"--max-restarts {restarts}" if restarts >= self._max_restarts else None

    async def _run(self, number: int, starts: int) -> tuple[int, str]:
        """Run one process of worker ``number``, which has had ``starts`` processes before.

        Returns its exit status, −n after the signal n, and how it ended.
        """

        def on_report(line: bytes) -> None:
            text = line.decode()
            report(f"worker {number} {text}")
            self._trains_since[number] = time.monotonic()
            if text == reports.FINISHED:
                if not self._finished:
                    asyncio.get_running_loop().call_later(_STUCK_SECONDS, self._kill_stuck)
                self._finished.add(number)

        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
        variables = {"LOCAL_RANK": str(number), "OFFBEAT_RESTARTS": str(starts)}
        try:
            process = self._start(variables, [end for _, end in pipes])
        except (OSError, EOFError) as error:
            for read, _ in pipes:
                read.close()
            lost = isinstance(error, EOFError)  # it could not fork, and has ended by that
            reason = "the fork server has ended" if lost else str(error)
            return TEMPORARY, f"could not be started ({reason})"
        finally:
            for _, end in pipes:
                end.close()
        assert process.pid is not None
        self._running[number] = process
        if self._signal is not None:  # it has arrived while this process was being started
            _kill(process)
        report(f"worker {number} started{' again' * (starts > 0)} (process {process.pid})")
        prefix = f"[{number}] ".encode()
        readers = partial(_copy, prefix, 1), partial(_copy, prefix, 2), on_report
        lines = [Lines(reader) for reader in readers]
        for each, (read, _) in zip(lines, pipes, strict=True):
            await each.read(read)
        status = await _exit_status(process)
        del self._running[number]
        _kill(process)  # the processes that it has started
        await asyncio.gather(*(each.close(_LAST_OUTPUT_SECONDS) for each in lines))
        with contextlib.suppress(ChildProcessError):  # this process may have inherited them
            while os.waitpid(-process.pid, os.WNOHANG)[0]:
                pass
        if status < 0:
            return status, f"was ended by {signal_name(-status)}"
        return status, f"ended with exit code {status}" if status else "ended"

    def _kill_stuck(self) -> None:
        """Kill the workers that have not finished the training, and still run."""
        for number, process in self._running.items():
            if number not in self._finished:
                late = f"{_STUCK_SECONDS:g} s after the end of the training"
                report(f"worker {number} still runs {late}, and is killed")
                _kill(process)


def _copy(prefix: bytes, target: int, line: bytes) -> None:
    write(target, prefix + line + b"\n")


def _kill(process: BaseProcess) -> None:
    """Kill a process and those that it has started."""
    assert process.pid is not None
    process.kill()  # a new process may not be in its group yet
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _exit_status(process: BaseProcess) -> int:
    """Wait until a process has ended, and return its exit status: −n after the signal n."""
    assert process.pid is not None
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        # The kernel tells of the end even if there is no fork server any more.
        linux = sys.platform == "linux"
        descriptor = os.pidfd_open(process.pid) if linux else os.dup(process.sentinel)
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.join(_END_SECONDS)
    if process.exitcode in (None, _UNKNOWN):
        with contextlib.suppress(ChildProcessError):  # inherited from the fork server
            return os.waitstatus_to_exitcode(os.waitpid(process.pid, os.WNOHANG)[1])
    return _UNKNOWN if process.exitcode is None else process.exitcode


def signal_name(number: int) -> str:
    """Return ``"SIGKILL"`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
