"""One training run, as a value that files, processes and command lines agree on.

The help of the command line is made from its fields: what only a run needs, torch above all, is
imported where it is used.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.arguments import Precision, check_settings, setting, types_of

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from offbeat.lab.methods.base import Baseline
    from offbeat.lab.recipes import Setup, Task

MOST_WORKERS = 1000
MOST_SEED = 4_000_000  # each worker has a thousandfold one of its own, of 32 bits


@dataclass(frozen=True)
class Option:
    """How a field of ``Job`` is asked for on a command line.

    Attributes:
        help: One sentence.
        flags: Such as ``--workers`` and ``-n``; empty if the field's name is the flag.
        unset: What None stands for, to be shown as the default.
        is_path: Whether the text is that of a path.
        of_method: Whether it belongs to how is trained rather than to what: a comparison may set it
            for one strategy alone.
    """

    help: str
    flags: tuple[str, ...] = ()
    unset: str = ""
    is_path: bool = False
    of_method: bool = False

    def flag(self, name: str) -> str:
        """The long flag, of the field ``name``."""
        return self.flags[0] if self.flags else f"--{name.replace('_', '-')}"


def option(
    default: Any = dataclasses.MISSING,
    *flags: str,
    help: str,
    unset: str = "",
    is_path: bool = False,
    of_method: bool = False,
    least: int | None = None,
    above: float | None = None,
) -> Any:
    """A field of ``Job`` that every command with a job offers; see ``Option`` and ``setting``."""
    metadata: dict[str, Any] = {"option": Option(help, flags, unset, is_path, of_method)}
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

    Six have no option of their own: ``jitter`` and ``slow``, the uneven computing of real workers,
    ``alone_seconds``, the step alone that their sleeps are multiples of (None: as the run measures;
    see ``lab.uneven``), ``measure_links``, whether links are measured before and after,
    ``measure_alone``, whether workers train alone by turns with the method (``lab.turns``), both of
    them on processes only, and ``workers_per_node``, of simulated nodes.
    """

    recipe: str = option(
        help="A recipe; `offbeat recipes` lists them. Or your own: path/to/file.py."
    )
    strategy: str = option(
        "bsp",
        "--strategy",
        "-s",
        help="A strategy, as in selsync:delta=0.3, or a baseline: ideal, torch:ddp.",
    )
    workers: int = option(4, "--workers", "-n", help="How many workers.", least=1)
    epochs: float | None = option(
        None,
        help="Passes over the data by all workers together.",
        unset="the recipe's",
        above=0,
    )
    seed: int = option(0, help="Seed of model, data order and augmentation.", least=0)
    data: str | None = option(
        None, help="Directory of the data, if the recipe needs one.", is_path=True
    )
    evaluations: int | None = option(
        None,
        help="How often the mean of all workers is evaluated, evenly spread, the end included.",
        unset="24, or as many as cost a tenth of the time",
        least=1,
    )
    max_steps: int | None = option(None, help="End after so many steps of each worker.", least=1)
    max_seconds: float | None = option(
        None, help="End at the first evaluation after so many training seconds.", above=0
    )
    jitter: float = setting(0.0, least=0)
    slow: str | None = None
    alone_seconds: float | None = setting(None, above=0)
    measure_links: bool = False
    measure_alone: bool = False
    workers_per_node: int = setting(1, least=1)
    log: str | None = option(  # torchrun has options of its own that begin with --log
        None, "--records", help="JSON lines of every step, one file a worker.", is_path=True
    )
    checkpoints: str | None = option(
        None, help="Directory where every worker saves checkpoints of the run.", is_path=True
    )
    save_every: int | None = option(
        None, help="Steps between two checkpoints.", least=1, unset="at the end, or on Ctrl-C"
    )
    resume: bool = option(
        False, "--resume", help="Go on from the newest checkpoint that all workers have whole."
    )
    timeout_seconds: float = option(
        120.0, "--timeout", help="Seconds an operation between workers may take.", above=0
    )
    lr_scale: float = option(
        1.0, "--lr-scale", help="Factor on the recipe's learning rate.", above=0, of_method=True
    )
    partition: str | None = option(
        None,
        help="Give each worker its own data: label:K (K labels) or dirichlet:A (skewed by A).",
        unset="all workers read everything",
    )
    sampler: str = option(
        "seldp",
        help="seldp: everyone reads everything; defdp: an N-th; distributed: another every epoch.",
        of_method=True,
    )
    injection: str | None = option(
        None,
        help="In each step ALPHA of the workers give all others BETA of their batch, as 0.5,0.5.",
        unset="none",
        of_method=True,
    )
    wire: Precision | None = option(
        None,
        help="How models and gradients travel: as they are, or in fewer bytes.",
        unset="float32; streaming chooses",
        of_method=True,
    )

    def setup(self) -> "Setup":
        """The recipe's part of it."""
        from offbeat.lab.recipes import Setup, find_recipe

        recipe = find_recipe(self.recipe)
        epochs = recipe.epochs if self.epochs is None else self.epochs
        return Setup(self.workers, epochs, self.seed, Path(self.data) if self.data else None)

    def check(self, task: "Task | None" = None) -> "Task":
        """Build everything once, so that mistakes show before any worker starts.

        Args:
            task: What a job of the same recipe, data and workers has built, not to build it again.

        Raises:
            ValueError, TypeError: an unknown recipe or strategy, or an impossible setting.
            FileNotFoundError: the data are not there.
        """
        from offbeat.lab.recipes import find_recipe
        from offbeat.lab.recipes.custom import try_out
        from offbeat.lab.samplers import parse_injection

        check_settings(self)
        self._check_bounds()
        self.check_method()
        self._check_checkpoints()
        recipe = find_recipe(self.recipe)
        if self.data is not None and recipe.needs_data is None and recipe.file is None:
            raise ValueError(f"data {self.data}: the {recipe.name} recipe brings its own data")
        if task is None:
            task = recipe.build(self.setup())
            if recipe.file is not None:
                try_out(recipe, task)
        self.sampler_for(task, 0)
        if self.injection is not None:
            parse_injection(self.injection)
        return task

    def _check_checkpoints(self) -> None:
        """Whether the options for them go together, and with what is in the directory."""
        from offbeat.checkpoint.files import all_files

        if self.checkpoints is None:
            if self.save_every is not None or self.resume:
                flag = "--resume" if self.resume else "--save-every"
                raise ValueError(f"{flag} needs --checkpoints, the directory of the checkpoints")
            return
        if self.injection is not None:
            raise ValueError(
                "--checkpoints with --injection: samples that are on their way between workers are "
                "in no checkpoint of a run, leave one of them out"
            )
        saved = any(all_files(Path(self.checkpoints)))
        if self.resume and not saved:
            raise ValueError(f"--resume: {self.checkpoints} holds no checkpoint, leave it out")
        if saved and not self.resume:
            raise ValueError(
                f"--checkpoints {self.checkpoints}: a run was saved there already; go on with it "
                "by --resume, or give another directory"
            )

    def _check_bounds(self) -> None:
        """Raise ValueError for numbers that no run has a use for."""
        from offbeat.lab.uneven import parse_slow
        from offbeat.training.compatibility import require_timeout

        parse_slow(self.slow, self.workers)
        if self.workers % self.workers_per_node:
            raise ValueError(
                f"workers={self.workers} do not fill nodes of workers_per_node="
                f"{self.workers_per_node}"
            )
        if self.workers > MOST_WORKERS:
            raise ValueError(f"workers must be at most {MOST_WORKERS}, got {self.workers}")
        if self.seed > MOST_SEED:
            raise ValueError(f"seed must be at most {MOST_SEED}, got {self.seed}")
        require_timeout(self.timeout_seconds, "timeout")

    def check_method(self) -> None:
        """Whether the strategy or baseline can use the options as asked for.

        Raises:
            ValueError, TypeError: it cannot, or there is none of that name.
            ImportError: its package is not installed.
        """
        from offbeat.errors import AttachError
        from offbeat.lab.methods.base import Baseline
        from offbeat.lab.methods.registry import parse_method
        from offbeat.training.compatibility import require_abilities

        method = parse_method(self.strategy)
        if isinstance(method, Baseline):
            self._refuse(method)
            method.require()
            return
        wire = self.wire or method.default_wire
        try:
            require_abilities(method, wire=wire, nodes=self.workers_per_node > 1)
        except AttachError as error:  # here it is a mistake on the command line
            raise ValueError(str(error)) from None

    def _refuse(self, method: "Baseline") -> None:
        """Raise ValueError for an option that ``method`` cannot honour."""
        for one in dataclasses.fields(self):
            about, value = option_of(one), getattr(self, one.name)
            if one.name in method.refused and value != one.default:
                assert about is not None
                flag = about.flag(one.name)
                raise ValueError(f"{flag} {value}: {method.name} cannot honour it, leave it out")

    @property
    def label(self) -> str:
        """The strategy, with what else of the method is not the default; see ``under``."""
        return " ".join([self.strategy, *self.options])

    @property
    def options(self) -> tuple[str, ...]:
        """What else of the method is not the default, as in ``--wire int8``."""
        return tuple(
            f"{about.flag(one.name)} {str(getattr(self, one.name)).removesuffix('.0')}"
            for one, about in _of_method().items()
            if getattr(self, one.name) not in (one.default, self._usual(one.name))
        )

    def _usual(self, name: str) -> object:
        """Another way to write the default: the strategy's own wire."""
        from offbeat.lab.methods.registry import parse_method
        from offbeat.strategies import Strategy

        if name != "wire":
            return None
        try:
            method = parse_method(self.strategy)
        except (ValueError, TypeError):  # a result of elsewhere, with a strategy that is not here
            return None
        return method.default_wire if isinstance(method, Strategy) else None

    def under(self, text: str) -> "Job":
        """This job under a strategy and options for it alone.

        ``job.under("local:period=8 --wire int8 --lr-scale 2")``. Options are those of the method:
        learning rate, sampler, injection, wire.

        Raises:
            ValueError: another option, or one without a value.
        """
        strategy, *words = text.split() or [""]
        kind: type = type(self)
        flags = {about.flag(one.name): one for one, about in _of_method().items()}
        told: dict[str, Any] = {}
        for flag, value in _pairs(text, words):
            if flag not in flags:
                raise ValueError(
                    f"in {text!r}: {flag} cannot be given to one strategy; {', '.join(flags)} can"
                )
            one = flags[flag]
            if one.name in told:
                raise ValueError(f"in {text!r}: {flag} is given twice")
            told[one.name] = value
            if types_of(kind)[one.name] is float:
                try:
                    told[one.name] = float(value)
                except ValueError:
                    raise ValueError(f"in {text!r}: {flag} must be a number") from None
        return dataclasses.replace(self, strategy=strategy, **told)

    def sampler_for(self, task: "Task", rank: int) -> "Sampler[int]":
        """Which samples worker ``rank`` reads, and in which order."""
        from offbeat.lab.samplers import make_sampler

        return make_sampler(
            task,
            self.workers,
            rank,
            seed=self.seed,
            kind=self.sampler,
            partition=self.partition,
        )


def _of_method() -> "dict[dataclasses.Field[Any], Option]":
    """The fields of ``Job`` that belong to the method, each with its option."""
    found = {}
    for one in dataclasses.fields(Job):
        about = option_of(one)
        if about is not None and about.of_method:
            found[one] = about
    return found


def option_of_method() -> frozenset[str]:
    """The names of the fields that belong to the method."""
    return frozenset(one.name for one in _of_method())


def _pairs(text: str, words: list[str]) -> Iterator[tuple[str, str]]:
    """Flags and values of ``--flag value`` and ``--flag=value``."""
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        value = value if equals else next(rest, "")
        if not value:
            raise ValueError(f"in {text!r}: {flag} needs a value")
        yield flag, value
