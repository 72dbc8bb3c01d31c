"""A strategy under Hugging Face's ``Trainer``, as one callback."""

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from typing_extensions import override

from offbeat import CheckpointError, Strategy, Synchronizer, attach, load, save

FOLDER = "offbeat"
"""Beside the Trainer's files in each of its checkpoints: one file for each worker."""


class OffbeatCallback(TrainerCallback):
    """Trains under ``strategy`` while ``Trainer.train`` runs, and ends with one model everywhere.

        trainer = Trainer(model, args, callbacks=[OffbeatCallback(offbeat.SelSync())], ...)

    Evaluation sees the mean of all workers' models, and so does what the Trainer saves of the
    model. Beside that each worker saves its own model, optimizer and state, in ``FOLDER``, from
    which ``Trainer.train(resume_from_checkpoint=...)`` goes on as the unbroken run would. The
    DistributedDataParallel that the Trainer puts around the model is switched off.

    Args:
        strategy: As for ``attach``.
        options: Further keyword arguments of ``attach``.
        checkpoint: From which to resume, if it is not
            ``args.output_dir/checkpoint-STEP``; as given to ``Trainer.train``.

    Attributes:
        sync: The synchronizer, from the beginning of ``Trainer.train`` on.
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
        self._consensus = contextlib.ExitStack()

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach, and go on from the workers' own files."""
        if self.sync is not None:
            self.sync.detach()  # of a training that has failed
        optimizer = kwargs["optimizer"]
        self._options.setdefault("scaler", getattr(optimizer, "scaler", None))
        self.sync = attach(kwargs["model"], optimizer, self._strategy, **self._options)
        if state.global_step:
            path = self._checkpoint or Path(args.output_dir, f"checkpoint-{state.global_step}")
            found = load(Path(path, FOLDER), self.sync, scaler=self._options["scaler"])
            if found is None or found.step != state.global_step:
                self.sync.detach()
                raise CheckpointError(
                    f"the Trainer resumes at step {state.global_step}, and {Path(path, FOLDER)} "
                    "has no state of the workers at that step: give "
                    "OffbeatCallback(checkpoint=...) the path that Trainer.train was given"
                )
        if args.eval_on_start:
            self._enter()

    def _enter(self) -> None:
        """The model is the consensus until the training goes on."""
        assert self.sync is not None
        self._leave()
        self._consensus.enter_context(self.sync.consensus())

    def _leave(self) -> None:
        self._consensus.close()

    def _look(self, control: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._enter()

    @override
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()

    @override
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(control)

    @override
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()
        self._look(control)

    @override
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer has saved the consensus; now each worker saves what is its own."""
        if self.sync is None:
            return
        self._leave()
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}", FOLDER)
        save(folder, self.sync, scaler=self._options.get("scaler"))

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All workers get the same model; or keep the best one, if the Trainer has loaded it."""
        if self.sync is None:
            return
        model: nn.Module = kwargs["model"]
        best = None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            best = copy.deepcopy(model.state_dict())
        self._leave()
        self.sync.finish()
        if best is not None:
            with torch.no_grad():
                model.load_state_dict(best)
