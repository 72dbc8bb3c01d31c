"""Data injection: in each step some workers send some of their samples to all other workers.

In each step the workers exchange samples in one collective. They therefore take their steps
together: a worker that waits for samples does nothing else. With a strategy whose workers do not
wait for each other, two workers could block each other. Such strategies are refused.
"""

import copy
import io
import math
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.arguments import require_integer, require_number
from offbeat.errors import AttachError, MismatchError
from offbeat.synchronizer import Synchronizer, components_of
from offbeat.training.checks.compatibility import require_blocking

Tensors = dict[str, Tensor]
"""The tensors of a batch by their paths, such as ``batch[0]``."""

_SENDERS, _SAMPLES = 4, 5  # generators are seeded by (seed, purpose, 0, …); these are purposes
_ENDED = b""  # message of a worker without a batch; others begin with the step
_STEP_BYTES = 8


class DataInjection:
    """Wraps a data loader and adds samples of other workers to its batches.

    In each step, with N workers whose loaders give batches of b' samples:

        senders = ⌈α·N⌉ workers, drawn at random (all workers draw the same)
        sent_m  = max(1, ⌊β·b' + ½⌋) samples of the loader batch of sender m, drawn at random
        batch_n = loader batch of worker n, then sent_m of each sender m ≠ n, in rank order

    A sender sends the same samples to all workers, and trains on them, too. ``injected_batch_size``
    computes a b' that compensates for the added samples.

    All workers take their batches together, and wait for each other in each step. When the loader
    of one worker ends, the iteration ends on all workers at this step, and a batch that another
    worker has just loaded is dropped. A loop that is left early, as with ``break``, or that calls
    ``consensus()``, must do so on all workers at the same step. Otherwise the other workers wait
    for ``timeout_seconds`` and raise a ``CommunicationTimeout``.

    Args:
        loader: Iterable of batches that can be iterated repeatedly, such as a DataLoader. A batch
            consists of tensors with the samples in dimension 0. Tuples, lists and dictionaries may
            contain them, nested to any depth. Batches of all workers have the same structure,
            dtypes and shapes except for the number of samples.
        alpha: Fraction α of workers that send in each step, in (0, 1].
        beta: Fraction β of its batch that each sender sends, in (0, 1].
        sync: Synchronizer of the training, from ``attach``. Its workers exchange samples. The
            strategy lets workers wait for each mean, such as ``BSP``, ``LocalSGD``, ``SelSync``,
            ``FedAvg``, or ``DiLoCo`` without ``overlap``.
        seed: Seed of all random choices, equal on all workers.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range.
        AttachError: The strategy does not let workers wait for each mean. Or the synchronizer is
            finished, or was attached with ``node_group`` or ``min_workers``.
        MismatchError: Another worker has other settings.

    The constructor is a collective.

    *Communication*: in each step one message of each worker to all others, before the batch is
    returned. ``payload_bytes`` does not include it, but the time counts as waiting.
    ``sync.stats.details`` has the totals ``injected_samples`` (received),
    ``injected_bytes_received``, ``injected_samples_sent`` and ``injected_bytes_sent``. What a
    sender sends counts once for each receiver. *Memory*: the samples of all senders of one step.

    *Differs from the paper*: batch sizes are rounded.

    Source: Tyagi & Swany, arXiv 2307.07950, data injection for non-IID data, and Equation 3.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        alpha: float,
        beta: float,
        *,
        sync: Synchronizer,
        seed: int = 0,
    ) -> None:
        _require_fraction("alpha", alpha)
        _require_fraction("beta", beta)
        require_integer("seed", seed, least=None)
        if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
            raise TypeError(
                "loader must be an iterable of batches that can be iterated again, such as a "
                f"DataLoader, got {type(loader).__name__}"
            )
        self._components = components_of(sync, "DataInjection()")
        team = self._components.team
        require_blocking(self._components.strategy, "data injection")
        given = {"node_group": team.node, "min_workers": self._components.views}
        for option, value in given.items():
            if value is not None:
                raise AttachError(f"{option} cannot be combined with data injection")
        self.loader, self._sync = loader, sync
        self.alpha, self.beta, self.seed = alpha, beta, seed
        self._step = 0
        # Without accounting, because the strategy does not send the samples.
        self._communicator = team.uncounted.twin()
        self._require_equal_settings()

    def _require_equal_settings(self) -> None:
        own = ", ".join(f"{name}={value!r}" for name, value in self._settings().items())
        what = "comparison of data injection"
        first, *others = self._communicator.gather_bytes(own.encode(), what=what)
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise MismatchError(
                    f"data injection: rank {rank} has {other.decode()}, rank 0 has {first.decode()}"
                )

    def _settings(self) -> dict[str, Any]:
        return {"alpha": float(self.alpha), "beta": float(self.beta), "seed": int(self.seed)}

    def __len__(self) -> int:
        """Number of batches of the loader, if the loader has a length."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the loader's batches, extended by samples of other workers."""
        components_of(self._sync, "iterating over DataInjection")
        return iter(self.loader) if self._communicator.size == 1 else self._inject()

    def _inject(self) -> Iterator[Any]:
        for batch in self.loader:
            extended = self._exchange(batch)
            if extended is None:
                return
            yield extended
        self._gather(_ENDED)

    def _gather(self, payload: bytes) -> list[bytes]:
        """Return the message of every worker. A collective. Blocks."""
        components, now = self._components, self._communicator.host.now
        what = f"injected samples at step {components.worker.step + 1}"
        started = now()
        with components.iteration.guard:
            payloads = self._communicator.gather_bytes(payload, what=what)
        components.team.account.waited(now() - started)
        return payloads

    def _exchange(self, batch: Any) -> Any | None:
        """Return the extended batch. None if the loader of another worker has ended."""
        rank, size = self._communicator.rank, self._communicator.size
        own, sent = _tensors(batch, "batch"), list[Tensors]()
        payload = self._step.to_bytes(_STEP_BYTES, "big")
        samples = _count_samples(own)
        senders = draw_senders(self.seed, self._step, size, self.alpha)
        if rank in senders:
            drawn = draw_samples(self.seed, self._step, rank, samples, self.beta)
            rows = {path: _take(tensor, drawn) for path, tensor in own.items()}
            payload, sent = payload + _encode(rows), [rows] * (size - 1)
        payloads = self._gather(payload)
        if _ENDED in payloads:
            return None
        for other, message in enumerate(payloads):
            if (step := int.from_bytes(message[:_STEP_BYTES], "big")) != self._step:
                raise MismatchError(
                    f"data injection: rank {other} is at step {step}, rank {rank} at step "
                    f"{self._step}: load checkpoints of the same step on all workers"
                )
        self._step += 1
        received = [
            _decode(payloads[other][_STEP_BYTES:], other, own) for other in senders if other != rank
        ]
        self._count(sent, "injected_samples_sent", "injected_bytes_sent")
        self._count(received, "injected_samples", "injected_bytes_received")
        joined = [_join(tensor, [rows[path] for rows in received]) for path, tensor in own.items()]
        return _replace(batch, iter(joined))

    def _count(self, parcels: Iterable[Tensors], samples: str, bytes: str) -> None:
        """Add the samples in ``parcels`` and their bytes to two totals of ``stats.details``."""
        details = self._components.worker.details
        details.update({name: details.get(name, 0) for name in (samples, bytes)})
        for rows in parcels:
            details[samples] += _count_samples(rows)
            details[bytes] += sum(tensor.nbytes for tensor in rows.values())

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and the number of steps so far, as plain values.

        All workers must save their states at the same step. The position in the dataset is not
        included; save it with the sampler.
        """
        return {**self._settings(), "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict()``. Call before the first iteration.

        Raises:
            ValueError: The state was saved with other settings.
        """
        for name, value in self._settings().items():
            if state[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, this DataInjection has "
                    f"{name}={value}"
                )
        self._step = state["step"]


