"""Data injection: in each step some workers send some of their samples to all other workers.

In each step, with N workers whose batches have b' samples of their own:

    senders = ⌈α·N⌉ workers, drawn at random (all workers draw the same)
    sent_m  = max(1, ⌊β·b' + ½⌋) samples of the batch of sender m, drawn at random
    batch_n = batch of worker n, then sent_m of each sender m ≠ n, in rank order

A sender sends the same samples to all workers, and trains on them, too. ``injected_batch_size``
computes a b' that compensates for the added samples.

The workers exchange the samples of a step in one collective, so they take their steps together. A
worker that waits for samples does nothing else. With a strategy whose workers do not wait for each
other, two workers could block each other; ``Job.check`` refuses these strategies.

Source: Tyagi & Swany, arXiv 2307.07950, data injection for non-IID data, and Equation 3. *Differs
from the paper*: batch sizes are rounded.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat import MismatchError
from offbeat_lab.evaluation import gather_bytes
from offbeat_lab.recipes.datasets import Batch

_SENDERS, _SAMPLES = 4, 5  # generators are seeded by (seed, purpose, 0, …); these are purposes
_STEP_BYTES = 8


class Injection(Iterable[Batch]):
    """Adds samples of other workers to the batches of this worker.

    *Communication*: in each step one message of each worker to all others, before the batch is
    returned. ``payload_bytes`` does not include it. *Memory*: the samples of all senders of one
    step.

    Args:
        batches: Batches of this worker in host memory, each a tuple or a list of tensors with the
            samples in dimension 0. All workers have equally many batches, with the same number of
            tensors, dtypes and shapes except for the number of samples.
        alpha: Fraction α of workers that send in each step, in (0, 1].
        beta: Fraction β of its batch that each sender sends, in (0, 1].
        seed: Seed of all random choices, equal on all workers.
        device: A device whose tensors the communication backend can send.
        now: This worker's clock, in seconds.

    Attributes:
        details: Totals ``injected_samples`` (received), ``injected_bytes_received``,
            ``injected_samples_sent`` and ``injected_bytes_sent``. What a sender sends counts once
            for each receiver.
        wait_seconds: Time of all exchanges so far.

    Iterating raises:
        TypeError: A batch is not a tuple or a list of tensors.
        MismatchError: Another worker is at another step.
        CommunicationError: A worker failed or took longer than the time-out.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        alpha: float,
        beta: float,
        *,
        seed: int,
        device: torch.device,
        now: Callable[[], float],
    ) -> None:
        self._batches, self._alpha, self._beta = batches, alpha, beta
        self._seed, self._device, self._now = seed, device, now
        self.wait_seconds = 0.0
        self.details = {"injected_samples": 0, "injected_bytes_received": 0}
        self.details |= {"injected_samples_sent": 0, "injected_bytes_sent": 0}

    def __iter__(self) -> Iterator[Batch]:
        for step, batch in enumerate(self._batches):
            if not (isinstance(batch, tuple | list) and all(isinstance(x, Tensor) for x in batch)):
                raise TypeError(
                    "data injection needs batches that are tuples or lists of tensors, got a "
                    f"{type(batch).__name__}: change the recipe's dataset or leave --injection out"
                )
            added = self._exchange(step, batch)
            yield tuple(map(torch.cat, zip(batch, *added, strict=True)))

    def _exchange(self, step: int, batch: Batch) -> list[Batch]:
        """Return the samples of the other senders of a step, in rank order. A collective."""
        rank, size = dist.get_rank(), dist.get_world_size()
        senders = draw_senders(self._seed, step, size, self._alpha)
        message = step.to_bytes(_STEP_BYTES, "big")
        if rank in senders:
            places = draw_samples(self._seed, step, rank, len(batch[0]), self._beta)
            drawn = torch.tensor(places, dtype=torch.int64)
            rows = tuple(tensor[drawn] for tensor in batch)
            message += _encode(rows)
            self.details["injected_samples_sent"] += (size - 1) * len(drawn)
            self.details["injected_bytes_sent"] += (size - 1) * _bytes_of(rows)
        start = self._now()
        messages = gather_bytes(message, self._device, f"injected samples at step {step + 1}")
        self.wait_seconds += self._now() - start
        for other, received in enumerate(messages):
            if (theirs := int.from_bytes(received[:_STEP_BYTES], "big")) != step:
                raise MismatchError(
                    f"data injection: rank {other} is at step {theirs}, rank {rank} at step {step}"
                )
        added = [_decode(messages[other][_STEP_BYTES:]) for other in senders if other != rank]
        self.details["injected_samples"] += sum(len(rows[0]) for rows in added)
        self.details["injected_bytes_received"] += sum(map(_bytes_of, added))
        return added


# -- random choices --------------------------------------------------------------------------------


def injected_batch_size(batch_size: int, alpha: float, beta: float, workers: int) -> int:
    """Return the batch size b' for batches that have about b samples after injection.

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
    """
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
    random = np.random.default_rng([seed, purpose, 0, *numbers])
    drawn: list[int] = np.sort(random.choice(population, count, replace=False)).tolist()
    return drawn


def _clean(value: float) -> float:
    return round(value, 9)  # 0.07 · 100 becomes 7 instead of 7.000000000000001


# -- messages --------------------------------------------------------------------------------------


def _encode(rows: Batch) -> bytes:
    buffer = io.BytesIO()
    # With these names the messages have the lengths with which the published results were made.
    torch.save({f"batch[{place}]": tensor for place, tensor in enumerate(rows)}, buffer)
    return buffer.getvalue()


def _decode(message: bytes) -> Batch:
    rows = torch.load(io.BytesIO(message), map_location="cpu", weights_only=True)
    return tuple(rows.values())


def _bytes_of(rows: Batch) -> int:
    return sum(tensor.nbytes for tensor in rows)
