"""Options that several commands have."""

from pathlib import Path
from typing import Annotated, Literal

import typer

RecipeName = Annotated[str, typer.Argument(help="A recipe; `offbeat recipes` lists them.")]
Workers = Annotated[int, typer.Option("--workers", "-n", help="Worker processes to start.")]
Epochs = Annotated[float | None, typer.Option(help="Passes over the data by all workers together.")]
Seed = Annotated[int, typer.Option(help="Seed of model, data order and augmentation.")]
Data = Annotated[Path | None, typer.Option(help="Directory of the data, if the recipe needs one.")]
Bandwidth = Annotated[
    str | None,
    typer.Option(help="Shape each worker's link, as in 200Mbit/s (Linux, root, iproute2)."),
]
StrategyText = Annotated[
    str, typer.Option("--strategy", "-s", help="A strategy, as in selsync:delta=0.3.")
]
StepTime = Annotated[
    str | None,
    typer.Option(
        help="Virtual time of a step, as in 80ms.",
        show_default="as measured on this machine",
    ),
]
LrScale = Annotated[float, typer.Option(help="Factor on the recipe's learning rate.")]
Partition = Annotated[
    str | None,
    typer.Option(
        help="Give each worker its own data: label:K (K labels) or dirichlet:A (skewed by A).",
        show_default="all workers read everything",
    ),
]
Sampler = Annotated[
    str,
    typer.Option(
        help="seldp: everyone reads everything; defdp: an N-th; distributed: another every epoch."
    ),
]
Injection = Annotated[
    str | None,
    typer.Option(
        help="In each step ALPHA of the workers give all others BETA of their batch, as 0.5,0.5.",
        show_default="none",
    ),
]
Wire = Annotated[
    Literal["float32", "bfloat16", "int8"],
    typer.Option(help="How means travel: as they are, or in half or a quarter of the bytes."),
]
Timeout = Annotated[float, typer.Option(help="Seconds an operation between workers may take.")]
