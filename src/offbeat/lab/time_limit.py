"""The training time after which a run ends (``Job.max_seconds``)."""

import torch
import torch.distributed as dist

_CHECKS = 100  # per run, where the workers end at the same step


class TimeLimit:
    """Decides after each step of a worker whether its training ends.

    A worker whose method allows it ends by its own clock, without communication. Otherwise the
    workers must end at the same step, because the others would wait for this one. They then compare
    their clocks about 100 times in a run. The messages of one comparison travel in the background,
    and the next comparison uses their result.

    Args:
        seconds: Limit on the training time. None: no limit.
        steps: Number of steps of the run.
        together: True if all workers must end at the same step.
        device: A device whose tensors the communication backend can send.
    """

    def __init__(
        self, seconds: float | None, steps: int, *, together: bool, device: torch.device
    ) -> None:
        self._seconds, self._every = seconds, max(1, steps // _CHECKS)
        self._together, self._device = together, device
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None

    def is_over(self, step: int, seconds: float) -> bool:
        """Return True if the training ends after ``step``, at ``seconds`` of this worker's clock.

        Call it after every step.
        """
        if self._seconds is None:
            return False
        if not self._together:
            return seconds >= self._seconds
        if step % self._every:
            return False
        if self._pending is not None:
            largest, work = self._pending
            if work is not None:
                work.wait()
            if float(largest) >= self._seconds:
                return True
        largest = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
        self._pending = largest, work
        return False
