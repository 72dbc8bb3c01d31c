"""A small stand-in for MNIST, in the real format."""

import gzip
import struct
from pathlib import Path

import numpy as np


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
