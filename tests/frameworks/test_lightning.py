"""Lightning's Trainer with a callback, and Fabric, over two processes."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import offbeat
from frameworks.real import MAX_NORM, SAMPLES, STEPS, Samples, check_trainer, ddp, run, same, state
from loops import Sink, attach
from problems import loss_of, make_batch, make_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    from offbeat.integrations.lightning import OffbeatCallback
pytestmark = pytest.mark.filterwarnings("default")


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, seed: int, momentum: float) -> None:
        super().__init__()
        self.inner, self._momentum = make_model(seed), momentum
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.mse_loss(self.inner(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        if index == 0 and not self.trainer.sanity_checking:
            self.seen.append(state(self.inner))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.inner.parameters(), lr=0.05, momentum=self._momentum)


def train(
    rank: int,
    folder: str,
    strategy: Any,
    *,
    resume: str | None = None,
    clip: float | None = None,
    momentum: float = 0.0,
    callbacks: Any = (),
    **settings: Any,
) -> Any:
    sink = Sink()
    callback = OffbeatCallback(strategy, {"timeout_seconds": 20, "log": sink})
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        use_distributed_sampler=False,  # which would shuffle
        default_root_dir=folder,
        gradient_clip_val=clip,
        callbacks=[*callbacks, callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        **{"max_epochs": 1, **settings},
    )
    module = Module(rank, momentum)
    samples = Samples("samples")
    sampler = DistributedSampler(samples, shuffle=False)
    loader = DataLoader(samples, batch_size=SAMPLES, sampler=sampler)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    assert callback.sync is not None
    return state(module.inner), callback.sync.stats, module.seen, sink.records


def test_local_sgd_of_one_step_is_ddp(tmp_path: Path) -> None:
    check_trainer(train, "clip", str(tmp_path))


class Light(ModelCheckpoint):  # type: ignore[misc]
    """Lightning needs one module of each class."""


def checkpoints(rank: int, size: int, folder: str) -> Any:
    strategy = offbeat.LocalSGD(period=4)
    settings: dict[str, Any] = {"momentum": 0.9, "max_epochs": 2}

    def keeping(name: str) -> list[Any]:
        light = Light(f"{folder}/{name}-light", save_top_k=-1, save_weights_only=True)
        return [ModelCheckpoint(f"{folder}/{name}", save_top_k=-1), light]

    whole = train(rank, folder, strategy, callbacks=keeping("whole"), **settings)
    (path,) = Path(folder, "whole").glob(f"*step={STEPS}.ckpt")
    again = keeping("again")
    resumed = train(rank, folder, strategy, resume=str(path), callbacks=again, **settings)
    (light,) = Path(folder, "whole-light").glob(f"*step={STEPS}.ckpt")
    contents = [torch.load(one, weights_only=False)["state_dict"] for one in (path, light)]
    saved = [{k.removeprefix("inner."): v for k, v in one.items()} for one in contents]
    return whole, resumed, saved


def test_checkpoints_hold_the_consensus_and_resume_every_worker(tmp_path: Path) -> None:
    results = run(checkpoints, str(tmp_path))
    for whole, resumed, saved in results:
        same(whole[0], resumed[0])
        for one in saved:
            same(one, whole[2][0])  # what was saved is what was validated
            same(one, results[0][0][2][0])  # on all workers
        assert whole[1].steps == resumed[1].steps == 2 * STEPS


def test_a_training_after_a_failed_validation() -> None:
    """The failed training does not give the next one its model or its scaler."""
    batches: Any = [make_batch(0, step, SAMPLES) for step in range(STEPS)]
    loader = DataLoader(batches, batch_size=None)
    last: list[dict[str, Tensor]] = []

    class Fails(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            raise RuntimeError("of the validation")

    class Watch(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            last.append(state(module.inner))

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            same(state(module.inner), last[-1])

    def fit(other: Any, scaler: Any) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            num_sanity_val_steps=0,
            callbacks=[callback, other],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.precision_plugin.scaler = scaler
        trainer.fit(module, loader, loader)
        assert callback._scaler is scaler

    callback, module = OffbeatCallback(offbeat.LocalSGD(period=1)), Module(0, 0.0)
    with pytest.raises(RuntimeError, match="of the validation"):
        fit(Fails(), None)
    fit(Watch(), torch.amp.GradScaler("cpu"))
    assert len(last) == STEPS


def fabric(rank: int, size: int) -> Any:
    tool = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    tool.launch()
    found = []
    for text, clip in (("local:period=1", False), ("bsp", True)):
        inner = make_model(rank)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
        model, stepping = tool.setup(inner, optimizer)
        sync = attach(model, stepping, text)
        for step in range(STEPS):
            stepping.zero_grad()
            tool.backward(loss_of(model, make_batch(rank, step)))
            if clip:
                tool.clip_gradients(model, stepping, max_norm=MAX_NORM)
            stepping.step()
        assert sync.step == STEPS
        sync.finish()
        found.append(state(inner))
    return ddp(rank), ddp(rank, max_norm=MAX_NORM), found


def test_fabric_trains_as_ddp() -> None:
    for plain, clipped, (local, bsp) in run(fabric):
        same(local, plain, 1e-12)
        same(bsp, clipped, 1e-12)
