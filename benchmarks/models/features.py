"""The small benchmark models, each with one feature of real trainings: clipping, LoRA and others.

A recipe has the name of its feature, as in ``benchmarks/models/features.py:clipping``. Apart from
the feature it is ``byte_transformer.py`` or, with BatchNorm, ``cifar_cnn.py``.
"""

import functools

import cifar_cnn
import torch
from byte_transformer import CONTEXT, task
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from offbeat_lab import recipe
from offbeat_lab.recipes.models.transformers import ByteTransformer, next_token_loss

PRETRAINING_STEPS = 200
RANK = 4
"""Rank of the matrices of LoRA."""
transformer_recipe = functools.partial(
    recipe, metric="bits per byte", higher_is_better=False, target=3.0
)


def transformer():
    """Return two layers of width 64."""
    return ByteTransformer(CONTEXT, width=64)


@recipe(metric="accuracy", target=0.5, epochs=1.5)
def batchnorm(setup):
    """Train the CNN with BatchNorm after each convolution."""
    return cifar_cnn.task(cifar_cnn.network(nn.BatchNorm2d), setup.data)


@transformer_recipe(epochs=0.33)
def weight_decay(setup):
    """Train with a weight decay of 0.3 in place of 0.01."""
    return task(transformer(), weight_decay=0.3)


@transformer_recipe(epochs=0.33)
def tied_weights(setup):
    """Train with one matrix for the embedding of bytes and for the last layer."""
    model = transformer()
    nn.init.normal_(model.bytes.weight, std=0.1)
    model.head.weight = model.bytes.weight
    return task(model)


@transformer_recipe(epochs=0.33)
def clipping(setup):
    """Train with gradients clipped to a norm of 0.5, which a quarter of the steps exceed."""
    return task(transformer(), clip_norm=0.5)


@transformer_recipe(epochs=0.33)
def accumulation(setup):
    """Train with two backward passes per step, each over half of the batch."""

    def loss(model, batch):
        first, second = (half for half in batch[0].chunk(2))
        (next_token_loss(model, (first,)) / 2).backward()
        return next_token_loss(model, (second,)) / 2

    return task(transformer(), loss=loss)


@transformer_recipe(epochs=0.33)
def short_memory(setup):
    """Train with β₂ = 0.95 in place of 0.99."""
    return task(transformer(), betas=(0.9, 0.95))


@transformer_recipe(epochs=0.33)
def long_memory(setup):
    """Train with β₂ = 0.999 in place of 0.99."""
    return task(transformer(), betas=(0.9, 0.999))


@transformer_recipe(epochs=1.32)
def large_batch(setup):
    """Train with batches of 32 in place of 8."""
    return task(transformer(), batch_size=32)


class LowRank(nn.Module):
    """Adds the product of two small matrices to a weight, as LoRA does (Hu et al., 2021)."""

    def __init__(self, rows, columns):
        super().__init__()
        self.left = nn.Parameter(torch.zeros(rows, RANK))
        self.right = nn.Parameter(torch.randn(RANK, columns) / columns**0.5)

    def forward(self, weight):
        return weight + self.left @ self.right


@functools.cache
def pretrained():
    """Return the weights of a model after some steps on short windows of one worker."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformer()
        training = task(model, lr=4e-3)
        order = torch.randperm(len(training.samples))
        for step in range(PRETRAINING_STEPS):
            batch = order[step * training.batch_size :][: training.batch_size].tolist()
            training.loss(model, training.samples.batch(batch)).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    return model.state_dict()


@transformer_recipe(epochs=0.33)
def lora(setup):
    """Train only matrices of rank 4, which are added to the linear layers of a trained model."""
    model = transformer()
    model.load_state_dict(pretrained())
    model.requires_grad_(False)
    for layer in [one for one in model.modules() if type(one) is nn.Linear]:
        register_parametrization(layer, "weight", LowRank(*layer.weight.shape))
    return task(model, lr=3.2e-2)
