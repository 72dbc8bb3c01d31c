"""Evaluation of a model by all workers together, and the steps at which a run evaluates."""

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offbeat.errors import CommunicationError, OffbeatError
from offbeat.lab.recipes.held_out import HeldOut

MAX_EVALUATIONS = 24
"""Largest number of evaluations, if the job does not set the number."""
SHARE = 0.1
"""Limit on the time of all evaluations together, as a share of the training time."""
FREE_SECONDS = 3.0
"""Seconds that all evaluations together may take even if this exceeds ``SHARE``."""


class EvaluationSchedule:
    """The steps after which a run evaluates: evenly spaced, the last step included.

    Args:
        steps: Number of steps of the run.
        number: Number of evaluations. None: ``MAX_EVALUATIONS``, until the training loop has
            measured the time of an evaluation and calls ``choose``.

    Attributes:
        open: True until the number of evaluations is known.
        over: True if the run ends at the current evaluation. The training loop sets it.
    """

    def __init__(self, steps: int, number: int | None) -> None:
        self._steps = steps
        self.open, self.over = number is None, False
        self._at = evenly(steps, MAX_EVALUATIONS if number is None else number)

    def __contains__(self, step: int) -> bool:
        """Return True if the training loop evaluates after ``step``.

        False for the last step, because the final evaluation takes place after the loop.
        """
        return step in self._at and step < self._steps

    def choose(self, number: int) -> None:
        """Set the number of evaluations."""
        self.open = False
        self._at = evenly(self._steps, number)


def evenly(steps: int, number: int) -> set[int]:
    """Return up to ``number`` evenly spaced steps: ``evenly(10, 2)`` is ``{5, 10}``."""
    number = min(number, steps)
    return {round(steps * (i + 1) / number) for i in range(number)}


def affordable_evaluations(evaluation_seconds: float, training_seconds: float) -> int:
    """Return how many evaluations a run can afford: 1 to ``MAX_EVALUATIONS``.

    All together may take a tenth of ``training_seconds``, the expected training time of the whole
    run, or 3 s if that is longer.
    """
    budget = max(SHARE * training_seconds, FREE_SECONDS)
    return max(1, min(MAX_EVALUATIONS, int(budget / max(evaluation_seconds, 1e-9))))


def evaluate_together(
    evaluate: HeldOut, model: nn.Module, device: torch.device
) -> dict[str, float]:
    """Return the metrics of a model that is the same on all workers. A collective.

    Each worker evaluates its share of the held-out batches. All workers return the same values.

    Raises:
        CommunicationError: a worker failed or took longer than the time-out.
    """
    share = evaluate.share(model, dist.get_rank(), dist.get_world_size())
    return evaluate.combine(gather(share, device, "the shares of an evaluation"))


def expected_seconds(evaluate: HeldOut, model: nn.Module) -> float:
    """Estimate the seconds of this worker's share of an evaluation from the time of one batch.

    Call it on all workers at the same time, so that they compete for cores as in an evaluation.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    began = time.perf_counter()
    evaluate.share(model, rank, size, most=1)
    return (time.perf_counter() - began) * len(evaluate.batches(rank, size))


def gather(value: Any, device: torch.device, what: str) -> list[Any]:
    """Return the values of all workers, in rank order. A collective.

    ``value`` has a type that JSON can represent. The communication backend can send tensors on
    ``device``. ``what`` describes the values in the error message.

    Raises:
        CommunicationError: a worker failed or took longer than the time-out.
    """
    data = bytearray(json.dumps(value).encode())
    text = torch.frombuffer(data, dtype=torch.uint8).to(device)
    lengths = [torch.zeros_like(text[:1], dtype=torch.int64) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(lengths, torch.tensor([len(text)], device=device))
        longest = max(int(length) for length in lengths)
        texts = [text.new_zeros(longest) for _ in lengths]
        dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))))
    except OffbeatError:
        raise
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {dist.get_rank()} waited for {what}, but another worker failed or took longer "
            f"than the time-out, which --timeout raises: {error}"
        ) from error
    return [
        json.loads(text[: int(length)].cpu().numpy().tobytes())
        for text, length in zip(texts, lengths, strict=True)
    ]
