"""WikiText, word by word: the SelSync paper's transformer."""

import math
from array import array
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat.lab.recipes.base import HeldOut, Recipe, Setup, Task, steps_for
from offbeat.lab.recipes.samples import TensorData, shared
from offbeat.lab.recipes.schedules import decay_every
from offbeat.lab.recipes.word_transformer import WordTransformer

BATCH_SIZE = 20
METRIC = "test perplexity"
CONTEXT = 35  # words a sample predicts
DECAY_STEPS = 2000  # of the paper's 16 workers
PAPER_WORKERS = 16
FILES = {
    "train": ("wiki.train.tokens", "train.txt"),
    "test": ("wiki.test.tokens", "test.txt"),
}
NEEDS = "wiki.train.tokens, wiki.test.tokens (or train.txt, test.txt)"


def find(data: Path | None, split: str) -> Path:
    """The file of ``split`` in directory ``data``.

    Raises:
        FileNotFoundError: no directory, or no such file in it; the message says what was sought.
    """
    if data is None:
        raise FileNotFoundError(f"the wikitext:transformer recipe needs --data DIR with {NEEDS}")
    for name in FILES[split]:
        if (data / name).is_file():
            return data / name
    problem = "which does not exist" if not data.is_dir() else "but neither is there"
    raise FileNotFoundError(f"looked for {' or '.join(FILES[split])} in {data}, {problem}")


def read_words(path: Path, vocabulary: dict[str, int], *, grow: bool) -> Tensor:
    """The numbers of all words of a text, ``<eos>`` after every line.

    Args:
        path: UTF-8 text, words separated by white space.
        vocabulary: Number of each word; ``<unk>`` is in it.
        grow: Give unknown words the next numbers; otherwise they are ``<unk>``.

    Returns:
        int32 tensor, one number a word.

    Raises:
        ValueError: it is not UTF-8 text.
    """
    numbers = array("i")
    unknown = vocabulary["<unk>"]
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                words = [*line.split(), "<eos>"]
                if grow:
                    numbers.extend(vocabulary.setdefault(word, len(vocabulary)) for word in words)
                else:
                    numbers.extend(vocabulary.get(word, unknown) for word in words)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    if not numbers:
        raise ValueError(f"{path} is empty")
    return torch.frombuffer(numbers, dtype=torch.int32)


def windows(words: Tensor) -> Tensor:
    """Samples of CONTEXT + 1 words; each begins with the last word of the one before.

    The tail that fills no sample is left out, so every word of the others is predicted once.

    Raises:
        ValueError: there are not enough words for one.
    """
    if len(words) <= CONTEXT:
        raise ValueError(f"a text must have more than {CONTEXT} words, got {len(words)}")
    return words.unfold(0, CONTEXT + 1, CONTEXT)


@shared
def load(data: Path | None) -> tuple[Tensor, Tensor, int]:
    """Training and test samples (n×36, int32), and the size of the training vocabulary."""
    vocabulary = {"<unk>": 0}
    train_path, test_path = find(data, "train"), find(data, "test")
    train = read_words(train_path, vocabulary, grow=True)
    test = read_words(test_path, vocabulary, grow=False)
    samples = []
    for path, words in ((train_path, train), (test_path, test)):
        try:
            samples.append(windows(words))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return samples[0], samples[1], len(vocabulary)


def nats(model: nn.Module, batch: tuple[Tensor, ...], reduction: str) -> Tensor:
    """Cross-entropy of each next word, or the mean of all."""
    text = batch[0].long()
    logits = model(text[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, text[:, 1:].flatten(), reduction=reduction)


def next_word_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean cross-entropy of the next word, in nats."""
    return nats(model, batch, "mean")


def nats_a_word(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The mean over the words of each sample."""
    return {METRIC: nats(model, batch, "none").view(len(batch[0]), -1).mean(1)}


def perplexity(means: dict[str, float]) -> dict[str, float]:
    """Of the mean nats a word; finite when training has diverged."""
    return {METRIC: math.exp(min(means[METRIC], 100.0))}


def build(setup: Setup) -> Task:
    """The task.

    The rate decays every 2000 steps of the paper's cluster, 16 workers with batches of 20: every
    640,000 samples of all workers together, whatever their number. Gradients are clipped at norm
    2, as in the paper's published code; the paper does not say so, but without clipping the loss is
    not a number after a few dozen steps.
    """
    train, test, words = load(setup.data)
    torch.manual_seed(setup.seed)
    model = WordTransformer(words, CONTEXT)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    return Task(
        model=model,
        optimizer=optimizer,
        scheduler=decay_every(
            optimizer,
            DECAY_STEPS * PAPER_WORKERS * BATCH_SIZE,
            0.8,
            samples_a_step=BATCH_SIZE * setup.workers,
        ),
        dataset=TensorData(train),
        batch_size=BATCH_SIZE,
        steps=steps_for(setup, len(train), BATCH_SIZE),
        loss=next_word_loss,
        evaluate=HeldOut(TensorData(test), nats_a_word, BATCH_SIZE, metrics=perplexity),
        clip_norm=2.0,
    )


RECIPE = Recipe(
    name="wikitext:transformer",
    description="2-layer transformer on WikiText, as in the SelSync paper",
    metric=METRIC,
    higher_is_better=False,
    target=90.02,  # BSP in the paper's Table I, on the test split
    epochs=4,
    build=build,
    needs_data=NEEDS,
)
