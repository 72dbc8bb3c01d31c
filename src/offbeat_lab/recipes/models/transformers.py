"""Causal transformer language models over bytes and over words, and their losses."""

import math

import torch
from torch import Tensor, nn


class CausalTransformer(nn.Module):
    """Base class: encoder layers with a causal mask, so that no token attends to later ones.

    Subclasses create the layers (``blocks``), embed the tokens and compute the logits.

    Args:
        context: Maximum number of tokens in an input.
    """

    blocks: nn.ModuleList
    mask: Tensor

    def __init__(self, context: int) -> None:
        super().__init__()
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def transform(self, x: Tensor) -> Tensor:
        """Apply the layers to embedded tokens x (batch × length × width)."""
        length = x.shape[1]
        for block in self.blocks:
            x = block(x, src_mask=self.mask[:length, :length], is_causal=True)
        return x


class ByteTransformer(CausalTransformer):
    """Transformer over bytes with learned positions and pre-layer normalization.

    An input has up to ``context`` bytes. ``width`` is the size of the embedding. The feed-forward
    blocks are four times as wide.
    """

    def __init__(
        self, context: int = 128, width: int = 128, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__(context)
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next byte: batch × length → batch × length × 256."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.bytes(text.long()) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.transform(x)))
        return logits


class WordTransformer(CausalTransformer):
    """Transformer over words with sinusoidal positions and post-layer normalization.

    As in the language model of the PyTorch tutorial, the activation is ReLU, and output layer and
    embedding do not share weights. The model has the settings of the SelSync paper (Tyagi & Swany,
    arXiv 2307.07950): two layers of two heads, width 200, also of the feed-forward blocks, and
    dropout 0.2.

    Args:
        words: Size of the vocabulary.
        context: Maximum number of words in an input.

    The model has 107,845,735 parameters with 267,735 words (WikiText-103) and 13,828,478 with
    33,278 words (WikiText-2).
    """

    positions: Tensor

    def __init__(self, words: int, context: int) -> None:
        super().__init__(context)
        width, dropout = 200, 0.2
        self.words = nn.Embedding(words, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, width, dropout, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, words)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)
        position = torch.arange(context)[:, None]
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        waves = torch.stack([(position * rate).sin(), (position * rate).cos()], -1)
        self.register_buffer("positions", waves.flatten(1), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next word: batch × length → batch × length × words."""
        scale = math.sqrt(self.words.embedding_dim)
        x = self.dropout(self.words(text) * scale + self.positions[: text.shape[1]])
        logits: Tensor = self.head(self.transform(x))
        return logits


def token_losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the cross-entropy of each next token in nats: batch × (length − 1).

    Args:
        model: Module that returns the logits of each next token.
        batch: One tensor of texts (batch × length). The last token of a text is only a target, not
            an input of the model.
    """
    return _cross_entropy(model, batch, "none").view(len(batch[0]), -1)


def next_token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean of ``token_losses``."""
    return _cross_entropy(model, batch, "mean")


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, ...], reduction: str) -> Tensor:
    text = batch[0].long()
    logits = model(text[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, text[:, 1:].flatten(), reduction=reduction)
