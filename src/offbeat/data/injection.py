"""Data injection: in every step some workers give some of their samples to all others."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist

from offbeat.arguments import require_integer
from offbeat.data.exchange import Answer, Exchange, Key
from offbeat.data.samples import Parcel, count_samples, join, take
from offbeat.data.senders import draw_samples, draw_senders, require_fraction
from offbeat.elastic.connect import open_communicator
from offbeat.errors import MismatchError, OffbeatError
from offbeat.synchronizer import Synchronizer, background_tasks_of
from offbeat.training.compatibility import require_timeout
from offbeat.transport.handle import Handle, explained
from offbeat.transport.team import Team


@dataclass
class _Ahead:
    """A batch that is loaded, and the answers on their way, by rank."""

    key: Key
    batch: Any
    answers: dict[int, Handle[Answer]]


class DataInjection:
    """Wraps a loader so that workers with different data see some of each other's.

    In step t of worker n, N workers:

        senders_t = ⌈α·N⌉ workers, drawn anew by (seed, t), the same on all workers
        give_m    = ⌊β·b' + ½⌋ of the b' samples of worker m's own batch t, drawn; at least 1
        batch_t   = own batch t, then give_m of every sender m ≠ n, in the order of ranks

    Own batches should be smaller than without: see ``injected_batch_size``. A sender gives the same
    samples to all; it goes on training on them, too.

    Workers ask each other for samples; the next batch is loaded, and asked for, before the present
    one is handed out, so samples travel while the model computes. A worker waits for a sender that
    has not come to the step yet. One that has no batch for it gives nothing: it is in
    ``consensus()`` or ``finish()``, or has left. So workers may take different numbers of steps.
    Steps are counted anew after every ``consensus()``. While all have taken equally many, batches
    do not depend on who is faster. Afterwards a worker may be in its strategy waiting for one that
    waits for its samples: then that one goes on without them.

    Without ``sync``, a worker at the end of its loader gives nothing until it is iterated again.
    Call ``close`` at the end, or use it as a context manager. Loaders of different lengths then
    need ``pause()``, a barrier and ``resume()`` on all workers between epochs, or they drift apart.

    With one worker the batches are the loader's.

    Args:
        loader: Any iterable of batches that can be iterated again, such as a DataLoader. A batch is
            a tensor, or tuples, lists, dictionaries, named tuples and dataclasses of tensors and of
            lists of numbers or strings, each with one entry a sample. It is the same structure on
            all workers, with tensors that differ in the number of samples alone.
        alpha: α in (0, 1], the fraction of workers that send in each step.
        beta: β in (0, 1], the fraction of its batch that each sends.
        sync: The synchronizer of the training, from ``attach``. Its workers take part, samples are
            counted in its ``stats.details``, and it is told about ``consensus()`` and the end.
        group: The process group of the workers, if there is no ``sync``; None is the default group.
        seed: Seed of all draws, the same on all workers.
        dimension: Which dimension of the tensors counts samples.
        timeout_seconds: How long to wait for another worker; with ``sync``, its own counts.

    Attributes:
        loader: As given.
        samples_received: From others, so far.
        bytes_received: Their bytes.

    Raises:
        TypeError: an argument of another type.
        ValueError: one out of its range, or both ``sync`` and ``group``.
        AttachError: no process group, or a synchronizer that is finished.
        MismatchError: other settings on another worker.

    A collective: every worker makes it alike.

    *Communication*: ⌈α·N⌉ parcels of samples to each worker in each step, in the background; a
    sender sends N−1 of them. ``sync.stats.details`` counts ``injected_samples``,
    ``injected_bytes_received``, ``injected_samples_sent`` and ``injected_bytes_sent``. Waiting for
    samples counts as waiting. *Memory*: one more batch, and parcels until all have asked for
    them.

    *Differs from the paper*: workers need not be at the same step.

    Source: Tyagi & Swany, arXiv 2307.07950, data injection for non-IID data, and Equation 3.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        alpha: float,
        beta: float,
        *,
        sync: Synchronizer | None = None,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        dimension: int = 0,
        timeout_seconds: float = 300.0,
    ) -> None:
        require_fraction("alpha", alpha)
        require_fraction("beta", beta)
        require_integer("seed", seed, least=None)
        require_integer("dimension", dimension, least=0)
        if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
            raise TypeError(
                "loader must be an iterable of batches that can be iterated again, such as a "
                f"DataLoader, got {type(loader).__name__}"
            )
        self.loader = loader
        self.alpha, self.beta, self.seed, self.dimension = alpha, beta, seed, dimension
        self.samples_received = self.bytes_received = 0
        self._counted = [0, 0, 0, 0]  # what the details hold already
        self._step = 0  # of the next batch that is loaded, since the last meeting
        self._epoch = -1
        self._iterations = 0
        self._ahead: _Ahead | None = None
        self._resumed: Key | None = None
        self._closed = False
        self._synced = sync is not None
        self._details: dict[str, Any] = {}
        self._exchange: Exchange | None = None
        self._steps_taken: Callable[[], int] = lambda: 0
        if sync is None:
            require_timeout(timeout_seconds)
            self._team = Team(open_communicator(group, timeout_seconds, what="DataInjection()"))
        else:
            if group is not None:
                raise ValueError("give sync or group, not both: the synchronizer has a group")
            tasks = background_tasks_of(sync)
            tasks.add(self)
            self._team, self._details = tasks.team.twin(), tasks.details
            self._steps_taken = tasks.step
        steps = self._agree()
        if self._team.size > 1:
            self._exchange = Exchange(self._team)
            own = steps[self._team.rank]
            others = [rank for rank, taken in enumerate(steps) if taken != own]
            self._exchange.start_at(0, None, others)

    def _agree(self) -> list[int]:
        """Raise unless all workers were given the same settings; gives the steps of each."""
        names = ("alpha", "beta", "seed", "dimension")
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        what = "comparison of data injection"
        text = f"{settings}\n{self._steps_taken()}".encode()
        gathered = self._team.uncounted.gather_bytes(text, what=what)
        everyone = [one.decode().split("\n") for one in gathered]
        for rank, (other, _) in enumerate(everyone):
            if other != everyone[0][0]:
                raise MismatchError(
                    f"data injection: rank {rank} has {other}, rank 0 has {everyone[0][0]}"
                )
        return [int(steps) for _, steps in everyone]

    # -- what the user reads -----------------------------------------------------------------

    @property
    def samples_sent(self) -> int:
        """Samples given to others, each as often as it was sent."""
        return 0 if self._exchange is None else self._exchange.samples_sent

    @property
    def bytes_sent(self) -> int:
        """Their bytes."""
        return 0 if self._exchange is None else self._exchange.bytes_sent

    def __len__(self) -> int:
        """Batches of an epoch of this worker, if the loader knows."""
        return len(self.loader)  # type: ignore[arg-type]

    # -- batches -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """The loader's batches, each with what the senders of its step give."""
        if self._closed:
            raise OffbeatError("this DataInjection has left the others: make a new one")
        if self._exchange is None:
            return iter(self.loader)
        return self._inject(self._exchange)

    def _inject(self, exchange: Exchange) -> Iterator[Any]:
        self._epoch += 1
        self._iterations += 1
        iteration = self._iterations
        if not self._synced:
            exchange.end_epoch(-1)
        own = iter(self.loader)
        try:
            self._ahead = self._load(own, exchange)
            while self._ahead is not None:
                present = self._ahead
                self._ahead = self._load(own, exchange)
                yield self._complete(present, exchange)
        finally:
            if iteration == self._iterations:  # else another iteration has begun meanwhile
                self._ahead = None
                if not self._synced:
                    exchange.end_epoch(self._epoch)

    def _load(self, own: Iterator[Any], exchange: Exchange) -> _Ahead | None:
        """Load the next batch, publish what this worker gives of it, and ask the other senders."""
        try:
            batch = next(own)
        except StopIteration:
            if not self._synced:
                exchange.end_epoch(self._epoch)
            return None
        key = self._number(exchange)
        rank = self._team.rank
        senders = draw_senders(self.seed, key, self._team.size, self.alpha)
        exchange.publish(key, self._parcel(key, batch) if rank in senders else None)
        others = [sender for sender in senders if sender != rank]
        answers = {other: exchange.ask(other, key, self._epoch) for other in others}
        return _Ahead(key, batch, answers)

    def _number(self, exchange: Exchange) -> Key:
        if self._resumed is not None:
            key, self._resumed = self._resumed, None
            return key
        self._step += 1
        return exchange.meeting, self._step - 1

    def _parcel(self, key: Key, batch: Any) -> Parcel | None:
        samples = count_samples(batch, self.dimension)
        if samples == 0:
            return None
        chosen = draw_samples(self.seed, key, self._team.rank, samples, self.beta)
        return take(batch, chosen, self.dimension)

    def _complete(self, present: _Ahead, exchange: Exchange) -> Any:
        """The own batch and the answers, when all have come."""
        parcels = []
        for rank, handle in present.answers.items():
            if not handle.done():
                exchange.hurry(rank, present.key)
            answer = handle.wait()
            if isinstance(answer, Exception):
                raise explained(answer)
            if answer is not None:
                parcels.append((rank, answer))
        joined = join(present.batch, parcels, self.dimension)
        self.samples_received += joined.samples
        self.bytes_received += joined.values_bytes
        self._count()
        return joined.batch

    def _count(self) -> None:
        """Add what is new to the synchronizer's totals."""
        totals = {
            "injected_samples": self.samples_received,
            "injected_bytes_received": self.bytes_received,
            "injected_samples_sent": self.samples_sent,
            "injected_bytes_sent": self.bytes_sent,
        }
        for (name, total), before in zip(totals.items(), self._counted, strict=True):
            self._details[name] = self._details.get(name, 0) + total - before
        self._counted = list(totals.values())

    # -- where this worker is ----------------------------------------------------------------

    def set_blocking(self, blocking: bool) -> None:
        """The strategy may block from now on, or no longer. Called by ``sync``."""
        if self._exchange is not None:
            self._exchange.busy(blocking)

    def pause(self) -> None:
        """This worker loads nothing until all workers are at a barrier. Called by ``sync``."""
        if self._exchange is not None:
            self._exchange.away(self._steps_taken())

    def resume(self) -> None:
        """The barrier has ended; steps count from 0 again. All workers call it equally often."""
        if self._exchange is not None:
            self._exchange.back()
            self._step = 0

    def finish(self) -> None:
        """End: notify all other workers and wait for their answers. Calling it again does nothing.

        The other workers continue and receive nothing from this one any more. ``sync.finish()``
        calls it.

        Raises:
            CommunicationError: another worker is lost.
        """
        self._closed = True
        if self._exchange is not None:
            self._exchange.leave()
            self._count()
        if not self._synced:
            self._team.close()

    def close(self) -> None:
        """``finish``, whatever state the other workers are in. Never raises."""
        with contextlib.suppress(OffbeatError):
            self.finish()

    def __enter__(self) -> "DataInjection":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Which step comes next, as plain values. Every worker saves at the same step.

        The place in the data is the sampler's to save.
        """
        meeting = 0 if self._exchange is None else self._exchange.meeting
        pending = None if self._ahead is None else list(self._ahead.key)
        settings = {"alpha": self.alpha, "beta": self.beta, "seed": self.seed}
        out_of_phase = [] if self._exchange is None else self._exchange.out_of_phase
        return {
            **settings,
            "meeting": meeting,
            "step": self._step,
            "pending": pending,
            "out_of_phase": out_of_phase,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``, before the first iteration.

        Raises:
            ValueError: it was saved with other settings.
        """
        for name in ("alpha", "beta", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, this DataInjection has "
                    f"{name}={getattr(self, name)}"
                )
        self._step = state["step"]
        self._resumed = None if state["pending"] is None else (*state["pending"],)
        if self._exchange is not None:
            self._exchange.start_at(state["meeting"], self._resumed, state["out_of_phase"])
