"""Recipes: deterministic tasks, disjoint splits, formats of data sets, clear errors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.standins import write_idx, write_idx_files
from offbeat_lab.recipes import Setup, digits, find_recipe, mnist, stdlib_lm


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


def test_missing_files_are_named(tmp_path: Path) -> None:
    """The error names the missing file and the directory."""

    def build(data: Path | None) -> None:
        find_recipe("mnist").build(Setup(2, 1, data=data))

    first, last = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
    with pytest.raises(FileNotFoundError, match=rf"recipe needs --data DIR with {first}"):
        build(None)
    nowhere = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError, match=rf"{first}.* in {nowhere}, which does not exist"):
        build(nowhere)
    write_idx_files(tmp_path, train=640, test=100)
    (tmp_path / last).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{last} or {last}.gz in {tmp_path}, but neither"):
        build(tmp_path)
