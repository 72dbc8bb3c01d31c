"""SelSync's trigger against one read of all gradients from memory.

The trigger computes a squared norm, smooths it, and decides. The read is a ``sum`` of every
gradient, tensor by tensor. A ``sum`` of one flat tensor of the same size is a lower bound, which
scattered gradients cannot reach. Other memory is read before each measurement, so that no data are
in the cache, as after the backward pass of a large model.
"""

import statistics

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


SMALL: list[tuple[int, ...]] = [(64, 64), (64,)] * 10  # 20 tensors, 41,600 elements


def measure(
    shapes: list[tuple[int, ...]], repetitions: int, *, cold: bool
) -> dict[str, list[float]]:
    """Measure the seconds of the trigger, of the read by tensor, and of the flat read."""
    gradients = [torch.randn(shape) for shape in shapes]
    flat = torch.randn(sum(g.numel() for g in gradients))
    other = torch.randn(20_000_000 if cold else 1)
    change = RelativeChange()

    def trigger() -> bool:
        return change.update(squared_norm(gradients), 0.04) >= 0.3

    def read() -> None:
        for gradient in gradients:
            gradient.sum()

    functions = {"trigger": trigger, "read": read, "flat": lambda: flat.sum()}
    return interleave(functions, repetitions, between=lambda: other.sum())


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    found = []
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        config = {"threads": threads, "tensors": 161, "elements": 25_557_032}
        seconds = measure(resnet50(), 20 if quick else 100, cold=True)
        label = f"{threads} thread{'s' * (threads > 1)}"
        for name, what, target in (
            ("read", "read of every gradient", 1.1 if threads == 1 else None),
            ("flat", "read of one flat tensor", None),
        ):
            ratio, details = compare(seconds["trigger"], seconds[name])
            text = f"trigger / {what}, ResNet-50, {label}"
            found.append(Result("trigger", text, ratio, target, config=config, details=details))
    torch.set_num_threads(1)
    seconds = measure(SMALL, 100 if quick else 1000, cold=False)
    config = {"threads": 1, "tensors": 20, "elements": 41_600}
    value = statistics.median(seconds["trigger"]) * 1e6
    found.append(
        Result("trigger", "trigger, 20 tensors, 41.6 k parameters", value, 200, "µs", config)
    )
    return found
