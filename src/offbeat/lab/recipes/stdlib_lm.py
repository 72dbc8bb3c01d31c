"""A byte-level language model on the source text of the installed Python standard library."""

import math
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat.lab.recipes.base import HeldOut, Recipe, Setup, Task, steps_for
from offbeat.lab.recipes.samples import TensorData
from offbeat.lab.recipes.schedules import warmup_cosine

BATCH_SIZE = 16
CONTEXT = 128  # bytes a sample predicts
MAX_BYTES = 4_000_000  # of training text
TEST_WINDOWS = 256


@cache
def load() -> tuple[Tensor, Tensor]:
    """Training and test text as uint8 windows of CONTEXT + 1 bytes.

    Every tenth file is test text. Files are read in the order of their names, tests and site
    packages left out, so the same Python version gives the same data.
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
    text = {True: bytearray(), False: bytearray()}
    for number, path in enumerate(files):
        part = text[number % 10 == 0]
        if len(part) < MAX_BYTES:
            part += path.read_bytes()
    test, train = (
        torch.frombuffer(text[kind][:MAX_BYTES], dtype=torch.uint8) for kind in (True, False)
    )
    windows = [
        t[: len(t) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1) for t in (train, test)
    ]
    return windows[0], windows[1]


class ByteTransformer(nn.Module):
    """A causal transformer over bytes: (batch, length) uint8 → (batch, length, 256) logits."""

    mask: Tensor

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False
        )

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next byte at every place."""
        length = text.shape[1]
        x = self.bytes(text.long()) + self.places(torch.arange(length, device=text.device))
        for block in self.blocks:
            x = block(x, src_mask=self.mask[:length, :length], is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def nats(model: nn.Module, batch: tuple[Tensor, ...], reduction: str) -> Tensor:
    """Cross-entropy of each next byte, or the mean of all."""
    (text,) = batch
    logits = model(text[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, text[:, 1:].long().flatten(), reduction=reduction)


def next_byte_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return nats(model, batch, "mean")


def bits_per_byte(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The mean over the bytes of each sample."""
    bits = nats(model, batch, "none") / math.log(2)
    return {"bits per byte": bits.view(len(batch[0]), -1).mean(1)}


def build(setup: Setup) -> Task:
    """The task. 478,976 parameters, 1.9 MB."""
    train, test = load()
    test = test[:: max(1, len(test) // TEST_WINDOWS)][:TEST_WINDOWS]
    torch.manual_seed(setup.seed)
    model = ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    steps = steps_for(setup, len(train), BATCH_SIZE)

    return Task(
        model=model,
        optimizer=optimizer,
        scheduler=warmup_cosine(optimizer, steps),
        dataset=TensorData(train),
        batch_size=BATCH_SIZE,
        steps=steps,
        loss=next_byte_loss,
        evaluate=HeldOut(TensorData(test), bits_per_byte, batch_size=32),
    )


RECIPE = Recipe(
    name="stdlib-lm",
    description="byte-level transformer on the Python standard library's source text",
    metric="bits per byte",
    higher_is_better=False,
    target=2.4,
    epochs=1,
    build=build,
)
