"""The training time after which a run ends (``Job.max_seconds``)."""

from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

_CHECKS = 100  # comparisons of the clocks in a run, unless the workers compare them in every step

Clock: TypeAlias = Literal["own", "largest", "mean"]
"""The clock whose time ends a worker's training: its own, or the largest or mean of all clocks."""


class TimeLimit:
    """Decides after each step of a worker whether its training ends.

    With the clock "own" each worker ends by its own clock, without communication. With the others
    all workers end at the same step, because a worker that continued would wait for those that have
    ended. They compare their clocks up to 200 times in a run, or after every step for the mean. The
    messages of one comparison travel in the background, and the next comparison uses their result.

    Args:
        seconds: Limit on the training time. None: no limit.
        steps: Number of steps of the run.
        clock: The clock to which the limit applies.
        device: A device whose tensors the communication backend can send.
    """

    def __init__(
        self, seconds: float | None, steps: int, *, clock: Clock, device: torch.device
    ) -> None:
        self._seconds, self._clock, self._device = seconds, clock, device
        self._every = 1 if clock == "mean" else max(1, steps // _CHECKS)
        self._pending: tuple[torch.Tensor, Any] | None = None

    def is_over(self, step: int, seconds: float) -> bool:
        """Return True if the training ends after ``step``, at ``seconds`` of this worker's clock.

        Call it after every step.
        """
        if self._seconds is None:
            return False
        if self._clock == "own":
            return seconds >= self._seconds
        if step % self._every:
            return False
        if self._pending is not None:
            combined, work = self._pending
            if work is not None:
                work.wait()
            if float(combined) >= self._seconds:
                return True
        self._pending = self._start_comparison(seconds)
        return False

    def _start_comparison(self, seconds: float) -> tuple[torch.Tensor, Any]:
        """Return a tensor that will hold the combined clock, and the operation that fills it."""
        clock = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        operation = dist.ReduceOp.MAX
        if self._clock == "mean":
            clock /= dist.get_world_size()
            operation = dist.ReduceOp.SUM
        return clock, dist.all_reduce(clock, operation, async_op=True)
