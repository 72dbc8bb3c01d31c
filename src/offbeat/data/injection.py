"""Data injection: in each step some workers send some of their samples to all other workers."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from offbeat.arguments import require_integer
from offbeat.data.conversation import Key, Response
from offbeat.data.exchange import Exchange
from offbeat.data.samples import Parcel, count_samples, join, take
from offbeat.data.senders import draw_samples, draw_senders, require_fraction
from offbeat.elastic.connect import open_communicator
from offbeat.errors import MismatchError, OffbeatError
from offbeat.synchronizer import Synchronizer, background_tasks_of
from offbeat.training.checks.compatibility import require_timeout
from offbeat.transport.handle import Handle, explained
from offbeat.transport.team import Team


@dataclass
class _Loaded:
    """A batch that was loaded ahead of its step, and the requests to other workers, by rank."""

    key: Key
    batch: Any
    responses: dict[int, Handle[Response]]


class DataInjection:
    """Wraps a data loader and adds samples of other workers to its batches.

    In each step, with N workers whose loaders give batches of b' samples:

        senders = ⌈α·N⌉ workers, drawn at random (all workers draw the same)
        sent_m  = max(1, ⌊β·b' + ½⌋) samples of the loader batch of sender m, drawn at random
        batch_n = loader batch of worker n, then sent_m of each sender m ≠ n, in rank order

    A sender sends the same samples to all workers, and trains on them, too. ``injected_batch_size``
    computes a b' that compensates for the added samples.

    The samples of the next batch are in flight while the model computes. A worker waits for a
    sender that has not loaded its batch of the step yet. A sender sends nothing if it will load no
    batch for the step, because it has reached ``consensus()`` or ``finish()``, or because its
    loader has ended. So workers may take different numbers of steps.

    If all workers take the same number of steps before each ``consensus()``, the batches do not
    depend on the speed of the workers. Otherwise a worker may continue without the samples of a
    sender that is blocked in its strategy, because the two could wait for each other forever (see
    ``data/exchange.py``).

    Without ``sync``, call ``close`` at the end, or use the object as a context manager. If the
    loaders have different lengths, also call ``pause()``, a barrier of ``torch.distributed`` and
    ``resume()`` on all workers between epochs. Otherwise the step numbers of the workers diverge.

    Args:
        loader: Iterable of batches that can be iterated repeatedly, such as a DataLoader. A batch
            consists of tensors and lists of numbers or strings, each with one entry per sample.
            Tuples, lists, dictionaries, named tuples and dataclasses may contain them. Batches of
            all workers have the same structure, dtypes and shapes except for the number of samples.
        alpha: Fraction α of workers that send in each step, in (0, 1].
        beta: Fraction β of its batch that each sender sends, in (0, 1].
        sync: Synchronizer of the training, from ``attach``. Its workers exchange samples, its
            ``stats.details`` include the totals, and its ``finish`` ends data injection. None: data
            injection without a strategy.
        group: Process group of the workers, if ``sync`` is None. None: the default group.
        seed: Seed of all random choices, equal on all workers.
        dimension: Dimension of the tensors that counts samples (≥ 0).
        timeout_seconds: Longest time to wait for another worker (> 0). With ``sync``, the time-out
            of the synchronizer applies instead.

    Attributes:
        loader: The wrapped loader.
        samples_received: Number of samples received from other workers so far.
        bytes_received: Number of bytes of these samples.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or both ``sync`` and ``group`` are given.
        AttachError: There is no process group, the synchronizer is finished, or it was attached
            with ``node_group`` or ``min_workers``.
        MismatchError: Another worker has other settings.

    The constructor is a collective.

    *Communication*: in each step each sender sends its samples to the N − 1 other workers, in the
    background. ``sync.stats.details`` has the totals ``injected_samples`` (received),
    ``injected_bytes_received``, ``injected_samples_sent`` and ``injected_bytes_sent``. *Memory*:
    the next batch, and the samples to send until all workers have requested them.

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
        self._counted = [0, 0, 0, 0]  # totals that are already in ``_details``
        self._step = 0  # number of the next batch to load, counted since the last barrier
        self._epoch = -1  # number of the current iteration over the loader
        self._loaded: _Loaded | None = None
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
            out_of_phase = [rank for rank, taken in enumerate(steps) if taken != own]
            self._exchange.start_at(0, None, out_of_phase)

    def _agree(self) -> list[int]:
        """Compare the settings of all workers. Return the number of steps that each has taken."""
        names = ("alpha", "beta", "seed", "dimension")
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        what = "comparison of data injection"
        text = f"{settings}\n{self._steps_taken()}".encode()
        gathered = self._team.uncounted.gather_bytes(text, what=what)
        lines = [text.decode().split("\n") for text in gathered]
        for rank, (other, _) in enumerate(lines):
            if other != lines[0][0]:
                raise MismatchError(
                    f"data injection: rank {rank} has {other}, rank 0 has {lines[0][0]}"
                )
        return [int(steps) for _, steps in lines]

    # -- totals ----------------------------------------------------------------------------------

    @property
    def samples_sent(self) -> int:
        """Number of samples sent to other workers so far, counted once per receiver."""
        return 0 if self._exchange is None else self._exchange.samples_sent

    @property
    def bytes_sent(self) -> int:
        """Number of bytes of the samples sent so far."""
        return 0 if self._exchange is None else self._exchange.bytes_sent

    def __len__(self) -> int:
        """Number of batches of the loader, if the loader has a length."""
        return len(self.loader)  # type: ignore[arg-type]

    # -- batches ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the loader's batches, extended by samples of other workers."""
        if self._closed:
            raise OffbeatError("this DataInjection is closed: create a new one")
        if self._exchange is None:
            return iter(self.loader)
        return self._inject(self._exchange)

    def _inject(self, exchange: Exchange) -> Iterator[Any]:
        self._epoch += 1
        epoch = self._epoch
        if not self._synced:
            exchange.end_epoch(-1)
        own = iter(self.loader)
        try:
            self._loaded = self._load(own, exchange)
            while self._loaded is not None:
                current = self._loaded
                self._loaded = self._load(own, exchange)
                yield self._complete(current, exchange)
        finally:
            if epoch == self._epoch:  # False if a newer iteration over the loader has begun
                self._loaded = None
                if not self._synced:
                    exchange.end_epoch(epoch)

    def _load(self, own: Iterator[Any], exchange: Exchange) -> _Loaded | None:
        """Load the next batch, offer samples of it, and request samples. None at the end."""
        try:
            batch = next(own)
        except StopIteration:
            if not self._synced:
                exchange.end_epoch(self._epoch)
            return None
        key = self._next_key(exchange)
        rank = self._team.rank
        senders = draw_senders(self.seed, key, self._team.size, self.alpha)
        exchange.publish(key, self._parcel(key, batch) if rank in senders else None)
        others = [sender for sender in senders if sender != rank]
        responses = {other: exchange.request(other, key, self._epoch) for other in others}
        return _Loaded(key, batch, responses)

    def _next_key(self, exchange: Exchange) -> Key:
        if self._resumed is not None:
            key, self._resumed = self._resumed, None
            return key
        self._step += 1
        return exchange.barriers, self._step - 1

    def _parcel(self, key: Key, batch: Any) -> Parcel | None:
        samples = count_samples(batch, self.dimension)
        if samples == 0:
            return None
        chosen = draw_samples(self.seed, key, self._team.rank, samples, self.beta)
        return take(batch, chosen, self.dimension)

    def _complete(self, loaded: _Loaded, exchange: Exchange) -> Any:
        """Wait for the requested samples, and return the batch extended by them."""
        parcels = []
        for rank, handle in loaded.responses.items():
            if not handle.done():
                exchange.report_blocked(rank, loaded.key)
            response = handle.wait()
            if isinstance(response, Exception):
                raise explained(response)
            if response is not None:
                parcels.append((rank, response))
        joined = join(loaded.batch, parcels, self.dimension)
        self.samples_received += joined.samples
        self.bytes_received += joined.values_bytes
        self._count()
        return joined.batch

    def _count(self) -> None:
        """Add the increase of the totals since the last call to ``sync.stats.details``."""
        totals = {
            "injected_samples": self.samples_received,
            "injected_bytes_received": self.bytes_received,
            "injected_samples_sent": self.samples_sent,
            "injected_bytes_sent": self.bytes_sent,
        }
        for (name, total), before in zip(totals.items(), self._counted, strict=True):
            self._details[name] = self._details.get(name, 0) + total - before
        self._counted = list(totals.values())

    # -- background task of the synchronizer -----------------------------------------------------

    def set_blocking(self, blocking: bool) -> None:
        """Handle the start (True) or end of a call in which the strategy may block."""
        if self._exchange is not None:
            self._exchange.set_blocking(blocking)

    def pause(self) -> None:
        """Report that this worker has reached a *barrier*, where all workers wait for each other.

        If there is a ``sync``, it calls this method.
        """
        if self._exchange is not None:
            self._exchange.pause(self._steps_taken())

    def resume(self) -> None:
        """Leave a barrier. Step numbers restart at 0. All workers must call this equally often."""
        if self._exchange is not None:
            self._exchange.resume()
            self._step = 0

    def finish(self) -> None:
        """End data injection on this worker. Called by ``sync.finish()``. May be called again.

        Blocks until the background threads of all other workers have responded. The other workers
        may continue to train.

        Raises:
            CommunicationError: Another worker is lost.
        """
        self._closed = True
        if self._exchange is not None:
            self._exchange.close()
            self._count()
        if not self._synced:
            self._team.close()

    def close(self) -> None:
        """Call ``finish``, and ignore errors of Offbeat, such as the loss of another worker."""
        with contextlib.suppress(OffbeatError):
            self.finish()

    def __enter__(self) -> "DataInjection":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and the position in the sequence of steps, as plain values.

        All workers must save their states at the same step. The position in the dataset is not
        included; save it with the sampler.
        """
        exchange = self._exchange
        pending = None if self._loaded is None else list(self._loaded.key)
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "seed": self.seed,
            "dimension": self.dimension,
            "barriers": 0 if exchange is None else exchange.barriers,
            "step": self._step,
            "pending": pending,
            "out_of_phase": [] if exchange is None else exchange.out_of_phase,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict()``. Call before the first iteration.

        Raises:
            ValueError: The state was saved with other settings.
        """
        for name in ("alpha", "beta", "seed", "dimension"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, this DataInjection has "
                    f"{name}={getattr(self, name)}"
                )
        self._step = state["step"]
        self._resumed = None if state["pending"] is None else (*state["pending"],)
        if self._exchange is not None:
            self._exchange.start_at(state["barriers"], self._resumed, state["out_of_phase"])
