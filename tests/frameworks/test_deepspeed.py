"""DeepSpeed's engine is refused in every configuration."""

import warnings
from typing import Any

import pytest
import torch

from frameworks.real import need, run
from loops import attach, error_of
from problems import make_model

pytestmark = pytest.mark.filterwarnings("default")


def engines(rank: int, size: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        deepspeed.ops.__compatible_ops__.clear()  # else it compiles some of its own, for a minute
        found = []
        for stage in (0, 1, 3):
            model = make_model(0, torch.float32)
            engine, stepping, _, _ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
                config={
                    "train_micro_batch_size_per_gpu": 4,
                    "zero_optimization": {"stage": stage},
                    "zero_allow_untested_optimizer": True,
                },
                dist_init_required=False,
            )
            if rank == 0:  # nothing is sent: the other one need not take part
                found.append(error_of(lambda e=engine, o=stepping: attach(e, o, "bsp")))
    return found


def test_an_engine_is_refused() -> None:
    need("deepspeed")
    for kinds, message in run(engines)[0]:
        assert "AttachError" in kinds, message
        assert "DeepSpeed" in message
