"""One training run, as a value that files, processes and command lines agree on."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler

from offbeat.arguments import check_settings, setting
from offbeat.fabric.wire import Precision
from offbeat.lab.recipes import Setup, Task, find_recipe
from offbeat.lab.samplers import make_sampler, parse_injection
from offbeat.strategies import parse_strategy
from offbeat.training.attach import require_wire


@dataclass(frozen=True)
class Option:
    """How a field of ``Job`` is asked for on a command line.

    Attributes:
        help: One sentence.
        flags: Such as ``--workers`` and ``-n``; empty if the field's name is the flag.
        unset: What None stands for, to be shown as the default.
        is_path: Whether the text is that of a path.
    """

    help: str
    flags: tuple[str, ...] = ()
    unset: str = ""
    is_path: bool = False


def option(
    default: Any = dataclasses.MISSING,
    *flags: str,
    help: str,
    unset: str = "",
    is_path: bool = False,
    least: int | None = None,
    above: float | None = None,
) -> Any:
    """A field of ``Job`` that every command with a job offers; see ``Option`` and ``setting``."""
    metadata: dict[str, Any] = {"option": Option(help, flags, unset, is_path)}
    if flags:
        metadata["label"] = flags[0].removeprefix("--")
    return setting(default, least=least, above=above, metadata=metadata)


def option_of(one: "dataclasses.Field[Any]") -> Option | None:
    """How a field of ``Job`` is asked for; None if it is not."""
    return one.metadata.get("option")


@dataclass(frozen=True)
class Job:
    """One training run: what is trained, how, by how many workers.

    Its fields are the options of the commands ``train``, ``compare`` and ``simulate``, each with
    its name, default, range and help. An option more is a field more, and what is done with it.
    """

    recipe: str = option(help="A recipe; `offbeat recipes` lists them.")
    strategy: str = option("bsp", "--strategy", "-s", help="A strategy, as in selsync:delta=0.3.")
    workers: int = option(4, "--workers", "-n", help="Worker processes to start.", least=1)
    epochs: float | None = option(
        None, help="Passes over the data by all workers together.", above=0
    )
    seed: int = option(0, help="Seed of model, data order and augmentation.", least=0)
    data: str | None = option(
        None, help="Directory of the data, if the recipe needs one.", is_path=True
    )
    evaluations: int = setting(24, least=0)
    """How often the consensus is evaluated, evenly spread, the end included."""
    log: str | None = option(  # torchrun has options of its own that begin with --log
        None, "--records", help="JSON lines of every step, one file a worker.", is_path=True
    )
    timeout_seconds: float = option(
        120.0, "--timeout", help="Seconds an operation between workers may take.", above=0
    )
    lr_scale: float = option(
        1.0, "--lr-scale", help="Factor on the recipe's learning rate.", above=0
    )
    partition: str | None = option(
        None,
        help="Give each worker its own data: label:K (K labels) or dirichlet:A (skewed by A).",
        unset="all workers read everything",
    )
    sampler: str = option(
        "seldp",
        help="seldp: everyone reads everything; defdp: an N-th; distributed: another every epoch.",
    )
    injection: str | None = option(
        None,
        help="In each step ALPHA of the workers give all others BETA of their batch, as 0.5,0.5.",
        unset="none",
    )
    wire: Precision = option(
        "float32", help="How means travel: as they are, or in half or a quarter of the bytes."
    )

    def setup(self) -> Setup:
        """The recipe's part of it."""
        recipe = find_recipe(self.recipe)
        epochs = recipe.epochs if self.epochs is None else self.epochs
        return Setup(self.workers, epochs, self.seed, Path(self.data) if self.data else None)

    def check(self) -> Task:
        """Build everything once, so that mistakes show before any worker starts.

        Raises:
            ValueError, TypeError: an unknown recipe or strategy, or an impossible setting.
            FileNotFoundError: the data are not there.
        """
        check_settings(self)
        require_wire(self.wire, parse_strategy(self.strategy))
        task = find_recipe(self.recipe).build(self.setup())
        self.sampler_for(task, 0)
        if self.injection is not None:
            parse_injection(self.injection)
        return task

    def sampler_for(self, task: Task, rank: int) -> Sampler[int]:
        """Which samples worker ``rank`` reads, and in which order."""
        return make_sampler(
            task,
            self.workers,
            rank,
            seed=self.seed,
            kind=self.sampler,
            partition=self.partition,
        )
