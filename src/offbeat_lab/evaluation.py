"""Evaluation of a model by all workers together, and the number of evaluations of a run.

An evaluation uses the mean of the workers' models at one step. Each worker stores a *snapshot* of
its model at this step. The workers average and evaluate the snapshots after the run, so that an
evaluation does not change the training.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat import CommunicationError, OffbeatError
from offbeat.extend import make_flats
from offbeat_lab.events import Evaluation
from offbeat_lab.recipes import Task

MAX_EVALUATIONS = 24
"""Largest number of evaluations, if the job does not set the number."""
SNAPSHOT_BYTES = 2**30
"""Limit on the memory of a worker's snapshots, if the job does not set the number."""


@dataclass(frozen=True)
class Snapshot:
    """What one worker contributes to an evaluation.

    Attributes:
        step: Number of steps.
        seconds: Training seconds of this worker at this step.
        tensors: This worker's tensors in host memory, as ``Method.snapshot`` returns them.
        last: True at the end of the run, where the model is the same on all workers.
    """

    step: int
    seconds: float
    tensors: list[Tensor]
    last: bool = False


def evenly(steps: int, number: int) -> set[int]:
    """Return up to ``number`` evenly spaced steps: ``evenly(10, 2)`` is ``{5, 10}``."""
    number = min(number, steps)
    return {round(steps * (i + 1) / number) for i in range(number)}


def storable_evaluations(steps: int, snapshot_bytes: int) -> int:
    """Return how many evaluations a run of ``steps`` steps can store snapshots for.

    At least 1: the evaluation at the end needs no snapshot.
    """
    return min(steps, MAX_EVALUATIONS, 1 + SNAPSHOT_BYTES // snapshot_bytes)


def average_over_workers(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Combine the workers' snapshots in place, as a consensus combines models. A collective.

    Floating-point and complex tensors become their mean (half types are summed in float32), and
    signed integers become their maximum. All other tensors become those of rank 0.

    Args:
        tensors: The snapshot of this worker, in host memory.
        device: A device whose tensors the communication backend can send.

    Raises:
        CommunicationError: a worker failed or took longer than the time-out.
    """
    for flat in make_flats(tensors):
        numbers, dtype = flat.copy().to(device), flat.tensors[0].dtype
        averaged = dtype.is_floating_point or dtype.is_complex
        with explain_failures("waited for the mean of the models"):
            if averaged:
                dist.all_reduce(numbers)
                numbers.mul_(1 / dist.get_world_size())
            elif dtype.is_signed:
                dist.all_reduce(numbers, dist.ReduceOp.MAX)
            else:
                dist.broadcast(numbers, src=0)
        flat.write(0, numbers.cpu())


def evaluate(
    task: Task, metric: str, step: int, seconds: float, *, device: torch.device | None = None
) -> Evaluation:
    """Evaluate the model of a task at a step, and return the event.

    With ``device`` a collective: each worker evaluates its share of the held-out batches. The model
    is the same on all workers, and all of them return the same values.

    Args:
        task: The task.
        metric: The metric that is compared with the recipe's target.
        step: Number of steps.
        seconds: Training seconds.
        device: A device whose tensors the communication backend can send. None: evaluate alone.

    Raises:
        CommunicationError: a worker failed or took longer than the time-out.
    """
    model, held_out = task.model, task.evaluate
    if device is None:
        metrics = held_out(model)
    else:
        share = held_out.share(model, dist.get_rank(), dist.get_world_size())
        metrics = held_out.combine(gather(share, device, "the shares of an evaluation"))
    # Not the buffers: an attention mask can hold -inf.
    finite = all(bool(p.detach().isfinite().all()) for p in model.parameters())
    return Evaluation(step, seconds, metrics[metric], metrics, finite)


def gather(value: Any, device: torch.device, what: str) -> list[Any]:
    """Return the values of all workers, in rank order. A collective.

    ``value`` has a type that JSON can represent. The communication backend can send tensors on
    ``device``. ``what`` describes the values in the error message.

    Raises:
        CommunicationError: a worker failed or took longer than the time-out.
    """
    texts = gather_bytes(json.dumps(value).encode(), device, what)
    return [json.loads(text) for text in texts]


def gather_bytes(message: bytes, device: torch.device, what: str) -> list[bytes]:
    """Return the messages of all workers, in rank order. A collective.

    ``message`` is not empty. The messages may have different lengths. The other arguments and the
    error are those of ``gather``.
    """
    data = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    lengths = [torch.zeros_like(data[:1], dtype=torch.int64) for _ in range(dist.get_world_size())]
    with explain_failures(f"waited for {what}"):
        dist.all_gather(lengths, torch.tensor([len(data)], device=device))
        longest = max(int(length) for length in lengths)
        received = [data.new_zeros(longest) for _ in lengths]
        dist.all_gather(received, torch.nn.functional.pad(data, (0, longest - len(data))))
    return [
        one[: int(length)].cpu().numpy().tobytes()
        for one, length in zip(received, lengths, strict=True)
    ]


@contextlib.contextmanager
def explain_failures(what: str) -> Iterator[None]:
    """Convert errors of torch to a CommunicationError that names the rank.

    ``what`` follows the rank in the message, such as "failed in batch 3 of torch:ddp".
    """
    try:
        yield
    except OffbeatError:
        raise
    except (RuntimeError, TimeoutError) as error:
        text = " ".join(str(error).split())
        raise CommunicationError(
            f"rank {dist.get_rank()} {what}: {text}. If it waited for the others, one of them has "
            "failed or took longer than the time-out, which --timeout raises"
        ) from error
