"""ResNet-101 for images of 32×32 pixels."""

from torch import Tensor, nn


def conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution without bias, followed by BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """Residual block relu(layers(x) + shortcut(x)) of 1×1, 3×3 and 1×1 convolutions.

    The 3×3 convolution has ``width`` channels and the stride; the output has 4 · ``width``
    channels. The shortcut is the identity, or a 1×1 convolution with BatchNorm if the shape
    changes.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            conv_norm(inputs, width, 1),
            nn.ReLU(),
            conv_norm(width, width, 3, stride),
            nn.ReLU(),
            conv_norm(width, 4 * width, 1),
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else conv_norm(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, H, W) → (n, 4 · width, ⌈H/stride⌉, ⌈W/stride⌉)."""
        return nn.functional.relu(self.layers(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network for small images: its first layer is a 3×3 convolution without stride.

    Args:
        depths: Number of blocks in each stage.
        classes: Number of outputs.

    Source: He et al., arXiv 1512.03385, with the first layer of §4.2 (CIFAR-10).
    """

    def __init__(self, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(Bottleneck(inputs, width, stride))
                inputs = 4 * width
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


def resnet101(classes: int) -> ResNet:
    """Return ResNet-101; 42,512,970 parameters with 10 classes."""
    return ResNet((3, 4, 23, 3), classes)
