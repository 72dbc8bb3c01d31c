"""Keeps the workers of this machine running until the training has ended."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from offbeat.launcher.output import Outputs, report
from offbeat.launcher.signals import Interruption, signal_name
from offbeat.launcher.worker import StartProcess, Worker

if TYPE_CHECKING:
    from offbeat.launcher.store import LaunchStore

_POLL_SECONDS = 0.05
_ASK_SECONDS = 0.5  # time between two reads of the store, while a worker does not train yet


class Supervisor:
    """Starts workers, copies their output, and restarts those that fail.

    Args:
        workers: The workers of this machine.
        start: Starts a process of a worker.
        variables: Environment variables of the workers.
        training: Tells whether the training has ended.
        interruption: The signal that ends the workers early, if one arrives.
        grace_seconds: Time from this signal until workers that still run are killed.
    """

    def __init__(
        self,
        workers: list[Worker],
        start: StartProcess,
        variables: Mapping[str, str],
        training: "LaunchStore",
        interruption: Interruption,
        grace_seconds: float,
    ) -> None:
        self._workers, self._start_process, self._variables = workers, start, variables
        self._training, self._interruption = training, interruption
        self._grace_seconds = grace_seconds
        self._outputs = Outputs()
        self._forwarded = False  # True once the signal has been sent to the workers
        self._given_up: list[int] = []  # exit codes of workers that failed too often
        self._failed_afterwards: list[int] = []  # exit codes of failures after the training
        self._has_trained = False  # True once a worker has begun to train
        self._is_broken = False  # True once the script has failed on all workers before that
        self._asked_at = 0.0

    def run(self) -> int:
        """Run the workers until none is active, and return the exit code of the launcher.

        The first of these cases determines the code:

        - A signal n has arrived: 128 + n.
        - The training has ended: the code of the first process that finished it and failed
          afterwards, or 0.
        - A worker was given up: its code, that of the first one if there are several.
        - Otherwise: 0.
        """
        try:
            while not self._is_broken and any(worker.is_active for worker in self._workers):
                self._handle_signal()
                for worker in self._workers:
                    if worker.due is not None and worker.due <= time.monotonic():
                        self._start(worker)
                # Poll before copying: the output of an ended worker is then complete when its end
                # is reported.
                ended = [(worker, how) for worker in self._workers if (how := worker.poll())]
                self._outputs.copy(0.0 if ended else _POLL_SECONDS)
                for worker, how in ended:
                    self._after_end(worker, how)
                self._report_training()
        finally:
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                worker.wait()
            self._outputs.close()
        if self._interruption.signal is not None:
            return 128 + self._interruption.signal
        failures = self._given_up
        if self._training.training_has_ended():
            report("the training has ended")
            failures = self._failed_afterwards
        return failures[0] if failures else 0

    def _start(self, worker: Worker) -> None:
        again = worker.starts > 0
        if again and self._training.training_has_ended():
            worker.due = None
            report(f"worker {worker.number} is not started again: the training has ended")
            # The training may have ended before this worker failed, while the store was silent.
            self._record_late_failure(worker)
            return
        try:
            with self._outputs.open(worker.number) as (out, errors):
                worker.start(self._start_process, self._variables, out, errors)
        except (OSError, EOFError) as error:  # EOFError: the fork server could not fork
            reason = str(error) or "the fork server has ended"
            worker.start_failed()
            self._after_end(worker, f"could not be started ({reason})")
            return
        report(f"worker {worker.number} started{' again' * again} (process {worker.pid})")

    def _after_end(self, worker: Worker, how: str) -> None:
        """Report the end of a worker's process, and plan the next one if there has to be one."""
        what = f"worker {worker.number} {how}"
        count = worker.starts - 1
        restarts = f", restarted {count} time{'s' * (count > 1)}" * (count > 0)
        if worker.code == 0 or self._interruption:
            report(f"{what}{restarts}")
        elif self._training.training_has_ended():
            report(f"{what}, after the end of the training{restarts}")
            self._record_late_failure(worker)
        elif self._script_is_broken():
            report(f"{what}; not again: the script fails before training begins")
            self._given_up.append(worker.code)
            self._is_broken = True
        else:
            self._training.report_death(worker.process_key)
            plan = worker.plan_restart()
            report(f"{what}; {plan}")
            if worker.due is None:
                self._given_up.append(worker.code)

    def _script_is_broken(self) -> bool:
        """Return True if the script has failed on all workers, and none has ever begun to train.

        A signal or an error of communication does not count, because a restart may mend it.
        """
        for worker in self._workers:
            self._note_training(worker)
        return not self._has_trained and all(worker.script_failed for worker in self._workers)

    def _record_late_failure(self, worker: Worker) -> None:
        """Keep the exit code of a worker whose process has failed, if it matters.

        The training has ended. So a process that failed before it had finished the training itself
        is not needed any more. One that failed later, even by a signal of the kernel (out of
        memory), may not have saved its model.
        """
        if self._training.has_finished(worker.process_key):
            self._failed_afterwards.append(worker.code)

    def _report_training(self) -> None:
        """Report the workers that have begun to train."""
        waiting = [each for each in self._workers if each.process and not each.trains]
        if not waiting or time.monotonic() < self._asked_at + _ASK_SECONDS:
            return
        self._asked_at = time.monotonic()
        for worker in waiting:
            self._note_training(worker)

    def _note_training(self, worker: Worker) -> None:
        if worker.trains or not worker.process_key:
            return
        if (rank := self._training.rank_of(worker.process_key)) is not None:
            worker.trains = self._has_trained = True
            report(f"worker {worker.number} trains as rank {rank}")

    def _handle_signal(self) -> None:
        interruption, grace = self._interruption, self._grace_seconds
        if interruption.signal is None:
            return
        if not self._forwarded:
            self._forwarded = True
            name = signal_name(interruption.signal)
            deadline = f"those that still run after {grace:g} s are killed"
            report(f"{name}: forwarded to the workers; {deadline}")
            for worker in self._workers:
                worker.due = None
                worker.send(interruption.signal)
        elif time.monotonic() >= interruption.since + grace:
            for worker in self._workers:
                worker.kill()
