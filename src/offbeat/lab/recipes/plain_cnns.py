"""Networks of convolutions one after the other: VGG11, AlexNet and a small one for CIFAR."""

from torch import nn

HIDDEN = 4096  # width of the hidden layers of VGG11 and AlexNet
VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg11(classes: int) -> nn.Sequential:
    """VGG11 without BatchNorm; 132,863,336 parameters with 1000 classes, 129,176,036 with 100.

    The classifier is ImageNet's, two hidden layers of 4096: pooling brings any image of 32 pixels
    or more to its 7×7 inputs, as in torchvision. The size of the model in the SelSync paper
    (507 MiB) is that of this classifier.

    Returns:
        Images (n×3×H×W) to logits (n×classes).

    Source: Simonyan & Zisserman, arXiv 1409.1556, configuration A.
    """
    layers: list[nn.Module] = []
    inputs = 3
    for width in VGG11:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
    model = nn.Sequential(
        *layers,
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


def alexnet(classes: int) -> nn.Sequential:
    """AlexNet for one GPU, without response normalization; 61,100,840 parameters, 1000 classes.

    Returns:
        Images (n×3×224×224) to logits (n×classes).

    Source: Krizhevsky, arXiv 1404.5997; the widths are torchvision's.
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(256 * 6 * 6, HIDDEN),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, classes),
    )


def small_cnn(classes: int) -> nn.Sequential:
    """Five convolutions with BatchNorm for 32×32 images; 279,466 parameters with 10 classes.

    Returns:
        Images (n×3×32×32) to logits (n×classes).
    """
    layers: list[nn.Module] = []
    for inputs, width, pool in (
        (3, 32, False),
        (32, 64, True),
        (64, 64, False),
        (64, 128, True),
        (128, 128, True),
    ):
        layers += [
            nn.Conv2d(inputs, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        if pool:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))
