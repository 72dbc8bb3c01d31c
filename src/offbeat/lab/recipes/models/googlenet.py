"""GoogLeNet (Inception v1) with BatchNorm."""

import torch
from torch import Tensor, nn

from offbeat.lab.recipes.models.sequential_cnns import conv_norm


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution, BatchNorm and ReLU."""
    return nn.Sequential(*conv_norm(inputs, outputs, size, stride, eps=0.001), nn.ReLU())


class Inception(nn.Module):
    """Concatenation of four branches: 1×1, 1×1 then 3×3 (twice), 3×3 max-pooling then 1×1.

    Args:
        inputs: Input channels.
        one: Output channels of the first branch.
        two: Inner and output channels of the second branch.
        three: Inner and output channels of the third branch.
        pool: Output channels of the fourth branch.
    """

    def __init__(
        self, inputs: int, one: int, two: tuple[int, int], three: tuple[int, int], pool: int
    ) -> None:
        super().__init__()
        self.outputs = one + two[1] + three[1] + pool
        self.branches = nn.ModuleList(
            [
                conv(inputs, one, 1),
                nn.Sequential(conv(inputs, two[0], 1), conv(*two, 3)),
                nn.Sequential(conv(inputs, three[0], 1), conv(*three, 3)),
                nn.Sequential(nn.MaxPool2d(3, 1, padding=1), conv(inputs, pool, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, H, W) → (n, outputs, H, W)."""
        return torch.cat([branch(x) for branch in self.branches], 1)


# Kernel size of a pooling layer with stride 2, or the channels of an Inception module.
LAYERS: tuple[int | tuple[int, tuple[int, int], tuple[int, int], int], ...] = (
    (64, (96, 128), (16, 32), 32),
    (128, (128, 192), (32, 96), 64),
    3,
    (192, (96, 208), (16, 48), 64),
    (160, (112, 224), (24, 64), 64),
    (128, (128, 256), (24, 64), 64),
    (112, (144, 288), (32, 64), 64),
    (256, (160, 320), (32, 128), 128),
    2,
    (256, (160, 320), (32, 128), 128),
    (384, (192, 384), (48, 128), 128),
)


def googlenet(classes: int) -> nn.Sequential:
    """Return GoogLeNet without auxiliary classifiers; 6,624,904 parameters with 1000 classes.

    BatchNorm replaces the auxiliary classifiers, whose purpose is to keep gradients from vanishing.
    The third branch has 3×3 convolutions where the paper has 5×5. Both are as in torchvision.

    Returns:
        Network from images (n×3×224×224) to logits (n×classes).

    Source: Szegedy et al., arXiv 1409.4842, table 1; BatchNorm: arXiv 1502.03167.
    """
    modules: list[nn.Module] = [
        conv(3, 64, 7, stride=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        conv(64, 64, 1),
        conv(64, 192, 3),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ]
    channels = 192
    for layer in LAYERS:
        if isinstance(layer, int):
            modules.append(nn.MaxPool2d(layer, 2, ceil_mode=True))
        else:
            inception = Inception(channels, *layer)
            modules.append(inception)
            channels = inception.outputs
    modules += [
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(channels, classes),
    ]
    model = nn.Sequential(*modules)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.01)
    return model
