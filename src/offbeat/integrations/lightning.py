"""A strategy under Lightning's ``Trainer``, as one callback."""

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
"""In a checkpoint: one file of ``offbeat.save`` for each worker, as bytes, by name."""


class OffbeatCallback(Callback):
    """Trains under ``strategy`` while ``Trainer.fit`` runs, and ends with one model everywhere.

        trainer = Trainer(strategy="ddp", devices=4, callbacks=[OffbeatCallback(offbeat.SelSync())])

    Validation sees the mean of all workers' models, and so does what a checkpoint holds of the
    model. Beside that the checkpoint holds every worker's own model, optimizers and state, from
    which ``Trainer.fit(ckpt_path=...)`` goes on as the unbroken run would: it is so many times
    larger. The DistributedDataParallel of ``strategy="ddp"`` is switched off.

    Args:
        strategy: As for ``attach``.
        options: Further keyword arguments of ``attach``.

    Attributes:
        sync: The synchronizer, from the beginning of ``Trainer.fit`` on.
    """

    def __init__(
        self, strategy: Strategy | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self._strategy, self._options = strategy, dict(options or {})
        self.sync: Synchronizer | None = None
        self._training = False
        self._consensus = contextlib.ExitStack()
        self._saved: dict[str, Tensor] | None = None

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, and go on from what the checkpoint holds of this worker."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._options.setdefault("scaler", scaler)
        self.sync = attach(pl_module, trainer.optimizers, self._strategy, **self._options)
        self._training = True
        self._watch_saving(trainer, pl_module)
        if self._saved is not None:
            saved, self._saved = self._saved, None
            with tempfile.TemporaryDirectory() as folder:
                for name, content in saved.items():
                    if f".rank{self.sync.rank}." in name:
                        Path(folder, name).write_bytes(content.numpy().tobytes())
                if load(folder, self.sync, scaler=self._options["scaler"]) is None:
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
        """Every worker's own state goes along."""
        if not self._training or self.sync is None:
            return
        self._consensus.close()
        with tempfile.TemporaryDirectory() as folder:
            path = save(folder, self.sync, scaler=self._options.get("scaler"))
            files = _gathered(path.read_bytes(), pl_module.device)
            name = path.name
        ranks = range(self.sync.size)
        names = [name.replace(f".rank{self.sync.rank}.", f".rank{rank}.") for rank in ranks]
        checkpoint[KEY] = dict(zip(names, files, strict=False))

    def _watch_saving(self, trainer: Any, pl_module: Any) -> None:
        """The module's hook, unlike the callbacks', is called with ``save_weights_only``, too."""
        after: Callable[[dict[str, Any]], None] = pl_module.on_save_checkpoint

        def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
            if self._training and self.sync is not None:
                self._consensus.close()
                with self.sync.consensus():
                    held = trainer.strategy.lightning_module_state_dict()
                    checkpoint["state_dict"] = {
                        key: value.detach().clone() if isinstance(value, Tensor) else value
                        for key, value in held.items()
                    }
            after(checkpoint)

        pl_module.on_save_checkpoint = on_save_checkpoint

    @override
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(KEY)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """All workers get the same model."""
        if self.sync is not None and self._training:
            self._training = False
            self._consensus.close()
            self.sync.finish()
            del pl_module.on_save_checkpoint

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The others are told at once."""
        if self.sync is not None and self._training:
            self._training = False
            self.sync.detach()
            del pl_module.on_save_checkpoint


def _gathered(content: bytes, device: torch.device) -> list[Tensor]:
    """What each worker gives, in rank order; on rank 0 only, which writes the checkpoint."""
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device))
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    everyone = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, everyone)
    files = zip(everyone or [], sizes, strict=False)
    return [file[: int(size)].cpu().clone() for file, size in files]
