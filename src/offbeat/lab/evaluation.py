"""Evaluation by all workers together, and at which steps."""

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offbeat.errors import CommunicationError, OffbeatError
from offbeat.lab.recipes.held_out import HeldOut

MOST = 24
"""Evaluations of a run whose number is left to it."""
SHARE = 0.1
"""Of the training time: what its evaluations may take."""
FREE_SECONDS = 3.0
"""What they may take of a run however short it is."""


class Looks:
    """At which steps a run evaluates: evenly spread, the end included.

    Args:
        steps: Of the run.
        number: How often; None: as often as is affordable, at most ``MOST`` times. That is for
            ``choose`` to say at the first of so many, when it is known what a step takes.

    Attributes:
        open: Whether that is still to be said.
        over: Whether the run ends here, before its last step.
    """

    def __init__(self, steps: int, number: int | None) -> None:
        self._steps = steps
        self.open, self.over = number is None, False
        self._at = evenly(steps, MOST if number is None else number)

    def __contains__(self, step: int) -> bool:
        """Whether to evaluate after ``step``; the end is not asked for."""
        return step in self._at and step < self._steps

    def choose(self, number: int) -> None:
        """Evaluate so often."""
        self.open = False
        self._at = evenly(self._steps, number)


def evenly(steps: int, number: int) -> set[int]:
    """``number`` of ``steps`` steps, the last among them; fewer where there are fewer steps."""
    number = min(number, steps)
    return {round(steps * (i + 1) / number) for i in range(number)}


def affordable(evaluation_seconds: float, training_seconds: float) -> int:
    """How many evaluations cost at most a tenth of the training; 1 to ``MOST``.

    Runs of less than half a minute may spend 3 s on them.
    """
    budget = max(SHARE * training_seconds, FREE_SECONDS)
    return max(1, min(MOST, int(budget / max(evaluation_seconds, 1e-9))))


def evaluate_together(
    evaluate: HeldOut, model: nn.Module, device: torch.device
) -> dict[str, float]:
    """The metrics of a model that all workers hold alike; each evaluates its share.

    A collective. All get the same figures.

    Raises:
        CommunicationError: a worker did not give its share.
    """
    own = evaluate.share(model, dist.get_rank(), dist.get_world_size())
    return evaluate.combine(gather(own, device, "the shares of an evaluation"))


def expected_seconds(evaluate: HeldOut, model: nn.Module) -> float:
    """What this worker's share of an evaluation will take, from the first of its batches.

    To be asked for on all workers at once, so that they are as busy as they will be.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    began = time.perf_counter()
    evaluate.share(model, rank, size, most=1)
    return (time.perf_counter() - began) * len(evaluate.batches(rank, size))


def gather(value: Any, device: torch.device, what: str) -> list[Any]:
    """Every worker's plain value, in rank order, by way of ``device``.

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
