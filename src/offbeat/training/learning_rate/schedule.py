"""Learning rate schedules for data-parallel training."""

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class LinearScalingWarmup(LRScheduler):
    """Increases the learning rate linearly from η to n·η for n workers, and then keeps it.

    **Update** at scheduler step t, where η is the optimizer's initial learning rate and W is
    ``warmup_steps``:

        lr_0 = η·f(0),   lr_t = lr_{t−1} · f(t) / f(t−1)
        f(t) = 1 + (n − 1)·t/W for t < W, otherwise n

    Without another scheduler this is lr_t = η·f(t). n workers take n times fewer steps for the same
    number of samples. The mean of n gradients (or of n models) has n times smaller variance, so the
    step may be n times larger. Use this schedule with a learning rate tuned for one worker, for SGD
    on large data with small batches, as in [2]. Do not use it with Adam (scale by √n at most), with
    a rate tuned for n workers, or in short runs in which the warm-up would take most of the time.

    Call ``step`` once per training step. To combine this schedule with another one, such as a
    cosine decay, use ``ChainedScheduler``.

    Args:
        optimizer: The optimizer, with the learning rates for one worker.
        workers: Number of workers, n ≥ 1.
        warmup_steps: Number W of scheduler steps until n·η is reached (≥ 0). [2] uses 50,000.
        last_epoch: Index of the last scheduler step; see ``LRScheduler``.

    Source: [1] Goyal et al., arXiv 1706.02677, §2.1-2.2. [2] "Asynchronous SGD without gradient
    delay for efficient distributed training", ICLR 2019 submission, §5.
    """

    def __init__(
        self, optimizer: Optimizer, *, workers: int, warmup_steps: int, last_epoch: int = -1
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {warmup_steps}")
        self.workers, self.warmup_steps = workers, warmup_steps
        super().__init__(optimizer, last_epoch)

    def _factor(self, t: int) -> float:
        done = 1.0 if t >= self.warmup_steps else t / self.warmup_steps
        return 1 + (self.workers - 1) * done

    def get_lr(self) -> list[float | Tensor]:
        """Compute the learning rate of each parameter group at scheduler step ``last_epoch``."""
        t = self.last_epoch
        ratio = self._factor(t) / (self._factor(t - 1) if t > 0 else 1.0)
        return [group["lr"] * ratio for group in self.optimizer.param_groups]
