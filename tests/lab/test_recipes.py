"""Recipes: deterministic tasks, disjoint splits, formats of data sets, clear errors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.standins import write_cifar, write_idx, write_idx_files, write_text
from offbeat_lab.recipes import Setup, cifar, digits, find_recipe, mnist, stdlib_lm, wikitext


@pytest.fixture
def idx(tmp_path: Path) -> Path:
    """A tiny data set in the format of MNIST."""
    return write_idx_files(tmp_path, train=640, test=100)


@pytest.mark.parametrize("name", ["digits", "stdlib-lm"])
def test_a_task_depends_on_the_setup_alone(name: str) -> None:
    """Two builds give the same model and data; another seed gives another model."""

    def built() -> tuple[list[Tensor], list[Tensor]]:
        task = find_recipe(name).build(Setup(4, 1, seed=3))
        return [*task.model.parameters()], [x.clone() for x in task.dataset.tensors]

    one, two = built(), built()
    for first, second in zip(one, two, strict=True):
        assert all(map(torch.equal, first, second))
    other = find_recipe(name).build(Setup(4, 1, seed=4))
    pairs = zip(one[0], other.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_workers_of_one_process_share_the_data(idx: Path) -> None:
    """Tensors are in memory once."""
    one, two = (find_recipe("mnist").build(Setup(2, 1, seed=seed, data=idx)) for seed in (0, 1))
    for x, y in zip(one.dataset.tensors, two.dataset.tensors, strict=True):
        assert x is y
    for x, y in zip(one.evaluate.dataset.tensors, two.evaluate.dataset.tensors, strict=True):
        assert x is y


def test_digits_splits_are_disjoint() -> None:
    """No test image is a training image. Both splits have every digit."""
    train_x, train_y, test_x, test_y = digits.load()
    assert len(train_x) + len(test_x) == 1797
    assert set(train_y.tolist()) == set(test_y.tolist()) == set(range(10))
    seen = {x.numpy().tobytes() for x in train_x}
    assert sum(x.numpy().tobytes() in seen for x in test_x) == 0


def test_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs scikit-learn: pip install 'offbeat\[lab\]'"):
        digits._read()


def test_shifts_move_by_at_most_one_pixel() -> None:
    """An augmented image is the image moved by −1, 0 or 1 pixels in each direction."""
    task = find_recipe("digits").build(Setup(1, 1))
    torch.manual_seed(0)
    images = task.dataset.tensors[0]
    moved = set()
    for index in range(30):
        (image, label) = task.dataset[index]
        assert label == task.dataset.tensors[1][index]
        padded = torch.nn.functional.pad(images[index], (1, 1, 1, 1))
        matches = [
            (dy, dx)
            for dy in range(3)
            for dx in range(3)
            if torch.equal(image, padded[:, dy : dy + 8, dx : dx + 8])
        ]
        assert matches
        moved.update(matches)
    assert len(moved) > 4


def test_language_model_splits_by_file() -> None:
    """Hardly any test window is a training window."""
    train, test = stdlib_lm.load()
    seen = {window.numpy().tobytes() for window in train}
    known = sum(window.numpy().tobytes() in seen for window in test)
    assert known < 0.02 * len(test)  # a few windows are white space or licence text


def test_mnist_reads_idx_files(idx: Path) -> None:
    """Plain and gzipped files are read, and the task evaluates on them."""
    task = find_recipe("mnist").build(Setup(2, 1, data=idx))
    assert len(task.dataset) == 640
    image, label = task.dataset[0]
    assert image.shape == (1, 28, 28)
    assert torch.allclose(image, (25 * label / 255 - 0.1307) / 0.3081)
    assert 0 <= task.evaluate(task.model)["test accuracy"] <= 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04", "not an IDX file"),
        (b"\0\0\x08\x03\0\0", "ends inside its header"),
        (b"\0\0\x08\x01\0\0\0\x05abc", "says 5 but holds 3 bytes"),
    ],
)
def test_corrupt_idx_files_are_rejected(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        mnist.read_idx(path)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("labels-idx1", np.ones(70), "must hold 640 labels, but it says 70"),
        ("labels-idx1", np.full(640, 10), "must hold labels from 0 to 9, but one is 10"),
        ("images-idx3", np.zeros((640, 27, 28)), "of 28 x 28, but it says 640 x 27 x 28"),
        ("images-idx3", np.zeros((0, 28, 28)), "of 28 x 28, but it says 0 x 28 x 28"),
    ],
)
def test_images_and_labels_must_fit(kind: str, values: np.ndarray, message: str, idx: Path) -> None:
    path = idx / f"train-{kind}-ubyte.gz"
    write_idx(path, values)
    with pytest.raises(ValueError, match=f"{path} .*{message}"):
        find_recipe("mnist").build(Setup(2, 1, data=idx))


# -- files of all data sets ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "first", "files"),
    [
        ("mnist", "train-images-idx3-ubyte", ["t10k-labels-idx1-ubyte"]),
        ("cifar10:resnet101", "cifar10.npz", ["cifar10.npz"]),
        ("wikitext:transformer", "wiki.train.tokens", ["wiki.test.tokens", "test.txt"]),
    ],
)
def test_missing_files_are_named(name: str, first: str, files: list[str], tmp_path: Path) -> None:
    """The error names the missing file and the directory."""

    def build(data: Path | None) -> None:
        find_recipe(name).build(Setup(2, 1, data=data))

    with pytest.raises(FileNotFoundError, match=rf"recipe needs --data DIR with {first}"):
        build(None)
    nowhere = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError, match=rf"{first}.* in {nowhere}, which does not exist"):
        build(nowhere)
    write_idx_files(tmp_path, train=640, test=100)
    write_cifar(write_text(tmp_path))
    (tmp_path / files[0]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{'.* or '.join(files)}.* in {tmp_path}, but "):
        build(tmp_path)


# -- images of CIFAR-10 ----------------------------------------------------------------------------


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


# -- text ---------------------------------------------------------------------------------------


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


def test_unusable_text_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    for text, message in (
        (b"\xff\xfe", " is not UTF-8 text"),
        (b"", " is empty"),
        (b"a\n", ": a text must have more than 35 words"),
    ):
        (tmp_path / "wiki.test.tokens").write_bytes(text)
        with pytest.raises(ValueError, match=rf"wiki\.test\.tokens{message}"):
            wikitext.load(tmp_path)
