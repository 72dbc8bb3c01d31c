"""The training time after which a run ends (``Job.max_seconds``)."""

from typing import Any

import torch
import torch.distributed as dist

_CHECKS = 100  # comparisons of the clocks in a run


class TimeLimit:
    """Decides after each step of a worker whether its training ends.

    A worker that may end alone does so by its own clock, without communication. All others end at
    the same step, by the largest clock, because a worker that continued would wait for those that
    have ended. They compare their clocks up to 200 times in a run. The messages of one comparison
    travel in the background, and the next comparison uses their result.

    Args:
        seconds: Limit on the training time. None: no limit.
        steps: Number of steps of the run.
        alone: True if each worker ends by its own clock.
        device: A device whose tensors the communication backend can send.
    """

    def __init__(
        self, seconds: float | None, steps: int, *, alone: bool, device: torch.device
    ) -> None:
        self._seconds, self._alone, self._device = seconds, alone, device
        self._every = max(1, steps // _CHECKS)
        self._pending: tuple[torch.Tensor, Any] | None = None

    def is_over(self, step: int, seconds: float) -> bool:
        """Return True if the training ends after ``step``, at ``seconds`` of this worker's clock.

        Call it after every step.
        """
        if self._seconds is None:
            return False
        if self._alone:
            return seconds >= self._seconds
        if step % self._every:
            return False
        if self._pending is not None:
            largest, work = self._pending
            if work is not None:
                work.wait()
            if float(largest) >= self._seconds:
                return True
        clock = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        self._pending = clock, dist.all_reduce(clock, dist.ReduceOp.MAX, async_op=True)
        return False
