"""Recipe ``wikitext:transformer``: the SelSync paper's word-level language model of WikiText.

"The paper" is Tyagi & Swany, arXiv 2307.07950.
"""

import math
from array import array
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat_lab.recipes.base import Recipe, Setup, Task
from offbeat_lab.recipes.datasets import TensorData
from offbeat_lab.recipes.files import find_file, require_directory
from offbeat_lab.recipes.held_out import HeldOut
from offbeat_lab.recipes.models.transformers import WordTransformer, next_token_loss, token_losses
from offbeat_lab.recipes.schedules import decay_every

BATCH_SIZE = 20
METRIC = "test perplexity"
CONTEXT = 35  # number of words that the model predicts in a sample
DECAY_STEPS, PAPER_WORKERS = 2000, 16  # the paper's steps between decays, and number of workers
TRAIN_FILES = ("wiki.train.tokens", "train.txt")
TEST_FILES = ("wiki.test.tokens", "test.txt")
NEEDS = "wiki.train.tokens, wiki.test.tokens (or train.txt, test.txt)"


def read_words(path: Path, vocabulary: dict[str, int], *, grow: bool) -> Tensor:
    """Return the words of a text as numbers (int32). The word ``<eos>`` follows every line.

    Args:
        path: UTF-8 text file with words separated by white space.
        vocabulary: Word → number. Contains ``<unk>``.
        grow: True: add unknown words to the vocabulary. False: replace them by ``<unk>``.
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
    """Cut a text into samples of CONTEXT + 1 words.

    Adjacent samples overlap by one word, so that each word except the first is predicted exactly
    once. The last words are dropped if they do not fill a sample.
    """
    if len(words) <= CONTEXT:
        raise ValueError(f"a text must have more than {CONTEXT} words, got {len(words)}")
    return words.unfold(0, CONTEXT + 1, CONTEXT)


@lru_cache(maxsize=1)  # simulated workers, which are threads of one process, share the tensors
def load(data: Path | None) -> tuple[Tensor, Tensor, int]:
    """Return training and test samples (n×36, int32) and the size of the training vocabulary."""
    folder = require_directory(data, "wikitext:transformer", NEEDS)
    train, test = find_file(folder, TRAIN_FILES), find_file(folder, TEST_FILES)
    vocabulary = {"<unk>": 0}
    samples = []
    for path, grow in ((train, True), (test, False)):
        words = read_words(path, vocabulary, grow=grow)
        try:
            samples.append(windows(words))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return samples[0], samples[1], len(vocabulary)


def nats_per_word(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the mean cross-entropy of each sample in nats per word, for ``perplexity``."""
    return {METRIC: token_losses(model, batch).mean(1)}


def perplexity(means: dict[str, float]) -> dict[str, float]:
    """Return exp(mean cross-entropy). The mean is limited to 100, to prevent an overflow."""
    return {METRIC: math.exp(min(means[METRIC], 100.0))}


def build(setup: Setup) -> Task:
    """Build the task.

    In the paper, the learning rate decays every 2000 steps of 16 workers with batches of 20. Here
    it decays after as many samples (640,000), for any number of workers. Gradients are clipped at
    norm 2, as in the paper's published code. The paper does not mention clipping, but without it
    the loss is NaN after a few dozen steps.
    """
    train, test, words = load(setup.data)
    torch.manual_seed(setup.seed)
    model = WordTransformer(words, CONTEXT)
    task = Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0),
        scheduler=lambda optimizer, _: decay_every(
            optimizer,
            DECAY_STEPS * PAPER_WORKERS * BATCH_SIZE,
            0.8,
            samples_per_step=BATCH_SIZE * setup.workers,
        ),
        dataset=TensorData(train),
        batch_size=BATCH_SIZE,
        loss=next_token_loss,
        evaluate=HeldOut(TensorData(test), nats_per_word, BATCH_SIZE, metrics=perplexity),
        clip_norm=2.0,
    )
    task.complete(setup)
    return task


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
