"""Distributed evaluation, and the steps at which a run evaluates."""

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offbeat.errors import CommunicationError, OffbeatError
from offbeat.lab.recipes.held_out import HeldOut

MAX_EVALUATIONS = 24
"""Largest number of evaluations of a run that chooses the number itself."""
SHARE = 0.1
"""Largest time of all evaluations, as a share of the training time."""
FREE_SECONDS = 3.0
"""Time that the evaluations of any run may take, however short the run is."""


class EvaluationSchedule:
    """The steps at which a run evaluates: evenly spaced, with the last step.

    Args:
        steps: Number of steps of the run.
        number: Number of evaluations. None: the run measures the time of an evaluation at the
            first of ``MAX_EVALUATIONS`` steps and then calls ``choose``.

    Attributes:
        open: True until the number of evaluations is known.
        over: True if the run ends at this evaluation, before its last step.
    """

    def __init__(self, steps: int, number: int | None) -> None:
        self._steps = steps
        self.open, self.over = number is None, False
        self._at = evenly(steps, MAX_EVALUATIONS if number is None else number)

    def __contains__(self, step: int) -> bool:
        """Return True if the run evaluates after ``step``. False for the last step.

        The evaluation at the end belongs to the end of the run, not to the training loop.
        """
        return step in self._at and step < self._steps

    def choose(self, number: int) -> None:
        """Set the number of evaluations."""
        self.open = False
        self._at = evenly(self._steps, number)


def evenly(steps: int, number: int) -> set[int]:
    """Return ``number`` evenly spaced steps with the last one, or all steps if they are fewer."""
    number = min(number, steps)
    return {round(steps * (i + 1) / number) for i in range(number)}


def affordable(evaluation_seconds: float, training_seconds: float) -> int:
    """Return the number of evaluations that fit into the time for them, 1 to ``MAX_EVALUATIONS``.

    The time is a tenth of the training time, but at least 3 s.
    """
    budget = max(SHARE * training_seconds, FREE_SECONDS)
    return max(1, min(MAX_EVALUATIONS, int(budget / max(evaluation_seconds, 1e-9))))


def evaluate_together(
    evaluate: HeldOut, model: nn.Module, device: torch.device
) -> dict[str, float]:
    """Return the metrics of a model that is the same on all workers. A collective.

    Each worker evaluates its share of the batches. All workers return the same values.

    Raises:
        CommunicationError: a worker did not send its share.
    """
    share = evaluate.share(model, dist.get_rank(), dist.get_world_size())
    return evaluate.combine(gather(share, device, "the shares of an evaluation"))


def expected_seconds(evaluate: HeldOut, model: nn.Module) -> float:
    """Estimate the time of this worker's share of an evaluation from its first batch.

    All workers should call it at the same time, so that they share cores as in an evaluation.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    began = time.perf_counter()
    evaluate.share(model, rank, size, most=1)
    return (time.perf_counter() - began) * len(evaluate.batches(rank, size))


def gather(value: Any, device: torch.device, what: str) -> list[Any]:
    """Return the JSON value of every worker in rank order. A collective.

    Args:
        value: This worker's JSON value.
        device: Device that the communication backend needs.
        what: Description of the values, for the error message.

    Raises:
        CommunicationError: a worker did not take part.
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
