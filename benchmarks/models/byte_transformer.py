"""A transformer of 0.14 million parameters (0.5 MB) over bytes, trained with AdamW.

The text is Python's standard library, as in the recipe ``stdlib-lm``, whose model and windows are
larger. So a run takes seconds.
"""

import torch

from offbeat_lab import Task, recipe
from offbeat_lab.recipes.datasets import TensorData
from offbeat_lab.recipes.held_out import HeldOut
from offbeat_lab.recipes.models.transformers import ByteTransformer, next_token_loss
from offbeat_lab.recipes.schedules import warmup_cosine
from offbeat_lab.recipes.stdlib_lm import bits_per_byte, load

CONTEXT = 64


def task(model, *, loss=next_token_loss, batch_size=8, clip_norm=None, **adamw):
    """Return the task of training ``model`` with AdamW, whose further arguments are ``adamw``."""
    train, test = (windows[:, : CONTEXT + 1].contiguous() for windows in load())
    settings = {"lr": 1.6e-2, "betas": (0.9, 0.99), "weight_decay": 0.01, "fused": True, **adamw}
    return Task(
        model=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **settings),
        scheduler=warmup_cosine,
        dataset=TensorData(train),
        batch_size=batch_size,
        loss=loss,
        evaluate=HeldOut(TensorData(test[::16][:256]), bits_per_byte, batch_size=64),
        clip_norm=clip_norm,
    )


@recipe(metric="bits per byte", higher_is_better=False, target=3.0, epochs=0.33)
def byte_transformer(setup):
    """Train two layers of width 64; the rate rises, then falls to nothing."""
    return task(ByteTransformer(CONTEXT, width=64))