# -- random choices --------------------------------------------------------------------------------


def injected_batch_size(batch_size: int, alpha: float, beta: float, workers: int) -> int:
    """Return the batch size b' for a loader whose batches have about b samples after injection.

    This is Equation 3 of the paper, rounded to the nearest integer and at least 1:

        b' = max(1, ⌊b / (1 + α·β·N) + ½⌋)

    In each step there are S = ⌈α·N⌉ senders, which send k = max(1, ⌊β·b' + ½⌋) samples each. After
    injection a batch has B = b' + S·k samples. On a sender it has only B − k, because a sender
    does not receive its own samples. B differs from b, because α·N, b' and k are rounded.

    Example: for b = 32, α = β = 1/2 and N = 10, b' is 9 and B is 9 + 5·5 = 34. A sender has 29
    samples, and the mean over the workers is 31.5.

    Args:
        batch_size: Desired number b of samples per step (≥ 1).
        alpha: Fraction α of workers that send, in (0, 1].
        beta: Fraction β of its own samples that each sender sends, in (0, 1].
        workers: Number of workers N (≥ 1).

    Raises:
        TypeError: An argument is not a number, or not an integer.
        ValueError: An argument is out of its range.

    Source: Tyagi & Swany, arXiv 2307.07950, Equation 3.
    """
    _require_fraction("alpha", alpha)
    _require_fraction("beta", beta)
    for name, value in (("batch_size", batch_size), ("workers", workers)):
        require_integer(name, value, least=1)
    return max(1, math.floor(_clean(batch_size / (1 + alpha * beta * workers)) + 0.5))


