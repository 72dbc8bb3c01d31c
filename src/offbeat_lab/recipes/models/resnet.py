"""Residual networks for images of 32×32 pixels."""

from typing import ClassVar

from torch import Tensor, nn

from offbeat_lab.recipes.models.sequential_cnns import conv_norm


class Block(nn.Module):
    """Residual block relu(layers(x) + shortcut(x)).

    The shortcut is the identity, or a 1×1 convolution with BatchNorm if the shape changes.

    Attributes:
        expansion: Number of output channels divided by those of a 3×3 convolution (``width``).
    """

    expansion: ClassVar[int]

    def __init__(self, layers: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = layers
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, H, W) → (n, outputs, ⌈H/stride⌉, ⌈W/stride⌉)."""
        return nn.functional.relu(self.layers(x) + self.shortcut(x))


class BasicBlock(Block):
    """Residual block of two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        layers = nn.Sequential(
            conv_norm(inputs, width, 3, stride), nn.ReLU(), conv_norm(width, width, 3)
        )
        super().__init__(layers, inputs, width, stride)


class Bottleneck(Block):
    """Residual block of 1×1, 3×3 and 1×1 convolutions. The 3×3 one has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        layers = nn.Sequential(
            conv_norm(inputs, width, 1),
            nn.ReLU(),
            conv_norm(width, width, 3, stride),
            nn.ReLU(),
            conv_norm(width, 4 * width, 1),
        )
        super().__init__(layers, inputs, 4 * width, stride)


class ResNet(nn.Module):
    """Residual network for small images: its first layer is a 3×3 convolution without stride.

    Args:
        block: ``BasicBlock`` or ``Bottleneck``.
        depths: Number of blocks in each of the four stages.
        classes: Number of outputs.

    Source: He et al., arXiv 1512.03385, with the first layer of §4.2 (CIFAR-10).
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        classes: int,
    ) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(block(inputs, width, stride))
                inputs = width * block.expansion
        self.stem = nn.Sequential(conv_norm(3, 64, 3), nn.ReLU())
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (n×classes) of images (n×3×H×W)."""
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return logits


def resnet18(classes: int) -> ResNet:
    """Return ResNet-18; 11,173,962 parameters with 10 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet50(classes: int) -> ResNet:
    """Return ResNet-50; 23,520,842 parameters with 10 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)


def resnet101(classes: int) -> ResNet:
    """Return ResNet-101; 42,512,970 parameters with 10 classes."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes)
