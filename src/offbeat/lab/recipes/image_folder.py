"""Images in folders, one folder per class, decoded when they are read."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offbeat.lab.recipes.datasets import Batch, Samples

SUFFIXES = {".jpg", ".jpeg", ".png"}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def central_box(width: int, height: int) -> Box:
    """Return the central square: the 224×224 pixels left after resizing the short side to 256."""
    side = 224 / 256 * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int) -> Box:
    """Draw a box with 8 to 100 % of the area and an aspect ratio of 3:4 to 4:3.

    Torch's global generator draws it. If no box fits in ten attempts, returns the central one.

    Source: Szegedy et al., arXiv 1409.4842, §6.
    """
    for _ in range(10):
        area = width * height * _uniform(0.08, 1.0)
        ratio = (4 / 3) ** _uniform(-1.0, 1.0)
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            left, top = _uniform(0, width - w), _uniform(0, height - h)
            return left, top, min(width, left + w), min(height, top + h)
    return central_box(width, height)


class ImageFolder(Samples):
    """Images under ``root/CLASS/``. Labels are the positions in the sorted names of the folders.

    A sample is an image (3×size×size, float32, normalized with ImageNet's mean and deviation) and
    its label (int64).

    Args:
        root: Directory of the class folders, which hold ``.jpg``, ``.jpeg`` or ``.png`` files.
        augment: True to crop at random and mirror half of the images, False to crop the centre.
        size: Side of the resulting image in pixels.

    Raises:
        ImportError: Pillow is not installed.
        FileNotFoundError: the directory does not exist or has no images in class folders.
    """

    def __init__(self, root: Path, *, augment: bool, size: int = 224) -> None:
        try:
            from PIL import Image
        except ImportError as error:
            raise ImportError(
                "recipes on images need Pillow: pip install 'offbeat[recipes]'"
            ) from error
        self._open = Image.open
        self._bilinear, self._mirror = Image.Resampling.BILINEAR, Image.Transpose.FLIP_LEFT_RIGHT
        self._augment, self._size = augment, size
        self._box: Callable[[int, int], Box] = random_box if augment else central_box
        if not root.is_dir():
            raise FileNotFoundError(f"looked for {root}/CLASS/*.jpg, but {root} does not exist")
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            for path in sorted((root / name).iterdir()):
                if path.suffix.lower() in SUFFIXES:
                    self.paths.append(str(path))
                    labels.append(label)
        if not self.paths:
            raise FileNotFoundError(f"looked for {root}/CLASS/*.jpg, .jpeg or .png: there are none")
        self.labels: Tensor = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> Tensor:
        """Read, crop and normalize one image.

        Raises:
            ValueError: Pillow cannot read the file.
        """
        path = self.paths[index]
        try:
            with self._open(path) as file:
                part = file.convert("RGB").resize(
                    (self._size, self._size), self._bilinear, box=self._box(*file.size)
                )
        except OSError as error:  # Pillow's errors are OSErrors, and not all of them name the file
            raise ValueError(f"{path} cannot be read as an image: {error}") from None
        if self._augment and float(torch.rand(())) < 0.5:
            part = part.transpose(self._mirror)
        pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1).float() / 255
        mean, deviation = (torch.tensor(c)[:, None, None] for c in (MEAN, DEVIATION))
        return (pixels - mean) / deviation

    def batch(self, indices: list[int]) -> Batch:
        """Return images (n×3×size×size) and labels (n)."""
        return torch.stack([self.image(index) for index in indices]), self.labels[indices]
