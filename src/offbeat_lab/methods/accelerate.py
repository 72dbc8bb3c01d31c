"""Local SGD of Hugging Face's package accelerate, as a baseline to compare strategies with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from offbeat.extend import setting
from offbeat_lab.evaluation import explain_failures
from offbeat_lab.methods.peer import Peer, TrainingLoop, worker_address
from offbeat_lab.recipes import Task


@dataclass(frozen=True, kw_only=True)
class AccelerateLocalSGD(Peer):
    """Local SGD of Hugging Face's Accelerate: ``Accelerator.prepare`` and ``LocalSGD``.

    Args:
        period: Number H of steps between two averages of the models (≥ 1). Accelerate's name is
            ``local_sgd_steps``.
    """

    name: ClassVar[str] = "accelerate:localsgd"
    package: ClassVar[str] = "accelerate"
    needs_cpu: ClassVar[bool] = True
    period: int = setting(least=1)

    @override
    def loop(self, task: Task, lr_scale: float, timeout_seconds: float) -> TrainingLoop:
        return _Accelerated(self.name, task, lr_scale, self.period)


class _Accelerated(TrainingLoop):
    differ = True

    def __init__(self, name: str, task: Task, lr_scale: float, period: int) -> None:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        with _launch_environment():
            self._accelerator = Accelerator(cpu=True)
        # The scheduler is not prepared: Accelerate would advance it once per worker and step.
        module, self._prepared = self._accelerator.prepare(task.model, task.optimizer)
        super().__init__(name, task, lr_scale, module)
        self._local: Any = LocalSGD(
            accelerator=self._accelerator, model=module, local_sgd_steps=period
        )
        self._local.__enter__()

    @override
    def _learn(self, batch: Any) -> int:
        self._accelerator.backward(self._task.loss(self._module, batch))
        self._take_step()
        return 1

    @override
    def _optimize(self) -> None:
        self._prepared.step()
        self._local.step()

    @override
    def finish(self) -> None:
        before = self._now()
        with explain_failures(f"failed in the end of {self._name}"):
            self._local.__exit__(None, None, None)  # averages the models
        self._seconds += self._now() - before
        super().finish()

    @override
    def _close(self) -> None:
        _reset_state()


def _reset_state() -> None:
    """Clear Accelerate's global state for the next run of a comparison."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def _launch_environment() -> Iterator[None]:
    """Return a context with the environment variables that ``accelerate launch`` sets."""
    _reset_state()
    variables = {
        "RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
        "LOCAL_RANK": dist.get_rank(),
        "LOCAL_WORLD_SIZE": dist.get_world_size(),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", worker_address()),
        "MASTER_PORT": os.environ.get("MASTER_PORT", 0),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": torch.get_num_threads(),  # otherwise Accelerate would set one thread
    }
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
