"""Files of the data sets: formats, untrusted pickles, clear errors."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.standins import (
    cifar_pickle,
    python2_array,
    python2_text,
    write_cifar,
    write_text,
)
from offbeat_lab.recipes import Setup, cifar, wikitext
from offbeat_lab.recipes.cifar_files import CIFAR10, CIFAR100, load, read_archive, read_batch
from offbeat_lab.recipes.datasets import TensorData, load_batches

LABELS = [3, 9, 0]


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(1).integers(256, size=(3, 3072), dtype=np.uint8)


# CIFAR


def test_the_stand_in_is_a_real_pickle(pixels: np.ndarray, tmp_path: Path) -> None:
    """Python's own unpickler reads the stand-in file as the data set's page describes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)  # numpy.core has moved
        content = pickle.loads(cifar_pickle(pixels, LABELS), encoding="bytes")
    assert content[b"labels"] == LABELS
    assert np.array_equal(content[b"data"], pixels)


def test_cifar_files_are_read(pixels: np.ndarray, tmp_path: Path) -> None:
    """A row holds the red, green and blue channel, each row by row."""
    path = tmp_path / "data_batch_1"
    path.write_bytes(cifar_pickle(pixels, LABELS))
    images, labels = read_batch(path, b"labels", 10)
    assert (images.shape, images.dtype) == ((3, 3, 32, 32), torch.uint8)
    assert labels.tolist() == LABELS
    for image, channel, row, column in ((0, 0, 0, 0), (1, 1, 2, 3), (2, 2, 31, 31)):
        place = 1024 * channel + 32 * row + column
        assert images[image, channel, row, column] == pixels[image, place]


def test_arrays_in_column_order_are_read(pixels: np.ndarray, tmp_path: Path) -> None:
    """An array in Fortran order is read as the same array."""
    by_columns = python2_array(np.asfortranarray(pixels).tobytes(order="F"), 3, 3072)
    by_rows = python2_array(pixels.tobytes(), 3, 3072)
    flag = python2_text(np.asfortranarray(pixels).tobytes(order="F"))
    by_columns = by_columns.replace(b"\x89" + flag, b"\x88" + flag)
    path = tmp_path / "test_batch"
    path.write_bytes(cifar_pickle(pixels, LABELS).replace(by_rows, by_columns))
    images, _ = read_batch(path, b"labels", 10)
    assert np.array_equal(images.reshape(3, -1).numpy(), pixels)


def test_pickles_of_python_3_are_read(pixels: np.ndarray, tmp_path: Path) -> None:
    """Files pickled again with Python 3 and NumPy 2 are read."""
    path = tmp_path / "train"
    path.write_bytes(pickle.dumps({b"fine_labels": LABELS, b"data": pixels}, protocol=4))
    images, labels = read_batch(path, b"fine_labels", 100)
    assert np.array_equal(images.reshape(3, -1).numpy(), pixels)
    assert labels.tolist() == LABELS


