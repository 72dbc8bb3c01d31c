"""``Job``: the settings of a training run, as used on the command line, by workers and in results.

A *method* is what a run trains with: a strategy of this package or a *reference* to compare with. A
*peer* is a reference of torch, which runs its own code. A *runner* runs jobs on
real or simulated workers.

The command line builds its help from the fields of ``Job``. To show help quickly, this module
imports torch and other slow modules only inside its methods.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offbeat.extend import Precision, check_settings, setting, types_of
from offbeat_lab.options import Option, Panel, option, option_of

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from offbeat_lab.methods.base import Reference
    from offbeat_lab.recipes import Setup, Task

MOST_WORKERS = 1000
LEASED = "leased"
"""Value of ``Job.partition`` with which faster workers take more of the data."""
MOST_SEED = 4_000_000  # worker r uses the seed 1000 · seed + r, which must fit into 32 bits


def _recipes() -> Iterable[str]:
    from offbeat_lab.recipes import RECIPES

    return RECIPES


@dataclass(frozen=True)
class Job:
    """One training run: recipe, method, number of workers and other settings.

    A field that is declared with ``option`` is also a command-line option, explained by its help
    text. The other fields:

    - ``step_seconds``: time that a real worker needs to compute a step; it sleeps for the rest of
      that time (see ``timing.padding``). None: step times are not controlled. It has no effect in
      the simulator.
    - ``strategy``: strategy or reference, as text such as ``local:period=8``. With ``jitter`` or
      ``slow``, real workers require ``step_seconds``.
    - ``scenario``: deaths and joins of workers, and changes of speeds and bandwidths, as JSON text
      (see ``lab.scenario``). On real workers, speeds require ``step_seconds``. The runner of the
      job carries out all but the speeds of real workers.
    """

    recipe: str = option(
        Panel.TRAINED,
        "A name in `offbeat recipes`, or path/to/file.py.",
        names=_recipes,
        default=dataclasses.MISSING,
    )
    strategy: str = "streaming"
    workers: int = option(
        Panel.WORKERS, "Number of workers.", "--workers", "-n", default=4, least=1
    )
    epochs: float | None = option(
        Panel.TRAINED,
        "Passes over the data, by all workers together.",
        unset="the recipe's",
        above=0,
    )
    seed: int = option(Panel.TRAINED, "Seed of all random choices.", default=0, least=0)
    data: str | None = option(
        Panel.TRAINED, "Data directory, if the recipe needs one.", is_path=True
    )
    evaluations: int | None = option(
        Panel.OUTPUT,
        "Number of evaluations, evenly spaced.",
        unset="24, or fewer of a large model",
        least=1,
    )
    max_steps: int | None = option(
        Panel.LIMITS, "Stop after this many steps of each worker.", least=1
    )
    max_seconds: float | None = option(Panel.LIMITS, "Stop after this training time.", above=0)
    jitter: float = option(
        Panel.WORKERS, "Relative standard deviation of the step time.", default=0.0, least=0
    )
    slow: str | None = option(Panel.WORKERS, "Slow workers down, as in 0=2.", metavar="RANK=X")
    scenario: str | None = None
    step_seconds: float | None = setting(None, above=0)
    workers_per_node: int = option(
        Panel.WORKERS, "Workers per simulated node, which share its link.", default=1, least=1
    )
    # Not --log, because torchrun has options that begin with it.
    log: str | None = option(
        Panel.OUTPUT,
        "JSON lines of every step of a single run, one file per worker.",
        "--records",
        is_path=True,
    )
    timeout_seconds: float = option(
        Panel.LIMITS,
        "Seconds for an operation between workers.",
        "--timeout",
        default=120.0,
        above=0,
    )
    lr_scale: float = option(
        Panel.STRATEGIES,
        "Factor on the recipe's learning rate.",
        "--lr-scale",
        default=1.0,
        metavar="FACTOR",
        above=0,
    )
    partition: str | None = option(
        Panel.TRAINED,
        "label:K (K labels per worker), dirichlet:A, or leased (faster workers take more).",
        metavar="KIND",
    )
    sampler: str = option(
        Panel.STRATEGIES,
        "Data of a worker: seldp (all), defdp (1/N), distributed (1/N, new each epoch).",
        default="seldp",
        metavar="NAME",
    )
    injection: str | None = option(
        Panel.STRATEGIES,
        "In a step, a share A of the workers sends a share B of its batch.",
        metavar="A,B",
    )
    wire: Precision | None = option(
        Panel.STRATEGIES,
        "Precision of what is sent: float32, int8, int4, int2.",
        metavar="NAME",
        unset="float32; int2 for streaming",
    )
    adam_correction: Literal["on", "off"] | None = option(
        Panel.STRATEGIES,
        "Lengthen local steps of Adam.",
        unset="on if models are averaged",
    )

    def setup(self) -> "Setup":
        """Return the argument of the recipe's ``build``."""
        from offbeat_lab.recipes import Setup, find_recipe

        recipe = find_recipe(self.recipe)
        epochs = recipe.epochs if self.epochs is None else self.epochs
        data = Path(self.data) if self.data else None
        return Setup(self.workers, epochs, self.seed, data)

    def check(self, task: "Task | None" = None) -> "Task":
        """Find mistakes before a worker starts, and return the task.

        Args:
            task: A task already built with the same recipe, data and workers. None: build it.
        """
        from offbeat_lab.recipes import find_recipe
        from offbeat_lab.recipes.custom import try_out
        from offbeat_lab.samplers import parse_injection

        check_settings(self)
        self._check_bounds()
        self.check_method()
        self._check_leases()
        recipe = find_recipe(self.recipe)
        recipe.check_data(self.data)
        if task is None:
            task = recipe.build(self.setup())
            if recipe.file is not None:
                try_out(recipe, task)
        if self.injection is not None:
            parse_injection(self.injection)
        self._check_strategy(task)
        self.sampler_for(task, 0)
        return task

    def _check_leases(self) -> None:
        from offbeat_lab.methods.peer import Peer
        from offbeat_lab.methods.registry import is_elastic, is_ideal, parse_method
        from offbeat_lab.scenario import Scenario

        if Scenario.from_json(self.scenario).elastic:
            known = is_elastic(self.strategy) or is_ideal(self.strategy)
            reasons = {
                "others take over data, so add --partition leased": self.partition != LEASED,
                f"{self.strategy} needs all its workers": not known,
                "leave --max-seconds out, and set --epochs": self.max_seconds is not None,
            }
            refuse("--scenario with deaths or joins: {}", reasons)
        if self.partition == LEASED:
            reasons = {
                "--injection": self.injection is not None,
                f"--sampler {self.sampler}": self.sampler != Job.sampler,
                "nodes of several workers": self.workers_per_node > 1,
                self.strategy: isinstance(parse_method(self.strategy), Peer),
            }
            message = "the workers take different numbers of steps; leave one of them out"
            refuse(f"--partition leased with {{}}: {message}", reasons)

    def _check_bounds(self) -> None:
        from offbeat.extend import require_timeout
        from offbeat_lab.timing.padding import parse_slow

        parse_slow(self.slow, self.workers)
        uneven = f"do not fill nodes of workers_per_node={self.workers_per_node}"
        reasons = {
            f"workers={self.workers} {uneven}": self.workers % self.workers_per_node,
            f"workers must be at most {MOST_WORKERS}, got {self.workers}": (
                self.workers > MOST_WORKERS
            ),
            f"seed must be at most {MOST_SEED}, got {self.seed}": self.seed > MOST_SEED,
        }
        refuse("{}", reasons)
        require_timeout(self.timeout_seconds, "timeout")

    def check_method(self) -> None:
        """Raise unless the strategy or reference supports the settings of this job."""
        from offbeat import AttachError
        from offbeat.extend import require_abilities
        from offbeat_lab.methods.base import Reference
        from offbeat_lab.methods.registry import parse_method

        method = parse_method(self.strategy)
        if isinstance(method, Reference):
            self._check_refused(method)
            return
        wire = self.wire or method.default_wire
        try:
            require_abilities(
                method,
                wire=wire,
                adam_correction=self.adam_correction == "on",
                nodes=self.workers_per_node > 1,
            )
        except AttachError as error:  # on the command line, this is a wrong argument
            raise ValueError(str(error)) from None

    def _check_strategy(self, task: "Task") -> None:
        """Raise ValueError if the strategy cannot train this task with so many workers."""
        from offbeat import AttachError, Strategy
        from offbeat.extend import CustomFlow, require_correctable
        from offbeat_lab.methods.registry import parse_method

        method = parse_method(self.strategy)
        if not isinstance(method, Strategy):
            return
        averages = method.averages()
        if self.injection is not None and not averages.blocking:
            raise ValueError(
                f"data injection with {method}: its workers do not wait for each other, as data "
                "injection requires in every step; use BSP, LocalSGD, SelSync, FedAvg, or DiLoCo "
                "without overlap"
            )
        try:
            if isinstance(averages, CustomFlow):
                averages.check(self.workers)
            if self.adam_correction == "on":
                require_correctable([task.optimizer])
        except AttachError as error:
            raise ValueError(str(error)) from None

    def _check_refused(self, method: "Reference") -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in method.refused and value != field.default:
                option = option_of(field)
                assert option is not None
                raise ValueError(
                    f"{option.flag(field.name)} {value}: {method.name} cannot honour it, "
                    "leave it out"
                )

    @property
    def label(self) -> str:
        """Strategy and ``options`` in the text form that ``under`` accepts."""
        return " ".join([self.strategy, *self.options])

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the method that differ from the default, such as ``--wire int8``."""
        return tuple(
            f"{option.flag(field.name)} {str(getattr(self, field.name)).removesuffix('.0')}"
            for field, option in method_options().items()
            if getattr(self, field.name) not in (field.default, self._implied(field.name))
        )

    def _implied(self, name: str) -> object:
        """Return the strategy's default for the field ``wire``; None for other fields."""
        from offbeat import Strategy
        from offbeat_lab.methods.registry import parse_imported

        if name != "wire":
            return None
        method = parse_imported(self.strategy)
        return method.default_wire if isinstance(method, Strategy) else None

    def under(self, text: str) -> "Job":
        """Return a copy of this job with another method.

        Example: ``job.under("local:period=8 --wire int8 --lr-scale 2")``.

        ``text`` is a strategy or a reference, followed by some of ``method_options`` with values.
        """
        strategy, *words = text.split() or [""]
        fields = {option.flag(field.name): field for field, option in method_options().items()}
        types, values, rest = types_of(Job), dict[str, Any](), iter(words)
        for word in rest:
            flag, equals, value = word.partition("=")
            value = value if equals else next(rest, "")
            if not value:
                raise ValueError(f"in {text!r}: {flag} needs a value")
            if flag not in fields:
                raise ValueError(
                    f"in {text!r}: {flag} cannot be given to one strategy; {', '.join(fields)} can"
                )
            name = fields[flag].name
            if name in values:
                raise ValueError(f"in {text!r}: {flag} is given twice")
            values[name] = value
            if types[name] is float:
                try:
                    values[name] = float(value)
                except ValueError:
                    raise ValueError(f"in {text!r}: {flag} must be a number") from None
        return dataclasses.replace(self, strategy=strategy, **values)

    def sampler_for(self, task: "Task", rank: int) -> "Sampler[int]":
        """Return the sampler of worker ``rank``. With leased data: one with equal shares."""
        from offbeat_lab.samplers import make_sampler

        leased = self.partition == LEASED
        return make_sampler(
            task,
            self.workers,
            rank,
            seed=self.seed,
            kind="distributed" if leased else self.sampler,
            partition=None if leased else self.partition,
        )


def method_options() -> "dict[dataclasses.Field[Any], Option]":
    """Return the fields of ``Job`` that a comparison can set for each method, with options."""
    options = {field: option_of(field) for field in dataclasses.fields(Job)}
    return {f: o for f, o in options.items() if o is not None and o.panel is Panel.STRATEGIES}


def refuse(message: str, reasons: Mapping[str, object]) -> None:
    """Raise ValueError for the first reason that is true, with its text in place of {}."""
    for reason, given in reasons.items():
        if given:
            raise ValueError(message.format(reason))
