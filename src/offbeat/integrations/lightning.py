"""A callback for Lightning's ``Trainer`` that trains under a strategy."""

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from offbeat import CheckpointError, Strategy, Synchronizer, attach, load, save

KEY = "offbeat"
"""Key in a Lightning checkpoint. Its value maps the name of each file that a worker's
``offbeat.save`` has written to the bytes of this file (a tensor)."""


class OffbeatCallback(Callback):
    """Trains under ``strategy`` during ``Trainer.fit``. All workers finish with the same model.

        trainer = Trainer(strategy="ddp", devices=4, callbacks=[OffbeatCallback(offbeat.SelSync())])

    During training each worker has a local model. Validation and the weights in a checkpoint use
    the *consensus*, the mean of the local models over all workers.

    A checkpoint also contains the local model and the optimizer state of every worker, unless
    ``save_weights_only`` is set. Its size therefore grows with the number of workers. From such a
    checkpoint, ``Trainer.fit(ckpt_path=...)`` continues exactly as the uninterrupted run would.

    ``strategy="ddp"`` starts the workers. ``offbeat.attach`` switches off the communication of DDP.

    Args:
        strategy: Strategy, as in ``offbeat.attach``.
        options: Further keyword arguments of ``offbeat.attach``.

    Attributes:
        sync: The synchronizer that ``offbeat.attach`` returned. None before ``Trainer.fit``.
    """

    def __init__(
        self, strategy: Strategy | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self._strategy, self._options = strategy, dict(options or {})
        self.sync: Synchronizer | None = None
        self._scaler: Any = None
        self._training = False
        self._consensus = contextlib.ExitStack()
        self._saved: dict[str, Tensor] | None = None

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Each trainer has its own GradScaler.
        options = {"scaler": getattr(trainer.precision_plugin, "scaler", None), **self._options}
        self._scaler = options["scaler"]
        model = trainer.strategy.model  # ``pl_module``, or the DDP wrapper around it
        self.sync = attach(model, trainer.optimizers, self._strategy, **options)
        self._training = True
        self._watch_saving(trainer, pl_module)
        if self._saved is not None:
            saved, self._saved = self._saved, None
            with tempfile.TemporaryDirectory() as folder:
                for name, content in saved.items():
                    if f".rank{self.sync.rank}." in name:
                        Path(folder, name).write_bytes(content.numpy().tobytes())
                if load(folder, self.sync, scaler=self._scaler) is None:
                    raise CheckpointError(
                        f"the checkpoint has no state of rank {self.sync.rank}: start as many "
                        "workers as have saved it"
                    )

    @override
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._training and self.sync is not None:
            self._consensus.enter_context(self.sync.consensus())

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._consensus.close()

    @override
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if not self._training or self.sync is None:
            return
        self._consensus.close()  # it is open during a validation; ``save`` needs the local model
        with tempfile.TemporaryDirectory() as folder:
            path = save(folder, self.sync, scaler=self._scaler)
            files = _gathered(path.read_bytes(), pl_module.device)
            name = path.name
        ranks = range(self.sync.size)
        names = [name.replace(f".rank{self.sync.rank}.", f".rank{rank}.") for rank in ranks]
        checkpoint[KEY] = dict(zip(names, files, strict=False))

    def _watch_saving(self, trainer: Any, pl_module: Any) -> None:
        """Wrap ``pl_module.on_save_checkpoint`` to replace the saved weights by the consensus.

        With ``save_weights_only`` Lightning calls this hook, but not that of callbacks.
        """
        original: Callable[[dict[str, Any]], None] = pl_module.on_save_checkpoint

        def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
            if self._training and self.sync is not None:
                self._consensus.close()
                with self.sync.consensus():
                    state = trainer.strategy.lightning_module_state_dict()
                    checkpoint["state_dict"] = {
                        key: value.detach().clone() if isinstance(value, Tensor) else value
                        for key, value in state.items()
                    }
            original(checkpoint)

        pl_module.on_save_checkpoint = on_save_checkpoint

    @override
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(KEY)  # loaded in ``on_train_start``

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.sync is not None and self._training:
            self._training = False
            self._consensus.close()
            self.sync.finish()
            del pl_module.on_save_checkpoint

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.sync is not None and self._training:
            self._training = False
            self._consensus.close()  # it is open if a validation has failed
            self.sync.detach()  # the other workers then do not wait for this one
            del pl_module.on_save_checkpoint


def _gathered(content: bytes, device: torch.device) -> list[Tensor]:
    """Gather the ``content`` of each worker on rank 0, in rank order. A collective.

    The result is empty on the other ranks, because only rank 0 writes the checkpoint.
    """
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device))
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    gathered = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, gathered)
    files = zip(gathered or [], sizes, strict=False)
    return [file[: int(size)].cpu().clone() for file, size in files]
