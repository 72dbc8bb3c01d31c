"""Small stand-ins for public data sets, in the real formats."""

import gzip
import struct
from pathlib import Path

import numpy as np

LABELS = {"labels": 10, "fine_labels": 100}


def python2_text(text: bytes) -> bytes:
    """Return a string as pickled by Python 2: SHORT_BINSTRING or BINSTRING."""
    if len(text) < 256:
        return b"U" + bytes([len(text)]) + text
    return b"T" + struct.pack("<i", len(text)) + text


def python2_number(value: int) -> bytes:
    return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)


def python2_array(data: bytes, rows: int, width: int, kind: bytes = b"u1") -> bytes:
    """Return a NumPy array as pickled by Python 2 with protocol 2."""
    numbers = python2_number(rows) + python2_number(width)
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + b"(K\x01"
        + (numbers + b"\x86")
        + (b"cnumpy\ndtype\n" + python2_text(kind) + b"K\x00K\x01\x87R")
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + (b"\x89" + python2_text(data) + b"tb")
    )


def cifar_pickle(images: np.ndarray, labels: list[int], key: str = "labels") -> bytes:
    """Return a file of the official "python version" of CIFAR, as pickled by Python 2.

    Args:
        images: n×3072 uint8.
        labels: n numbers.
        key: ``"labels"`` or ``"fine_labels"``.
    """
    numbers = b"".join(python2_number(label) for label in labels)
    names = b"".join(python2_text(b"image_s_%06d.png" % i) for i in range(len(labels)))
    return (
        b"\x80\x02}("
        + (python2_text(b"batch_label") + python2_text(b"training batch 1 of 5"))
        + (python2_text(key.encode()) + b"](" + numbers + b"e")
        + (python2_text(b"data") + python2_array(images.tobytes(), *images.shape))
        + (python2_text(b"filenames") + b"](" + names + b"e")
        + b"u."
    )


def write_cifar(folder: Path, *, hundred: bool = False, images: int = 8) -> Path:
    """Write CIFAR-10 or CIFAR-100 with ``images`` per file. Return the directory of the files."""
    key, files = "labels", [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    folder = folder / "cifar-10-batches-py"
    if hundred:
        key, files, folder = "fine_labels", ["train", "test"], folder.parent / "cifar-100-python"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name in files:
        pixels = generator.integers(256, size=(images, 3072), dtype=np.uint8)
        labels = generator.integers(LABELS[key], size=images).tolist()
        (folder / name).write_bytes(cifar_pickle(pixels, labels, key))
    return folder


def write_text(folder: Path, *, lines: int = 60) -> Path:
    """Write text like WikiText's: lines of 12 out of 15 words in the same cyclic order."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*"abcdefghijk", "<unk>", "=", ",", "."]
    for split, count in (("train", lines), ("test", lines // 3)):
        turns = [words[i % 15 :] + words[: i % 15] for i in range(count)]
        text = "".join(f" {' '.join(line[:12])} \n" for line in turns)
        (folder / f"wiki.{split}.tokens").write_text(text, encoding="utf-8")
    return folder


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write an IDX file of bytes, gzipped if its name ends in ``.gz``."""
    shape = struct.pack(f">{values.ndim}I", *values.shape)
    data = b"\0\0\x08" + bytes([values.ndim]) + shape + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_idx_files(folder: Path, *, train: int, test: int) -> Path:
    """Write MNIST's four files, half of them gzipped. Every pixel is 25 times the label."""
    generator = np.random.default_rng(0)
    for kind, count, end in (("train", train, ".gz"), ("t10k", test, "")):
        labels = generator.integers(10, size=count)
        images = np.broadcast_to(25 * labels[:, None, None], (count, 28, 28))
        write_idx(folder / f"{kind}-images-idx3-ubyte{end}", images)
        write_idx(folder / f"{kind}-labels-idx1-ubyte{end}", labels)
    return folder
