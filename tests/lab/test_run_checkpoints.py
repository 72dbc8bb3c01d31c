"""A resumed run ends as if it had never been interrupted, and repeats its events."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cells import some
from lab import tiny
from offbeat import Compute, Network
from offbeat.checkpoint import save_load as checkpoint
from offbeat.errors import OffbeatError
from offbeat_lab import checkpoints
from offbeat_lab.compare import run_and_record
from offbeat_lab.events import (
    EvaluationCount,
    Event,
    Resumed,
    Start,
    Step,
)
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.results import Result

STEPS = 30
JOB = Job(
    "tiny", "local:period=4", 2, seed=3, sampler="distributed", live=True
)  # epochs of 12 steps
ROWS = [
    "async:staleness=4",
    "diloco:period=5 --optimizer muon",
    *(
        pytest.param(text, marks=pytest.mark.nightly)
        for text in ("bsp", "selsync:target_lssr=0.5", "diloco:period=5,overlap=2")
    ),
]


def noisy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return a loss that draws from torch's generator, as augmentation and dropout do."""
    inputs, targets = batch
    noise = 0.1 * torch.randn(inputs.shape, dtype=inputs.dtype)
    return nn.functional.mse_loss(model(inputs + noise), targets)


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "STEPS", STEPS)
    monkeypatch.setattr(tiny, "loss", noisy)


def trained(job: Job) -> tuple[Result, list[Event]]:
    """Train in virtual time."""
    events: list[Event] = []
    place = VirtualCluster(Network("1Gbit/s"), Compute("10ms"))
    return run_and_record(job, events.append, place), events


def remove_later(folder: Path, step: int) -> None:
    """Remove the checkpoints after ``step``, as if the run had ended there."""
    for path in folder.iterdir():
        if int(path.name.split("-")[1].split(".")[0]) > step:
            path.unlink()


@pytest.mark.parametrize("every", some([7, 12], 0), ids=["within an epoch", "at its end"])
@pytest.mark.parametrize("strategy", ROWS)
def test_a_resumed_run_ends_with_the_same_bits(strategy: str, every: int, tmp_path: Path) -> None:
    """All metrics and totals are equal, and the events continue."""
    job = replace(JOB.under(strategy), evaluations=6)
    plain, _ = trained(job)
    saving = replace(job, checkpoints=str(tmp_path), save_every=every)
    watched, _ = trained(saving)
    last = STEPS // every * every
    assert {path.name for path in tmp_path.iterdir()} == {
        f"step-{step}.rank{rank}.pt" for step in (last - every, last) for rank in range(2)
    }
    remove_later(tmp_path, last - every)
    resumed, events = trained(replace(saving, resume=True))

    metrics = [point.metrics for point in plain.points]
    assert len(metrics) == 6
    for result in (watched, resumed):
        assert [point.metrics for point in result.points] == metrics
        assert [point.step for point in result.points] == [point.step for point in plain.points]
        for one, other in zip(result.stats, plain.stats, strict=True):
            assert (one.steps, one.syncs) == (other.steps, other.syncs) == (STEPS, one.syncs)
            assert one.payload_bytes == other.payload_bytes
    seconds = [point.seconds for point in resumed.points]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(plain.points[-1].seconds, rel=0.05)
    kinds = [type(event) for event in events]
    assert events[kinds.index(Resumed)] == Resumed(last - every)
    assert kinds.index(Start) < kinds.index(Resumed) < kinds.index(Step)
    first = next(event for event in events if isinstance(event, Step))
    assert first.step > last - every


def test_without_save_every_only_the_end_is_saved(tmp_path: Path) -> None:
    """The checkpoint after the last step is the only one, also after a resumed run."""
    saving = replace(JOB, evaluations=2, checkpoints=str(tmp_path))
    first, _ = trained(saving)
    names = {f"step-{STEPS}.rank{rank}.pt" for rank in range(2)}
    assert {path.name for path in tmp_path.iterdir()} == names
    again, events = trained(replace(saving, resume=True))
    assert again.final_metrics == first.final_metrics
    assert {path.name for path in tmp_path.iterdir()} == names
    assert not [event for event in events if isinstance(event, Step)]