class Command:
    """Runs a function when it is unpickled."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_no_function_named_in_a_file_is_called(tmp_path: Path, protocol: int) -> None:
    """A pickle that names another function is rejected before the call."""
    path, made = tmp_path / "test_batch", tmp_path / "made"
    path.write_bytes(pickle.dumps({b"data": Command(Path.mkdir, made)}, protocol=protocol))
    with pytest.raises(
        ValueError, match=rf"{path} is not a CIFAR file: it names \S+, which no CIFAR"
    ):
        read_batch(path, b"labels", 10)
    assert not made.exists()


@pytest.mark.parametrize(
    "named",
    [
        "numpy\nload",
        "numpy._core.multiarray\nfromfile",
        "builtins\neval",
        "__builtin__\nlist",
        "offbeat_lab.recipes.cifar_files\nload",
    ],
)
def test_names_other_than_arrays_are_rejected(tmp_path: Path, named: str) -> None:
    """NumPy's own loading functions are rejected, too."""
    path = tmp_path / "test_batch"
    path.write_bytes(b"\x80\x02c" + named.encode() + b"\n.")
    dotted = re.escape(named.replace("\n", "."))
    if named.startswith("__builtin__"):
        dotted = r"\S*list"  # Python 3 translates the old name
    with pytest.raises(ValueError, match=rf"it names {dotted}, which no CIFAR file does"):
        read_batch(path, b"labels", 10)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a CIFAR file"),
        (b"PK\x03\x04 an archive", "not a CIFAR file"),
        (pickle.dumps([1, 2], protocol=2), "no dictionary with images"),
        (pickle.dumps({b"data": b"x"}, protocol=4), "no dictionary with images"),
    ],
)
def test_files_that_are_not_cifar_are_rejected(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_batch(path, b"labels", 10)
    assert str(path) in str(caught.value)


def test_damaged_cifar_files_are_rejected(pixels: np.ndarray, tmp_path: Path) -> None:
    """Labels or images are missing, too few or out of range; the file is cut off."""
    whole = cifar_pickle(pixels, LABELS)
    path = tmp_path / "test_batch"
    cases = [
        (whole[: len(whole) // 2], "is not a CIFAR file"),
        (cifar_pickle(pixels, [3, 9]), "holds 3 images and 2 labels"),
        (cifar_pickle(pixels, [3, 9, 10]), "labels from 0 to 9"),
        (cifar_pickle(pixels, LABELS, "fine_labels"), "no list of numbers under b'labels'"),
        (cifar_pickle(pixels[:, :3000], LABELS), "not n x 3072 bytes"),
        (cifar_pickle(pixels[:0], []), "at least one"),
        (whole.replace(b"U\x02u1", b"U\x02O8"), "not n x 3072 bytes"),
        (whole.replace(b"K\x03J\x00\x0c", b"K\x07J\x00\x0c"), "the header says 7 x 3072 bytes"),
    ]
    for data, message in cases:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            read_batch(path, b"labels", 10)


def test_cifar_is_found_in_its_directory_or_the_parent(tmp_path: Path) -> None:
    """All five training files are read."""
    folder = write_cifar(tmp_path, images=8)
    (images, labels), (test, _) = load(tmp_path, CIFAR10, "cifar10:cnn")
    assert (len(images), len(labels), len(test)) == (40, 40, 8)
    again = load(folder, CIFAR10, "cifar10:cnn")
    assert torch.equal(again[0][0], images)
    assert torch.equal(again[1][0], test)
    folder = write_cifar(tmp_path, hundred=True)
    (images, labels), _ = load(tmp_path, CIFAR100, "cifar100:vgg11")
    assert (len(images), int(labels.max()) > 9) == (8, True)
    moved = folder.rename(tmp_path / "renamed")
    assert torch.equal(load(moved, CIFAR100, "cifar100:vgg11")[0][0], images)


def test_missing_cifar_files_are_named(tmp_path: Path) -> None:
    wanted = "cifar-10-batches-py or cifar10.npz"
    with pytest.raises(
        FileNotFoundError, match=f"cifar10:cnn recipe needs --data DIR with {wanted}"
    ):
        load(None, CIFAR10, "cifar10:cnn")
    with pytest.raises(FileNotFoundError, match=f"looked for {wanted} in .*, but neither is there"):
        load(tmp_path, CIFAR10, "cifar10:cnn")
    with pytest.raises(FileNotFoundError, match=f"for {wanted} in {tmp_path}/x, which does not ex"):
        load(tmp_path / "x", CIFAR10, "cifar10:cnn")
    folder = write_cifar(tmp_path)
    (folder / "data_batch_3").unlink()
    for place in (tmp_path, folder):
        with pytest.raises(FileNotFoundError, match=f"looked for data_batch_3 in {folder}, but it"):
            load(place, CIFAR10, "cifar10:cnn")


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
        (images, labels), (test, _) = load(place, CIFAR10, "cifar10:cnn")
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
            read_archive(path, 10)
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"not an \.npz file with x_train"):
        read_archive(path, 10)


def test_cifar_is_shifted_and_mirrored(tmp_path: Path) -> None:
    """Training images are shifted by up to 4 pixels, and some are mirrored."""
    write_cifar(tmp_path, images=2)
    train, test = cifar.splits(Setup(1, 1, data=tmp_path), CIFAR10, "cifar10:cnn")
    torch.manual_seed(0)
    mirrored = 0
    for _ in range(8):
        image, label = train[1]
        assert label == train.tensors[1][1]
        kinds = []
        for stored in (train.tensors[0][1], train.tensors[0][1].flip(2)):
            padded = torch.nn.functional.pad(stored, (4, 4, 4, 4))
            cuts = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
            wanted = cifar.normalized(torch.stack(cuts), 10)
            kinds.append(bool((wanted == image).flatten(1).all(1).any()))
        # A mirrored image that was moved before is the mirrored image moved the other way.
        assert sum(kinds) == 1
        mirrored += kinds[1]
    assert 0 < mirrored < 8
    once, again = test[[0, 1]], test[[0, 1]]
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[0], cifar.normalized(test.tensors[0], 10))


# Processes that read ahead


def test_batches_are_read_by_other_processes() -> None:
    """A loader with readers returns the same batches as the data set."""
    dataset = TensorData(torch.arange(12).view(4, 3), torch.arange(4))
    loader = load_batches(dataset, [[0, 2, 1], [3]], readers=1)
    for indices, (inputs, labels) in zip([[0, 2, 1], [3]], loader, strict=True):
        assert torch.equal(inputs, dataset[indices][0])
        assert labels.tolist() == indices


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
