"""Files of the data sets: formats and clear errors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lab.standins import write_cifar, write_text
from offbeat_lab.recipes import cifar, wikitext

# CIFAR


def test_missing_cifar_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"recipe needs --data DIR with cifar10\.npz"):
        cifar.load(None)
    with pytest.raises(FileNotFoundError, match=r"looked for cifar10\.npz in .*, but it is not th"):
        cifar.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"npz in {tmp_path}/x, which does not exist"):
        cifar.load(tmp_path / "x")


def test_cifar_is_read_from_npz(tmp_path: Path) -> None:
    """The file has the names and shapes of Keras. ``--data`` is the file or its directory."""
    generator = np.random.default_rng(0)
    arrays = {
        "x_train": generator.integers(256, size=(6, 32, 32, 3), dtype=np.uint8),
        "y_train": np.array([[0], [1], [2], [3], [4], [5]], np.uint8),
        "x_test": generator.integers(256, size=(2, 32, 32, 3), dtype=np.uint8),
        "y_test": np.array([9, 8]),
    }
    path = tmp_path / "cifar10.npz"
    np.savez(path, **arrays)
    for place in (path, tmp_path):
        (images, labels), (test, _) = cifar.load(place)
        assert labels.tolist() == [0, 1, 2, 3, 4, 5]
        assert images[3, 2, 7, 5] == arrays["x_train"][3, 7, 5, 2]
        assert len(test) == 2
    for key, value, message in (
        ("x_train", arrays["x_train"] / 255, "x_train must be bytes of shape"),
        ("x_test", arrays["x_test"][:, :28], "x_test must be bytes of shape"),
        ("y_train", arrays["y_train"][:3], "y_train must be 6 integers"),
        ("y_test", np.array([9, 10]), "labels from 0 to 9"),
        ("y_test", np.array([object(), None]), "not an .npz file"),
    ):
        np.savez(path, **{**arrays, key: value})
        with pytest.raises(ValueError, match=message):
            cifar.read_archive(path)
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"not an \.npz file with x_train"):
        cifar.read_archive(path)


def test_cifar_is_shifted_and_mirrored(tmp_path: Path) -> None:
    """Training images are shifted by up to 4 pixels, and some are mirrored."""
    train, test = cifar.splits(write_cifar(tmp_path, train=2, test=2))
    torch.manual_seed(0)
    mirrored = 0
    for _ in range(8):
        image, label = train[1]
        assert label == train.tensors[1][1]
        kinds = []
        for stored in (train.tensors[0][1], train.tensors[0][1].flip(2)):
            padded = torch.nn.functional.pad(stored, (4, 4, 4, 4))
            cuts = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
            wanted = cifar.normalized(torch.stack(cuts))
            kinds.append(bool((wanted == image).flatten(1).all(1).any()))
        # A mirrored image that was moved before is the mirrored image moved the other way.
        assert sum(kinds) == 1
        mirrored += kinds[1]
    assert 0 < mirrored < 8
    once, again = test[[0, 1]], test[[0, 1]]
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[0], cifar.normalized(test.tensors[0]))


# Text


def test_words_are_numbered_by_the_training_text(tmp_path: Path) -> None:
    """Words are numbered in order of appearance, lines end with <eos>, unknown words are <unk>."""
    text = tmp_path / "train.txt"
    text.write_text(" = A title = \n \n a <unk> b \n", encoding="utf-8")
    vocabulary = {"<unk>": 0}
    words = wikitext.read_words(text, vocabulary, grow=True)
    assert vocabulary == {"<unk>": 0, "=": 1, "A": 2, "title": 3, "<eos>": 4, "a": 5, "b": 6}
    assert words.tolist() == [1, 2, 3, 1, 4, 4, 5, 0, 6, 4]
    text.write_text("b c = \n", encoding="utf-8")
    assert wikitext.read_words(text, vocabulary, grow=False).tolist() == [6, 0, 1, 4]
    assert len(vocabulary) == 7


def test_windows_predict_every_word_once() -> None:
    """The targets of consecutive windows are consecutive words."""
    cut = wikitext.windows(torch.arange(1000, dtype=torch.int32))
    assert cut.shape == (28, 36)
    assert cut[:, 1:].flatten().tolist() == list(range(1, 28 * 35 + 1))
    assert torch.equal(cut[:, :-1] + 1, cut[:, 1:])
    with pytest.raises(ValueError, match="more than 35 words, got 35"):
        wikitext.windows(torch.arange(35))


@pytest.mark.parametrize(
    "names", [("wiki.train.tokens", "wiki.test.tokens"), ("train.txt", "test.txt")]
)
def test_wikitext_files_have_either_name(tmp_path: Path, names: tuple[str, str]) -> None:
    write_text(tmp_path)
    for old, new in zip(("wiki.train.tokens", "wiki.test.tokens"), names, strict=True):
        (tmp_path / old).rename(tmp_path / new)
    train, test, words = wikitext.load(tmp_path)
    assert (len(train), len(test), words) == (60 * 13 // 35, 20 * 13 // 35, 16)


def test_missing_wikitext_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"needs --data DIR with wiki\.train\.tokens, wiki"):
        wikitext.load(None)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/x, which does not exist"):
        wikitext.load(tmp_path / "x")
    write_text(tmp_path)
    (tmp_path / "wiki.test.tokens").unlink()
    with pytest.raises(FileNotFoundError, match=r"wiki\.test\.tokens or test\.txt in .* neither"):
        wikitext.load(tmp_path)
    (tmp_path / "test.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"test\.txt is not UTF-8 text"):
        wikitext.load(tmp_path)
    for text, message in (("", " is empty"), ("a\n", ": a text must have more than 35 words")):
        (tmp_path / "test.txt").write_text(text)
        with pytest.raises(ValueError, match=rf"test\.txt{message}"):
            wikitext.load(tmp_path)
