"""Small stand-ins for public data sets, in the real formats."""

import gzip
import struct
from pathlib import Path

import numpy as np


def write_cifar(folder: Path, *, train: int = 40, test: int = 8) -> Path:
    """Write CIFAR-10 with so many images as an ``.npz`` file. Return its path."""
    generator = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", train), ("test", test)):
        arrays[f"x_{split}"] = generator.integers(256, size=(count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = generator.integers(10, size=(count, 1), dtype=np.uint8)
    np.savez(folder / "cifar10.npz", **arrays)
    return folder / "cifar10.npz"


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
