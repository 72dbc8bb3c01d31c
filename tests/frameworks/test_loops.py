"""Engines with a training loop: pytorch-ignite and skorch."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import offbeat
from frameworks.real import MAX_NORM, SAMPLES, STEPS, ddp, need, run, same, state
from loops import attach
from problems import make_batch, make_model

pytestmark = pytest.mark.filterwarnings("default")


def ignited(rank: int, text: str) -> Any:
    import ignite.distributed as idist
    from ignite.engine import create_supervised_trainer

    inner = make_model(rank)
    model = idist.auto_model(inner)
    assert type(model).__name__ == "DistributedDataParallel"
    optimizer = idist.auto_optim(torch.optim.SGD(inner.parameters(), lr=0.05))
    sync = attach(model, optimizer, text)
    trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
    trainer.run([make_batch(rank, step, SAMPLES) for step in range(STEPS)], max_epochs=1)
    before = state(inner)
    sync.finish()
    return before, state(inner), sync.stats.steps


def fitted(rank: int, text: str, *more: Any) -> Any:
    import skorch

    class Synchronize(skorch.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:  # noqa: N803
            self.sync = attach(net.module_, net.optimizer_, offbeat.parse_strategy(text))

        def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:  # noqa: N803
            self.before = state(net.module_)
            self.sync.finish()

    attached = Synchronize()
    net = skorch.NeuralNetRegressor(
        make_model,
        module__seed=rank,
        optimizer=torch.optim.SGD,
        lr=0.05,
        batch_size=SAMPLES,
        max_epochs=1,
        train_split=None,
        verbose=0,
        callbacks=[attached, *more],
    )
    batches = [make_batch(rank, step, SAMPLES) for step in range(STEPS)]
    net.fit(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    return attached.before, state(net.module_), attached.sync.stats.steps


def by_engines(rank: int, size: int) -> Any:
    texts = ("bsp", "local:period=1", "streaming")
    return ddp(rank), [ignited(rank, text) for text in texts]


def by_skorch(rank: int, size: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import skorch

    clip = skorch.callbacks.GradientNormClipping(MAX_NORM)
    texts = ("bsp", "local:period=1", "streaming")
    clipped = ddp(rank, max_norm=MAX_NORM), fitted(rank, "bsp", clip)
    return ddp(rank), [fitted(rank, text) for text in texts], clipped


def check(plain: Any, ways: Any, first: Any) -> None:
    bsp, local, streaming = ways
    same(bsp[0], plain, 1e-12)
    same(local[0], plain, 1e-12)
    assert bsp[2] == local[2] == streaming[2] == STEPS
    same(streaming[1], first[2][1])


def test_ignite_trains_as_ddp() -> None:
    need("ignite")
    results = run(by_engines)
    for plain, ways in results:
        check(plain, ways, results[0][1])


def test_skorch_trains_as_ddp() -> None:
    """skorch calls ``step`` with a closure and clips inside it: the mean is clipped."""
    need("skorch")
    results = run(by_skorch)
    for plain, ways, (reference, clipped) in results:
        check(plain, ways, results[0][1])
        same(clipped[0], reference, 1e-12)
