"""A causal transformer over words."""

import math

import torch
from torch import Tensor, nn


class WordTransformer(nn.Module):
    """Embedding, sinusoidal positions, encoder layers with a causal mask, a linear output layer.

    Output and embedding share no weights. Normalization comes after each block and the activation
    is ReLU, as in the PyTorch tutorial that the SelSync paper's settings are those of.

    Args:
        words: Size of the vocabulary.
        context: The longest text.
        width: Of the embedding.
        hidden: Of the feed-forward blocks.
        layers: Number of layers.
        heads: Attention heads a layer.
        dropout: Of embeddings, attention and blocks.

    With 267,735 words (WikiText-103) it has 107,845,735 parameters; with 33,278 (WikiText-2)
    13,828,478.
    """

    places: Tensor
    mask: Tensor

    def __init__(
        self,
        words: int,
        context: int,
        *,
        width: int = 200,
        hidden: int = 200,
        layers: int = 2,
        heads: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, hidden, dropout, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)
        place = torch.arange(context)[:, None]
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        places = torch.stack([(place * rate).sin(), (place * rate).cos()], -1).flatten(1)
        self.register_buffer("places", places, persistent=False)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Word numbers (batch × length) to logits of each next word (batch × length × words)."""
        length = text.shape[1]
        x = self.words(text) * math.sqrt(self.words.embedding_dim) + self.places[:length]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, src_mask=self.mask[:length, :length], is_causal=True)
        logits: Tensor = self.head(x)
        return logits
