"""Recipe ``stdlib-lm``: a byte-level language model of the source of Python's standard library."""

import math
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat_lab.recipes.base import Recipe, Setup, Task
from offbeat_lab.recipes.datasets import TensorData
from offbeat_lab.recipes.held_out import HeldOut
from offbeat_lab.recipes.models.transformers import ByteTransformer, next_token_loss, token_losses
from offbeat_lab.recipes.schedules import warmup_cosine

BATCH_SIZE = 16
CONTEXT = 128  # number of bytes that the model predicts in a sample
MAX_BYTES = 4_000_000  # largest size of the training text, and of the test text
TEST_WINDOWS = 256  # number of test samples, evenly spaced in the test text


@cache
def load() -> tuple[Tensor, Tensor]:
    """Return the training and the test samples: windows of CONTEXT + 1 bytes, uint8.

    The files are sorted by path, and every tenth file belongs to the test text. Installed packages,
    tests and small files are skipped. The same version of Python therefore gives the same data.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not skipped & set(path.relative_to(root).parts) and path.stat().st_size > 1000
    )
    if not files:
        raise FileNotFoundError(f"looked for the standard library's *.py files in {root}: none")
    train, test = bytearray(), bytearray()
    for number, path in enumerate(files):
        text = train if number % 10 else test
        if len(text) < MAX_BYTES:
            text += path.read_bytes()
    return _windows(train), _windows(test)


def _windows(text: bytearray) -> Tensor:
    data = torch.frombuffer(text[:MAX_BYTES], dtype=torch.uint8)
    return data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)


def bits_per_byte(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the mean cross-entropy of each sample, in bits per byte."""
    return {"bits per byte": (token_losses(model, batch) / math.log(2)).mean(1)}


def build(setup: Setup) -> Task:
    """Build the task. The model has 478,976 parameters, 1.9 MB."""
    train, test = load()
    test = test[:: max(1, len(test) // TEST_WINDOWS)][:TEST_WINDOWS]
    torch.manual_seed(setup.seed)
    model = ByteTransformer(CONTEXT)
    task = Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01),
        scheduler=warmup_cosine,
        dataset=TensorData(train),
        batch_size=BATCH_SIZE,
        loss=next_token_loss,
        evaluate=HeldOut(TensorData(test), bits_per_byte, batch_size=32),
    )
    task.complete(setup)
    return task


RECIPE = Recipe(
    name="stdlib-lm",
    description="byte-level transformer on the Python standard library's source text",
    metric="bits per byte",
    higher_is_better=False,
    target=2.4,
    epochs=1,
    build=build,
)
