"""SelSync's trigger against one read of all gradients from memory.

The trigger computes a squared norm, smooths it, and decides. The read is a ``sum`` of every
gradient, tensor by tensor, on one thread. Other memory is read before each measurement, so that no
data are in the cache, as after the backward pass of a large model.
"""

import torch

from benchmarks.harness import Result, compare, interleave
from offbeat.averaging.norm import squared_norm
from offbeat.strategies.trigger import RelativeChange


def resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's 161 parameters (25.6 M elements)."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width,), (width,), (width, width, 3, 3)]
            shapes += [(width,), (width,), (4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def results(*, quick: bool = False) -> list[Result]:
    """Return the only figure of this benchmark."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gradients = [torch.randn(shape) for shape in resnet50()]
    other = torch.randn(20_000_000)
    change = RelativeChange()

    def trigger() -> bool:
        return change.update(squared_norm(gradients), 0.04) >= 0.3

    def read() -> None:
        for gradient in gradients:
            gradient.sum()

    functions = {"trigger": trigger, "read": read}
    seconds = interleave(functions, 20 if quick else 100, between=lambda: other.sum())
    torch.set_num_threads(threads)
    ratio, details = compare(seconds["trigger"], seconds["read"])
    config = {"threads": 1, "tensors": 161, "elements": 25_557_032}
    what = "trigger / read of every gradient, ResNet-50, 1 thread"
    return [Result("trigger", what, ratio, 1.1, config=config, details=details)]
