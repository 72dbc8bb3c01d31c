"""The sink for MLflow that the page shows, with MLflow and a store in a file."""

from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat
from frameworks.real import need
from loops import attach, sgd
from pages import code_on
from problems import make_batch, make_model, train_step
from worlds import simulated

pytestmark = pytest.mark.filterwarnings("default")


def one_worker(rank: int, size: int, sink: Any) -> Any:
    import mlflow

    model = make_model(rank)
    optimizer = sgd(model)
    with mlflow.start_run() as run:
        sync = attach(model, optimizer, offbeat.LocalSGD(period=2), log=sink)
        for step in range(4):
            sync.record(loss=torch.tensor(10.0 - step))
            train_step(model, optimizer, make_batch(rank, step))
        sync.finish()
    return run.info.run_id


def test_every_step_is_a_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("mlflow")
    import mlflow

    names: dict[str, Any] = {"mlflow": mlflow}
    exec(code_on("telemetry", "class MLflow").partition("\n\n\nsync =")[0], names)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # else it asks for a data base
    mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
    (found,) = simulated(one_worker, names["MLflow"](), workers=1)
    client = mlflow.MlflowClient()
    points = {k: client.get_metric_history(found, f"offbeat/{k}") for k in ("loss", "rank")}
    assert [(p.step, p.value) for p in points["loss"]] == [(1, 10), (2, 9), (3, 8), (4, 7)]
    assert [p.value for p in points["rank"]] == [0] * 4
