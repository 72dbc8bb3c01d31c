"""GPT-2-small's shape: 124 million parameters, over words of Shakespeare and WikiText-2."""

import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat_lab.recipes.models.transformers import CausalTransformer

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 50257, 1024, 768, 12, 12


class GPT2(CausalTransformer):
    """Pre-layer normalization, learned positions, and an output layer tied to the embedding."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH, words: int = VOCABULARY) -> None:
        super().__init__(CONTEXT)
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next word: batch × length → batch × length × words."""
        places = torch.arange(text.shape[1], device=text.device)
        hidden = self.norm(self.transform(self.words(text) + self.positions(places)))
        return nn.functional.linear(hidden, self.words.weight)


def load(folder: Path, length: int) -> tuple[Tensor, Tensor]:
    """Return windows of ``length`` words for training and for testing: windows × length, int64.

    Words that are not among the ``VOCABULARY`` most frequent ones of the training text are word 0.

    Raises:
        FileNotFoundError: ``folder`` does not contain the texts.
    """
    files = ("shakespeare.txt", "wikitext-2/valid.txt", "wikitext-2/test.txt")
    texts = [re.findall(r"\w+|[^\w\s]", (folder / file).read_text("utf-8")) for file in files]
    train, test = texts[0] + texts[1], texts[2]
    common = Counter(train).most_common(VOCABULARY - 1)
    number = {word: place for place, (word, _) in enumerate(common, 1)}
    windows = []
    for text in (train, test):
        numbers = torch.tensor([number.get(word, 0) for word in text])
        windows.append(numbers[: len(numbers) // length * length].view(-1, length))
    return windows[0], windows[1]