def test_a_resumed_run_evaluates_as_often_as_it_is_told(tmp_path: Path) -> None:
    """A number that the saved run has chosen does not replace that of the option."""
    saving = replace(JOB, checkpoints=str(tmp_path), save_every=15)
    first, _ = trained(saving)
    remove_later(tmp_path, 15)
    chosen, events = trained(replace(saving, resume=True))
    assert any(isinstance(event, EvaluationCount) for event in events)
    assert [point.step for point in chosen.points] == [point.step for point in first.points]
    remove_later(tmp_path, 15)
    told, events = trained(replace(saving, resume=True, evaluations=2))
    assert not any(isinstance(event, EvaluationCount) for event in events)
    assert [point.step for point in told.points if point.step > 15] == [STEPS]


def test_older_checkpoints_and_those_of_scripts(tmp_path: Path, monkeypatch: Any) -> None:
    """A checkpoint of an older version lacks new options, which then had their defaults."""
    saving = replace(JOB, evaluations=1, checkpoints=str(tmp_path), save_every=15)
    contents: dict[str, Any] = {}

    def save(*args: Any, extra: dict[str, Any], **options: Any) -> Path:
        del extra["job"]["adam_correction"]
        return checkpoint.save(*args, extra=extra | contents, **options)

    monkeypatch.setattr(checkpoints, "save", save)
    trained(saving)
    trained(replace(saving, resume=True))
    with pytest.raises(OffbeatError, match="with adam_correction=None, this one has adam_corre"):
        trained(replace(saving, resume=True, adam_correction="off"))
    contents["job"] = None
    trained(replace(saving, checkpoints=str(tmp_path / "script")))
    with pytest.raises(OffbeatError, match=r"script/step-30.* was not saved by offbeat train"):
        trained(replace(saving, checkpoints=str(tmp_path / "script"), resume=True))


@pytest.mark.sampled
def test_a_time_limit_ends_with_a_checkpoint(tmp_path: Path) -> None:
    """A run without the limit continues from there. All steps take 10 ms."""
    job = replace(JOB, evaluations=6)
    plain, _ = trained(job)
    saving = replace(job, checkpoints=str(tmp_path))
    limited, _ = trained(replace(saving, max_seconds=0.1))
    ended = limited.stats[0].steps
    assert 10 <= ended <= 12
    rest, events = trained(replace(saving, resume=True))
    assert Resumed(ended) in events
    assert [(one.step, one.metric) for one in rest.points] == [
        (one.step, one.metric) for one in plain.points
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 4}, "of a run with seed=3, this one has seed=4: resume with the same options"),
        ({"lr_scale": 2.0}, "of a run with lr_scale=1.0, this one has lr_scale=2.0"),
        ({"sampler": "seldp"}, "of a run with sampler='distributed', this one has sampler='seldp'"),
        ({"strategy": "bsp"}, r"saved under LocalSGD\(period=4\), this is BSP\(\)"),
        ({"workers": 3}, "no checkpoint in .* is whole on all workers|saved by one of 2 workers"),
    ],
)
def test_another_run_is_not_resumed(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    saving = replace(JOB, evaluations=1, checkpoints=str(tmp_path), save_every=15)
    trained(saving)
    with pytest.raises(OffbeatError) as caught:
        trained(replace(saving, resume=True, **changes))
    assert re.search(message, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("options", "there", "message"),
    [
        ({"resume": True}, False, "--resume needs --checkpoints, the directory of the checkpoints"),
        (
            {"save_every": 3},
            False,
            "--save-every needs --checkpoints, the directory of the check.*",
        ),
        ({"checkpoints": ".", "save_every": 0}, False, "save_every must be at least 1, got 0"),
        (
            {"checkpoints": ".", "live": False},
            False,
            "checkpoints need a run with live=True, which evaluates as it trains",
        ),
        (
            {"checkpoints": ".", "save_every": 5, "injection": "0.5,0.5"},
            False,
            "--checkpoints with --injection: .* leave one of them out",
        ),
        (
            {"checkpoints": ".", "resume": True},
            False,
            "--resume: . holds no checkpoint, leave it .*",
        ),
        (
            {"checkpoints": ".", "save_every": 5},
            True,
            "--checkpoints .: a run was saved there already; continue it with --resume, or .*",
        ),
        (
            {"checkpoints": ".", "save_every": 5, "strategy": "ideal"},
            False,
            "--checkpoints .: ideal cannot honour it, leave it out",
        ),
        (
            {"checkpoints": ".", "resume": True, "strategy": "torch:ddp"},
            False,
            "--checkpoints .: torch:ddp cannot honour it, leave it out",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: dict[str, Any],
    there: bool,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything runs."""
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / "step-20.rank0.pt").touch()
    with pytest.raises(ValueError, match=r".") as caught:
        replace(JOB, **options).check()
    assert re.fullmatch(message, str(caught.value)), caught.value