def count_to_send(samples: int, beta: float) -> int:
    """Return how many of its ``samples`` a sender sends: β·samples, rounded, and at least 1."""
    return min(samples, max(1, math.floor(_clean(beta * samples) + 0.5)))


def draw_senders(seed: int, step: int, workers: int, alpha: float) -> list[int]:
    """Draw the ⌈α·N⌉ senders of a step. The ranks are ascending, and equal on all workers."""
    return _draw(workers, math.ceil(_clean(alpha * workers)), seed, _SENDERS, step)


def draw_samples(seed: int, step: int, rank: int, samples: int, beta: float) -> list[int]:
    """Draw the samples that sender ``rank`` sends in a step: positions in its batch, ascending."""
    return _draw(samples, count_to_send(samples, beta), seed, _SAMPLES, step, rank)


def _draw(population: int, count: int, seed: int, purpose: int, *numbers: int) -> list[int]:
    # With the 0 the draws are those with which the published results were made.
    random = np.random.default_rng([seed % 2**64, purpose, 0, *numbers])
    drawn: list[int] = np.sort(random.choice(population, count, replace=False)).tolist()
    return drawn


def _clean(value: float) -> float:
    return round(value, 9)  # 0.07 · 100 becomes 7 instead of 7.000000000000001


def _require_fraction(name: str, value: object) -> None:
    require_number(name, value)
    if not 0 < value <= 1:  # type: ignore[operator]  # it is a number
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}")


# -- batches ---------------------------------------------------------------------------------------


def _tensors(batch: Any, path: str) -> Tensors:
    if isinstance(batch, Tensor):
        return {path: batch}
    if not isinstance(batch, MutableMapping | list | tuple):
        raise TypeError(
            f"{path} is a {type(batch).__name__}: data injection takes batches of tensors, in "
            "tuples, lists and dictionaries"
        )
    children = batch.items() if isinstance(batch, MutableMapping) else enumerate(batch)
    found: Tensors = {}
    for key, child in children:
        found.update(_tensors(child, f"{path}[{key!r}]"))
    return found


def _replace(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a copy of ``batch`` with other tensors, in the order of ``_tensors``."""
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, MutableMapping):
        copied = copy.copy(batch)  # keeps the other attributes of a subclass of dict
        copied.update({key: _replace(child, tensors) for key, child in batch.items()})
        return copied
    children = [_replace(child, tensors) for child in batch]
    return type(batch)(*children) if hasattr(batch, "_fields") else type(batch)(children)


def _count_samples(tensors: Tensors) -> int:
    shapes = {path: list(tensor.shape) for path, tensor in tensors.items()}
    counts = {tuple(shape[:1]) for shape in shapes.values()}
    if len(counts) != 1 or () in counts:
        raise ValueError(
            f"a batch needs tensors with one entry per sample in dimension 0, got shapes {shapes}"
        )
    return int(counts.pop()[0])


def _take(tensor: Tensor, drawn: list[int]) -> Tensor:
    index = torch.tensor(drawn, dtype=torch.int64, device=tensor.device)
    return tensor.detach().index_select(0, index).cpu()


def _encode(rows: Tensors) -> bytes:
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    return buffer.getvalue()


def _decode(payload: bytes, sender: int, own: Tensors) -> Tensors:
    """Return the samples of worker ``sender``, which must have the structure of ``own``."""
    rows: Tensors = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    if _describe(rows) != _describe(own):
        raise MismatchError(
            f"rank {sender} sent samples of {_describe(rows)}; this rank has {_describe(own)}: "
            "data injection needs batches with the same structure, dtypes and shapes on all "
            "workers, except for the number of samples"
        )
    return rows


def _describe(tensors: Tensors) -> str:
    shapes = {path: ", ".join(["*", *map(str, t.shape[1:])]) for path, t in tensors.items()}
    return ", ".join(f"{path}: {t.dtype} of shape [{shapes[path]}]" for path, t in tensors.items())


def _join(own: Tensor, pieces: Iterable[Tensor]) -> Tensor:
    joined = torch.cat([own, *(piece.to(own.device) for piece in pieces)])
    return joined.pin_memory() if own.is_pinned() else joined
