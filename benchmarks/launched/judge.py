"""What must hold after a training with faults, computed from the logs of its workers.

- All workers end with the same model, all launchers with exit code 0, and no process is left.
- Every sample is used, and samples are used again only as often as the samplers count.
- The losses and the models of the steps are those of plain arithmetic (``judge_models``), for the
  strategies whose workers wait for their means. The models of the others depend on the time at
  which messages arrive. Their losses are checked.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.launched.training import Event, Process, Training, wait_until

RATE = 1 / 8
"""How far a step moves the two numbers towards the target of its batch."""
PERIODS = {
    "bsp": 1,
    "local:period=4": 4,
    "diloco:period=3,outer_lr=1,outer_momentum=0": 3,
    "selsync:delta=0.3": math.inf,  # the gradients decide
}
"""Strategy whose models are replayed → the largest number of steps from one mean to the next."""
Model = tuple[float, ...]


def target(batch: list[int]) -> float:
    """Return the value towards which a batch moves the two numbers of the model, below 16."""
    return sum(sample * 37 % 64 - 32 for sample in batch) / (2 * len(batch))


@dataclass(frozen=True)
class Step:
    """A step of a worker, and where the next one begins.

    Attributes:
        worker: Index of the worker's process.
        before: Its line in the log.
        moved: Model after this worker's own step, without the other workers.
        after: The next line of this process. None if there is none.
        waited: True if the process waited for the others between the two lines: at the end of an
            epoch, in a consensus, or at the end of training.
    """

    worker: int
    before: Event
    moved: Model
    after: Event | None
    waited: bool

    def __str__(self) -> str:
        generation, step = self.before["generation"], self.before["step"]
        return f"process {self.worker}, generation {generation}, step {step}"

    @property
    def continues(self) -> bool:
        """True if the next line is that of the next step of the same generation."""
        return self.after is not None and self.after["generation"] == self.before["generation"]

    def pending(self, at: float) -> bool:
        """Return True if the step had begun by a time, and the next one had not."""
        return self.before["at"] < at and (self.after is None or self.after["at"] >= at)


def steps_of(processes: list[Process]) -> list[Step]:
    """Return all steps of all processes."""
    found = []
    for worker, process in enumerate(processes):
        waits = [e["at"] for e in process.events if e["event"] in ("waits", "last")]
        for line, after in itertools.zip_longest(process.steps, process.steps[1:]):
            first, last, uses = line["model"]
            aim = target(line["batch"])
            own = *(x + RATE * (aim - x) for x in (first, last)), uses + len(line["batch"])
            until = math.inf if after is None else after["at"]
            waited = any(line["at"] < at < until for at in waits) or (
                after is not None and any(line[key] != after[key] for key in ("epoch", "queue"))
            )
            found.append(Step(worker, line, own, after, waited))
    return found


def equal(a: Iterable[float], b: Iterable[float]) -> bool:
    """Return True if two models are equal up to rounding."""
    pairs = zip(a, b, strict=True)
    return all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-4) for x, y in pairs)


def judge_models(strategy: str, processes: list[Process]) -> Iterator[str]:
    """Yield the steps whose loss or model differs from a replay.

    The replay of a step begins with the models and the batches that the workers logged before it.
    Workers that begin a step with the same model have averaged theirs, so this model is the mean of
    the models after their own steps. Between means each worker has the model after its own step.
    That may also be close to a mean by chance: then other workers begin a step with the same bits.

    Every member of the generation takes part, at least once a period. The replay also tries all
    sets of workers that may have contributed: those that wait for the others, that were lost, or
    that repeat a step in another generation. Models that are averaged are not replayed across
    generations, because a worker takes the rest of its step from the common model.
    """
    period, steps = PERIODS.get(strategy, 0), steps_of(processes)
    means: dict[Model, list[Step]] = defaultdict(list)
    owners: dict[Model, set[int]] = defaultdict(set)  # workers that begin a step with a model
    for step in steps:
        if step.after is not None:
            owners[tuple(step.after["model"])].add(step.worker)
    alone: Counter[int] = Counter()  # steps since a mean, by process
    for step in steps:
        first, last, _ = step.before["model"]
        aim = target(step.before["batch"])
        loss = RATE / 2 * ((first - aim) ** 2 + (last - aim) ** 2)
        if not math.isclose(loss, step.before["loss"], rel_tol=1e-4, abs_tol=1e-4):
            yield f"{step}: the loss is not {loss}"
        if not period or step.after is None:
            continue
        model = tuple(step.after["model"])
        if period > 1 and equal(model, step.moved):
            alone[step.worker] = alone[step.worker] + 1 if step.continues else 0
            others = [s for s in steps if s.pending(step.after["at"]) and s.worker != step.worker]
            waited = any(s.waited for s in [step, *others])
            if step.after["members"] == 1 or waited or len(owners[model]) > 1:
                alone[step.worker] = 0  # perhaps the mean of one model, or close to a mean
            elif alone[step.worker] >= period:
                yield f"{step}: no mean after {alone[step.worker]} steps"
        else:
            alone[step.worker] = 0
            means[model].append(step)
    for model, group in means.items():
        yield from _judge_mean(model, group, steps, owners[model], across_generations=period == 1)


def _judge_mean(
    model: Model,
    group: list[Step],
    steps: list[Step],
    members: set[int],
    *,
    across_generations: bool,
) -> Iterator[str]:
    """Yield a violation unless ``model`` is the mean of the steps that end with it.

    ``members`` are the workers that have received it.
    """
    at = min(step.after["at"] for step in group if step.after is not None)
    generations = {
        line["generation"] for step in group for line in (step.before, step.after) if line
    }
    rest = [s for s in steps if s.worker not in members and s.pending(at)]
    rest = [step for step in rest if step.before["generation"] in generations]
    certain = [step.moved for step in group if step.continues and not step.waited]
    if not (across_generations or (certain and all(step.continues for step in group + rest))):
        return
    maybe: list[list[Model | None]] = []
    for step in [*group, *rest]:
        if not step.continues:
            maybe.append([None, step.moved, tuple(step.before["model"])])
        elif step.waited or step in rest:
            maybe.append([None, step.moved])
    for chosen in itertools.product(*maybe):
        models = certain + [one for one in chosen if one is not None]
        if models and equal(model, (sum(x) / len(models) for x in zip(*models, strict=True))):
            break
    else:
        yield f"{group[0]}: no mean of {certain} with some of {maybe}"
    absent = [step for step in rest if step.continues and not step.waited]
    if absent and len(generations) == 1:
        yield f"{group[0]}: without {', '.join(map(str, absent))}"


def judge(strategy: str, faults: tuple[str, ...], training: Training) -> list[str]:
    """Return the violations that are visible after the end of the training."""
    found = []
    codes = [launcher.poll() for launcher in training.launchers]
    ended = [process.slot for process in training.processes() if process.has("ended")]
    for place, code in enumerate(codes):
        # "kill at end" may come when the worker has ended, and its process has not.
        if code == 137 and any(slot.startswith(f"{place}:") for slot in ended):
            codes[place] = 0
    if any(codes):
        found.append(f"the launchers ended with {codes}")
    if None not in codes and not wait_until(lambda: not training.left(), 10):
        found.append(f"left behind: {training.left()}")
    failures = Counter(re.findall(r"worker \d+ ended with exit code (\d+)", training.output()))
    failures["1"] -= faults.count("exception") + faults.count("detach")
    expected = "75" if "stop for too long" in faults else ""
    found += [
        f"{count} workers ended with exit code {code}"
        for code, count in failures.items()
        if count > 0 and code != expected
    ]
    processes = training.processes()
    if not ended:
        found.append("no worker has finished")
    for name, members in _trainings(processes).items():
        violations = [*judge_uses(members), *judge_ends(members), *judge_models(strategy, members)]
        found += [f"training {name}: {one}" for one in violations]
    return found + judge_loads(processes)


def judge_ends(processes: list[Process]) -> Iterator[str]:
    """Yield a violation if the models at the end differ."""
    ends = [e["model"] for p in processes for e in p.events if e["event"] == "ended"]
    if any(end != ends[0] for end in ends):
        yield f"the models differ: {ends}"


def judge_loads(processes: list[Process]) -> list[str]:
    """Return the models that were loaded and not saved."""
    events = [event for process in processes for event in process.events]
    saved = [event["model"] for event in events if event["event"] == "saves"]
    loaded = [event["model"] for event in events if event["event"] == "loaded"]
    return [f"loaded {one}, which was not saved" for one in loaded if one not in saved]


def judge_uses(processes: list[Process]) -> Iterator[str]:
    """Compare which samples were used, and how often, with what the samplers count."""
    uses = _uses(processes)
    finishers = [process for process in processes if process.has("ended")]
    missing = _left(processes) - uses.keys() if finishers else ()
    if missing:
        yield f"{len(missing)} samples were not used"
    twice = sum(len(queues) - len({*queues}) for queues in uses.values())
    if twice:
        yield f"{twice} samples were used twice from one queue"
    again = sum(len(queues) - 1 for queues in uses.values())
    counted = sum(max((step["repeated"] for step in p.steps), default=0) for p in processes)
    if again > counted:
        yield f"{again} repeated uses, but the samplers count {counted}"
    newest = {key: max(queues) for key, queues in uses.items()}
    taken = sum(
        step["queue"] < newest[step["epoch"], sample]
        for process in finishers
        for step in process.steps
        for sample in step["batch"]
    )
    if taken:
        yield f"{taken} samples of survivors were used again"


def _trainings(processes: list[Process]) -> dict[str, list[Process]]:
    """Return the processes of each training. A new one begins when all workers have died."""
    found: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        for event in process.events:
            if event["event"] == "attached":
                found[event["training"]].append(process)
    return found


def _left(processes: list[Process]) -> set[tuple[int, int]]:
    """Return the samples with which the training began, each with its epoch."""
    left = [e["left"] for p in processes for e in p.events if e["event"] == "data"]
    return {(epoch, sample) for epoch, samples in left[0] for sample in samples}


def _uses(processes: list[Process]) -> dict[tuple[int, int], list[int]]:
    """Return for each epoch and sample the queues from which it was used."""
    uses: dict[tuple[int, int], list[int]] = defaultdict(list)
    for process in processes:
        for step in process.steps:
            for sample in step["batch"]:
                uses[step["epoch"], sample].append(step["queue"])
    return uses
