"""Hugging Face's Trainer with a callback, over two processes."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offbeat
from frameworks.real import SAMPLES, STEPS, Samples, check_trainer, run, same, state
from loops import Sink
from problems import make_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from offbeat.integrations.transformers import OffbeatCallback
pytestmark = pytest.mark.filterwarnings("default")


class Model(nn.Module):
    """A model whose forward returns a loss, as the Trainer requires."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = make_model(seed)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.inner(x)
        return {"loss": F.mse_loss(y, labels), "logits": y}


class Named(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self._samples = Samples("batches")

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self._samples[index]
        return {"x": x, "labels": y}


def weights(model: Any) -> dict[str, Tensor]:
    return state(model.inner)


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Records the model that an evaluation has seen."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(weights(kwargs["model"]))


def train(
    rank: int,
    folder: str,
    strategy: Any,
    *,
    resume: str | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> Any:
    model, sink = Model(rank), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=settings.pop("momentum", 0.0))
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=SAMPLES,
        per_device_eval_batch_size=SAMPLES,
        max_steps=steps,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_strategy="no",
        remove_unused_columns=False,
        **{"max_grad_norm": 0.0, "save_strategy": "no", **settings},
    )
    callback, watch = OffbeatCallback(strategy, {"timeout_seconds": 20, "log": sink}), Watch()
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Named(),
        eval_dataset=Named(),
        optimizers=(optimizer, None),
        callbacks=[callback, watch],
    )
    trainer.train(resume_from_checkpoint=resume)
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    assert callback.sync is not None
    return state(model.inner), callback.sync.stats, watch.seen, sink.records


def test_local_sgd_of_one_step_is_ddp(tmp_path: Path) -> None:
    check_trainer(train, "max_grad_norm", str(tmp_path))


def test_each_training_has_its_own_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback may serve two calls of ``Trainer.train``."""
    given: list[Any] = []
    sync = SimpleNamespace(detach=lambda: None)
    where = "offbeat.integrations.transformers.attach"
    monkeypatch.setattr(where, lambda *_, scaler: given.append(scaler) or sync)
    callback = OffbeatCallback()
    for scaler in ("first", "second"):
        optimizer = SimpleNamespace(scaler=scaler)
        callback.on_train_begin(
            SimpleNamespace(eval_on_start=False), SimpleNamespace(global_step=0), None,
            model=nn.Linear(1, 1), optimizer=optimizer,
        )  # fmt: skip
    assert given == ["first", "second"]


def test_a_training_after_a_failed_evaluation(tmp_path: Path) -> None:
    """The failed training does not give the resumed one its model."""
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        remove_unused_columns=False,
    )
    begun: list[dict[str, Tensor]] = []

    class Begins(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.append(weights(kwargs["model"]))

    def fail(prediction: Any) -> dict[str, float]:
        raise RuntimeError("of the metrics")

    trainer = transformers.Trainer(
        Model(0),
        arguments,
        train_dataset=Named(),
        eval_dataset=Named(),
        compute_metrics=fail,
        callbacks=[OffbeatCallback(offbeat.LocalSGD(period=1)), Begins()],
    )
    with pytest.raises(RuntimeError, match="of the metrics"):
        trainer.train()
    trainer.compute_metrics = None
    trainer.train(resume_from_checkpoint=True)
    _, second, resumed, _ = begun  # steps 1 and 2; then 2 again, and 3
    same(resumed, second)


def checkpoints(rank: int, size: int, folder: str) -> Any:
    strategy = offbeat.LocalSGD(period=4)
    settings: dict[str, Any] = {"momentum": 0.9}
    settings |= {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 5}
    settings |= {"eval_strategy": "steps", "eval_steps": 3}
    whole = train(rank, f"{folder}/whole", strategy, **settings)
    resumed = train(
        rank, f"{folder}/whole", strategy, resume=f"{folder}/whole/checkpoint-3", **settings
    )
    path = next(Path(folder, "whole", "checkpoint-3").glob("*.safetensors"), None)
    assert path is not None
    from safetensors.torch import load_file

    saved = {k.removeprefix("inner."): v for k, v in load_file(path).items()}
    best = train(
        rank,
        f"{folder}/best",
        offbeat.StreamingAveraging(),
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        **settings,
    )
    with pytest.raises(offbeat.CheckpointError, match="no state of the workers at that step"):
        train(rank, f"{folder}/other", strategy, resume=f"{folder}/whole/checkpoint-3", **settings)
    return whole, resumed, saved, best


def test_checkpoints_hold_the_consensus_and_resume_every_worker(tmp_path: Path) -> None:
    results = run(checkpoints, str(tmp_path))
    for whole, resumed, saved, best in results:
        same(whole[0], resumed[0])
        same(saved, whole[2][0])  # what was saved is what was evaluated
        same(saved, results[0][0][2][0])  # on all workers
        assert whole[1].steps == resumed[1].steps == STEPS
        assert any(torch.equal(best[0]["0.weight"], seen["0.weight"]) for seen in best[2])
