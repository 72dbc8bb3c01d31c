"""Convolutional networks without branches: VGG11 and a small one for CIFAR."""

from collections.abc import Sequence

from torch import nn

HIDDEN = 4096  # width of the hidden layers of VGG11
VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
SMALL = (32, 64, "pool", 64, 128, "pool", 128, "pool")


def conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution without bias, followed by BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


def _stack(widths: Sequence[int | str], *, norm: bool) -> list[nn.Module]:
    """Return a 3×3 convolution with ReLU for each width, and pooling by 2 for each "pool"."""
    layers: list[nn.Module] = []
    inputs = 3
    for width in widths:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
            continue
        if norm:
            layers += conv_norm(inputs, width, 3)
        else:
            layers.append(nn.Conv2d(inputs, width, 3, padding=1))
        layers.append(nn.ReLU())
        inputs = width
    return layers


def vgg11(classes: int) -> nn.Sequential:
    """Return VGG11 without BatchNorm: images (n×3×H×W) → logits (n×classes).

    The classifier has two hidden layers of 4096, as in the original network for ImageNet. Its
    inputs are 7×7 feature maps. Adaptive pooling resizes the feature maps to this size, as in
    torchvision, so that images can have any size from 32×32. 129,176,036 parameters with 100
    classes.

    Source: Simonyan & Zisserman, arXiv 1409.1556, configuration A.
    """
    model = nn.Sequential(
        *_stack(VGG11, norm=False),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, HIDDEN),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(HIDDEN, classes),
    )
    for module in model:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def small_cnn(classes: int) -> nn.Sequential:
    """Return a small CNN with BatchNorm: images (n×3×H×W) → logits (n×classes).

    Five convolutions; 279,466 parameters with 10 classes.
    """
    return nn.Sequential(
        *_stack(SMALL, norm=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes)
    )
