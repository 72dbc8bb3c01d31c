"""A callback for Hugging Face's ``Trainer`` that trains under a strategy."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from typing_extensions import override

from offbeat import CheckpointError, Strategy, Synchronizer, attach, load, save

FOLDER = "offbeat"
"""Folder inside each checkpoint of the Trainer, with one file per worker."""

_WrapperOf = weakref.WeakKeyDictionary[nn.Module, Callable[[], nn.Module | None]]


class OffbeatCallback(TrainerCallback):
    """Trains under ``strategy`` during ``Trainer.train``. All workers end with the same model.

        trainer = Trainer(model, args, callbacks=[OffbeatCallback(offbeat.SelSync())], ...)

    During training each worker has a local model. The Trainer evaluates and saves the *consensus*,
    the mean of the local models over all workers. The callback restores the local model before the
    next step.

    Each worker also saves its local model and optimizer state in ``FOLDER``. From such a
    checkpoint, ``Trainer.train(resume_from_checkpoint=...)`` continues exactly as the uninterrupted
    run would.

    With several processes the Trainer puts DistributedDataParallel around the model.
    ``offbeat.attach`` switches off its communication.

    Args:
        strategy: Strategy, as in ``offbeat.attach``.
        options: Further keyword arguments of ``offbeat.attach``.
        checkpoint: Path that was given to ``Trainer.train(resume_from_checkpoint=...)``. None: the
            path ``args.output_dir/checkpoint-STEP``.

    Attributes:
        sync: The synchronizer that ``offbeat.attach`` returned. None before ``Trainer.train``.
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        checkpoint: str | None = None,
    ) -> None:
        self._strategy, self._options, self._checkpoint = strategy, dict(options or {}), checkpoint
        self.sync: Synchronizer | None = None
        self._scaler: Any = None
        self._consensus = contextlib.ExitStack()
        # The Trainer passes the model to callbacks, without the wrapper that it puts around it.
        self._wrappers = wrappers = _WrapperOf()

        def note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
            if isinstance(module, DistributedDataParallel) and submodule is not None:
                wrappers[submodule] = weakref.ref(module)

        weakref.finalize(self, register_module_module_registration_hook(note).remove)

    def _wrapped(self, model: nn.Module) -> nn.Module:
        """Return the newest DistributedDataParallel around ``model``, or else ``model``."""
        wrapper = self._wrappers.get(model, lambda: None)()
        return model if wrapper is None else wrapper

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.sync is not None:  # an earlier training may have failed, even in a consensus
            self.sync.detach()
            values = copy.deepcopy(model.state_dict())  # perhaps loaded from a checkpoint
            self._consensus.close()
            model.load_state_dict(values)
        # Each training has its own GradScaler.
        options = {"scaler": getattr(optimizer, "scaler", None), **self._options}
        self._scaler = options["scaler"]
        self.sync = attach(self._wrapped(model), optimizer, self._strategy, **options)
        if state.global_step:
            path = self._checkpoint or Path(args.output_dir, f"checkpoint-{state.global_step}")
            loaded = load(Path(path, FOLDER), self.sync, scaler=self._scaler)
            if loaded is None or loaded.step != state.global_step:
                self.sync.detach()
                raise CheckpointError(
                    f"the Trainer resumes at step {state.global_step}, and {Path(path, FOLDER)} "
                    "has no state of the workers at that step: give "
                    "OffbeatCallback(checkpoint=...) the path that Trainer.train was given"
                )
        if args.eval_on_start:
            self._enter_consensus()

    def _enter_consensus(self) -> None:
        assert self.sync is not None
        self._consensus.close()
        self._consensus.enter_context(self.sync.consensus())

    def _enter_if_needed(self, args: Any, control: Any) -> None:
        loads_best = args.load_best_model_at_end and control.should_training_stop
        if control.should_evaluate or control.should_save or loads_best:
            self._enter_consensus()

    @override
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._consensus.close()

    @override
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._consensus.close()

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter_if_needed(args, control)

    @override
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._consensus.close()
        self._enter_if_needed(args, control)

    @override
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.sync is None:
            return
        self._consensus.close()  # the Trainer has saved the consensus; save the local state now
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}", FOLDER)
        save(folder, self.sync, scaler=self._scaler)
        self._enter_if_needed(args, control)

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.sync is None:
            return
        model: nn.Module = kwargs["model"]
        best = None  # the best model, if the Trainer loaded it; finish() overwrites the parameters
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            best = copy.deepcopy(model.state_dict())
        self._consensus.close()
        self.sync.finish()
        if best is not None:
            with torch.no_grad():
                model.load_state_dict(best)
