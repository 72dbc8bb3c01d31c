"""CIFAR-10 and CIFAR-100: the SelSync paper's ResNet-101 and VGG11, and smaller models."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD

from offbeat.lab.recipes.base import Recipe, Setup, Task, accuracy, steps_for
from offbeat.lab.recipes.cifar_files import CIFAR10, CIFAR100, Layout, load
from offbeat.lab.recipes.plain_cnns import small_cnn, vgg11
from offbeat.lab.recipes.resnet import resnet18, resnet50, resnet101
from offbeat.lab.recipes.samples import Batch, TensorData, shifted
from offbeat.lab.recipes.schedules import decay_at, warmup_cosine

TOP = {"top-1 accuracy": 1, "top-5 accuracy": 5}
MEAN = {10: (0.4914, 0.4822, 0.4465), 100: (0.5071, 0.4865, 0.4409)}
DEVIATION = {10: (0.2470, 0.2435, 0.2616), 100: (0.2673, 0.2564, 0.2762)}


def normalized(images: Tensor, classes: int) -> Tensor:
    """Images of bytes (n×3×32×32) with about mean 0 and deviation 1 in each colour."""
    mean, deviation = (torch.tensor(c[classes])[:, None, None] for c in (MEAN, DEVIATION))
    return (images.float() / 255 - mean) / deviation


def flipped(images: Tensor) -> Tensor:
    """Images of which about half, drawn from torch's generator, are mirrored left to right."""
    chosen = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(chosen, images.flip(3), images)


def splits(setup: Setup, layout: Layout, recipe: str) -> tuple[TensorData, TensorData]:
    """Training images, shifted by up to 4 pixels and mirrored at random, and test images."""
    train, test = load(setup.data, layout, recipe)

    def plain(batch: Batch) -> Batch:
        return normalized(batch[0], layout.classes), *batch[1:]

    def augment(batch: Batch) -> Batch:
        return plain((flipped(shifted(batch[0], 4)), *batch[1:]))

    return TensorData(*train, change=augment), TensorData(*test, change=plain)


def builder(
    name: str,
    layout: Layout,
    model: Callable[[int], nn.Module],
    *,
    batch_size: int = 32,
    learning_rate: float,
    weight_decay: float,
    milestones: tuple[float, ...] | None,
) -> Callable[[Setup], Task]:
    """``build`` of a recipe: SGD with momentum 0.9.

    Args:
        name: Of the recipe.
        layout: Of the data.
        model: Number of classes → the model.
        batch_size: Samples a worker takes in a step.
        learning_rate: At the start.
        weight_decay: On all parameters.
        milestones: Epochs, of all workers together, after which the rate is divided by ten. None:
            warm-up and half a cosine over the run.
    """

    def build(setup: Setup) -> Task:
        train, test = splits(setup, layout, name)
        torch.manual_seed(setup.seed)
        net = model(layout.classes)
        optimizer = SGD(net.parameters(), lr=learning_rate, momentum=0.9, weight_decay=weight_decay)
        steps = steps_for(setup, len(train), batch_size)
        return Task(
            model=net,
            optimizer=optimizer,
            scheduler=warmup_cosine(optimizer, steps)
            if milestones is None
            else decay_at(
                optimizer,
                [epoch * len(train) for epoch in milestones],
                0.1,
                samples_a_step=batch_size * setup.workers,
            ),
            dataset=train,
            batch_size=batch_size,
            steps=steps,
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            evaluate=accuracy(test, TOP, batch_size=500),
        )

    return build


# The SelSync paper reports 98.5 % for BSP. That cannot be CIFAR-10's top-1 accuracy: this network
# ends at 93 to 95 % when trained from scratch. So the target is our own.
RESNET101 = Recipe(
    name="cifar10:resnet101",
    description="ResNet-101 on CIFAR-10, as in the SelSync paper",
    metric="top-1 accuracy",
    higher_is_better=True,
    target=0.93,
    epochs=234,  # 22,800 iterations of 16 workers, BSP's in the paper's Table I
    build=builder(
        "cifar10:resnet101",
        CIFAR10,
        resnet101,
        learning_rate=0.1,
        weight_decay=4e-4,
        milestones=(110, 150),
    ),
    needs_data="cifar-10-batches-py or cifar10.npz",
)

# The model of the discrepancy figure of asynchronous SGD without delay, which gives no settings:
# they are those of ResNet-18.
RESNET50 = Recipe(
    name="cifar10:resnet50",
    description="ResNet-50 on CIFAR-10, as for async SGD without delay",
    metric="top-1 accuracy",
    higher_is_better=True,
    target=0.93,
    epochs=30,
    build=builder(
        "cifar10:resnet50",
        CIFAR10,
        resnet50,
        learning_rate=0.05,
        weight_decay=5e-4,
        milestones=None,
    ),
    needs_data="cifar-10-batches-py or cifar10.npz",
)

RESNET18 = Recipe(
    name="cifar10:resnet18",
    description="ResNet-18 on CIFAR-10",
    metric="top-1 accuracy",
    higher_is_better=True,
    target=0.93,
    epochs=30,
    build=builder(
        "cifar10:resnet18",
        CIFAR10,
        resnet18,
        learning_rate=0.05,
        weight_decay=5e-4,
        milestones=None,
    ),
    needs_data="cifar-10-batches-py or cifar10.npz",
)

CNN = Recipe(
    name="cifar10:cnn",
    description="small CNN on CIFAR-10",
    metric="top-1 accuracy",
    higher_is_better=True,
    target=0.8,
    epochs=20,
    build=builder(
        "cifar10:cnn",
        CIFAR10,
        small_cnn,
        learning_rate=0.05,
        weight_decay=5e-4,
        milestones=None,
    ),
    needs_data="cifar-10-batches-py or cifar10.npz",
)

# BSP's 90.9 % in the paper must be top-5 accuracy: this network's top-1 accuracy is below 70 %.
VGG11 = Recipe(
    name="cifar100:vgg11",
    description="VGG11 on CIFAR-100, as in the SelSync paper",
    metric="top-5 accuracy",
    higher_is_better=True,
    target=0.909,
    epochs=111,  # 10,800 iterations of 16 workers, BSP's in the paper's Table I
    build=builder(
        "cifar100:vgg11",
        CIFAR100,
        vgg11,
        learning_rate=0.01,
        weight_decay=5e-4,
        milestones=(50, 75),
    ),
    needs_data="cifar-100-python or cifar100.npz",
)
