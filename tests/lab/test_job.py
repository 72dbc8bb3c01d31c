"""A job: options of one strategy, and mistakes found before anything runs."""

import re

import pytest

from offbeat_lab.job import Job

JOB = Job("digits", "bsp", 2)


@pytest.mark.parametrize(
    "text",
    [
        "bsp",
        "local:period=8 --wire int8",
        "local:period=8 --lr-scale 0.25 --sampler distributed --injection 0.5,0.25",
        "fedavg:period=8,weights=1/2 --lr-scale 1e-05",
        "selsync:delta=0.1,window=4 --wire int8",
        "diloco:period=16 --wire int8",
        "ideal --lr-scale 2",
    ],
)
def test_a_label_is_what_was_typed(text: str) -> None:
    """The label gives the same job again."""
    job = JOB.under(text)
    assert job.label == text
    assert JOB.under(job.label) == job


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("bsp --wire float32", "bsp"),
        ("streaming --wire int2", "streaming"),
        ("streaming --wire float32", "streaming --wire float32"),
        ("streaming:schedule=cyclic --wire float32", "streaming:schedule=cyclic"),
        ("nowhere:Known --wire float32", "nowhere:Known --wire float32"),
    ],
)
def test_a_label_omits_the_default_wire_of_the_strategy(text: str, label: str) -> None:
    """A custom strategy that is not available has an unknown default."""
    assert JOB.under(text).label == label


def test_options_of_the_whole_comparison_stay() -> None:
    """Options that a strategy does not set are those of the command."""
    job = Job("digits", "bsp", 2, wire="int8", lr_scale=2.0).under("local:period=4 --lr-scale=3")
    assert (job.strategy, job.wire, job.lr_scale) == ("local:period=4", "int8", 3.0)
    assert job.under("bsp --wire float32").wire == "float32"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bsp --workers 4", "in 'bsp --workers 4': --workers cannot be given to one strategy; .*"),
        (
            "bsp --epochs 4",
            ".*; --lr-scale, --sampler, --injection, --wire, --adam-correction can",
        ),
        ("bsp wire=int8", "in 'bsp wire=int8': wire cannot be given to one strategy; .*"),
        ("bsp --wire", "in 'bsp --wire': --wire needs a value"),
        ("bsp --lr-scale two", "in 'bsp --lr-scale two': --lr-scale must be a number"),
        ("bsp --wire int8 --wire int8", ".*: --wire is given twice"),
        ("bsp --wire int3", "wire must be .*"),
        ("ssp:staleness=1 --wire int8", "wire='int8' with ssp:staleness=1: baselines .* exact.*"),
        ("bsp --injection 2", "injection must be .*"),
        ("streaming --injection 1,1", "data injection with streaming: .*; use BSP, LocalSGD, .*"),
        ("easgd --injection 0.5,0.5", "data injection with easgd: its workers do not wait .*"),
        ("async:schedule=fast", "schedule must be .*, got .fast."),
        ("async:optimizer=adamw", "async has no setting 'optimizer'; .*"),
        (
            "local:period=8 --outer-state average",
            ".*: --outer-state cannot be given to one strategy; .*",
        ),
    ],
)
def test_options_of_a_strategy_are_honoured_or_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        JOB.under(text).check()
    assert re.fullmatch(message, str(caught.value))


def test_a_baseline_is_refused_nodes() -> None:
    with pytest.raises(ValueError, match="node_group with easgd: baselines"):
        Job("digits", "easgd", 4, workers_per_node=2).check()
