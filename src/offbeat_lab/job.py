"""``Job``: the settings of a training run, as used on the command line, by workers and in results.

A *method* is what a run trains with: a strategy of this package or a *reference* to compare with. A
*peer* is a reference of torch, which runs its own code. A *runner* runs jobs on
real or simulated workers.

The help of the command line shows defaults of ``Job``. To show help quickly, this module imports
torch and other slow modules only inside its methods.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offbeat.extend import Precision, check_settings, setting, types_of

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from offbeat_lab.methods.base import Reference
    from offbeat_lab.recipes import Setup, Task

MOST_WORKERS = 1000
USUAL_LATENCY = "100us"
"""Latency of a simulated message, if none is given."""
LEASED = "leased"
"""Value of ``Job.partition`` with which faster workers take more of the data."""
MOST_SEED = 4_000_000  # worker r uses the seed 1000 · seed + r, which must fit into 32 bits


METHOD_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in ("lr_scale", "sampler", "injection", "wire", "adam_correction")
}
"""Fields of ``Job`` that a comparison can set for each method → their options."""


@dataclass(frozen=True)
class Job:
    """One training run: recipe, method, number of workers and other settings.

    Attributes:
        recipe: Name of a recipe, or path of a file with one.
        strategy: Strategy or reference, as text such as ``local:period=8``.
        workers: Number of workers, up to ``MOST_WORKERS``.
        epochs: Passes over the data, by all workers together. None: the recipe's.
        seed: Seed of all random choices, up to ``MOST_SEED``.
        data: Directory of the data, if the recipe needs one.
        evaluations: Number of evaluations, evenly spaced. None: as many as memory allows, up to 24.
        max_steps: Number of steps of each worker after which the run stops. None: no limit.
        max_seconds: Training time after which the run stops. None: no limit.
        jitter: Relative standard deviation of the step time. Real workers require ``step_seconds``.
        slow: Factors on the step times of workers, as in ``0=2``. Real workers require
            ``step_seconds``.
        scenario: Deaths and joins of workers, and changes of speeds and bandwidths, as JSON text
            (see ``lab.scenario``). On real workers, speeds require ``step_seconds``. The runner of
            the job carries out all but the speeds of real workers.
        step_seconds: Time that a real worker needs to compute a step; it sleeps for the rest of
            that time (see ``timing.padding``). None: step times are not controlled. It has no
            effect in the simulator.
        workers_per_node: Workers per simulated node, which share its link.
        log: Path of the records of every step. None: no records.
        timeout_seconds: Time limit of an operation between workers.
        lr_scale: Factor on the recipe's learning rate.
        partition: Partition of the data: ``label:K``, ``dirichlet:A``, or ``leased``. None: none.
        sampler: Data of a worker: ``seldp``, ``defdp`` or ``distributed``.
        injection: Shares α and β of data injection, as in ``0.5,0.5``. None: no injection.
        wire: Precision of what is sent. None: the strategy's default.
        adam_correction: "on" to lengthen local steps of Adam. None: if models are averaged.
    """

    recipe: str
    strategy: str = "streaming"
    workers: int = setting(4, least=1)
    epochs: float | None = setting(None, above=0)
    seed: int = setting(0, least=0)
    data: str | None = None
    evaluations: int | None = setting(None, least=1)
    max_steps: int | None = setting(None, least=1)
    max_seconds: float | None = setting(None, above=0)
    jitter: float = setting(0.0, least=0)
    slow: str | None = None
    scenario: str | None = None
    step_seconds: float | None = setting(None, above=0)
    workers_per_node: int = setting(1, least=1)
    log: str | None = None
    timeout_seconds: float = setting(120.0, above=0, metadata={"label": "timeout"})
    lr_scale: float = setting(1.0, above=0, metadata={"label": "lr-scale"})
    partition: str | None = None
    sampler: str = "seldp"
    injection: str | None = None
    wire: Precision | None = None
    adam_correction: Literal["on", "off"] | None = None

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
        for name in method.refused:
            if (value := getattr(self, name)) != getattr(Job, name):
                option = METHOD_OPTIONS.get(name, "--records")
                raise ValueError(f"{option} {value}: {method.name} cannot honour it, leave it out")

    @property
    def label(self) -> str:
        """Strategy and ``options`` in the text form that ``under`` accepts."""
        return " ".join([self.strategy, *self.options])

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the method that differ from the default, such as ``--wire int8``."""
        return tuple(
            f"{option} {str(getattr(self, name)).removesuffix('.0')}"
            for name, option in METHOD_OPTIONS.items()
            if getattr(self, name) not in (getattr(Job, name), self._implied(name))
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

        ``text`` is a strategy or a reference, followed by some of ``METHOD_OPTIONS`` with values.
        """
        strategy, *words = text.split() or [""]
        names = {option: name for name, option in METHOD_OPTIONS.items()}
        types, values, rest = types_of(Job), dict[str, Any](), iter(words)
        for word in rest:
            flag, equals, value = word.partition("=")
            value = value if equals else next(rest, "")
            if not value:
                raise ValueError(f"in {text!r}: {flag} needs a value")
            if flag not in names:
                raise ValueError(
                    f"in {text!r}: {flag} cannot be given to one strategy; {', '.join(names)} can"
                )
            name = names[flag]
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


def refuse(message: str, reasons: Mapping[str, object]) -> None:
    """Raise ValueError for the first reason that is true, with its text in place of {}."""
    for reason, given in reasons.items():
        if given:
            raise ValueError(message.format(reason))
