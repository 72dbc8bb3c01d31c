"""Table, plot and page of results written by hand."""

import base64
import html
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat import Stats
from offbeat_lab import report
from offbeat_lab.events import Evaluation
from offbeat_lab.job import Job
from offbeat_lab.recipes import find_recipe
from offbeat_lab.report import tables
from offbeat_lab.results import Result

NO_MORE: dict[str, float] = {}
PNG = b"\x89PNG\r\n\x1a\n"
Metrics = Sequence[tuple[float, float]]  # (seconds, metric) of each evaluation


def make(
    strategy: str,
    curve: Metrics,
    *,
    recipe: str = "digits",
    seed: int = 0,
    sent: tuple[int, int] = (1_000_000, 3_000_000),
    more: dict[str, float] = NO_MORE,
) -> Result:
    """Return the result of a run of two workers with LSSR 0.25 and 0.75, idle 10 % and 30 %."""
    found = find_recipe(recipe)
    points = (
        Evaluation(step, seconds, metric, {found.metric: metric, **more})
        for step, (seconds, metric) in enumerate(curve, start=1)
    )
    stats = (
        Stats(steps=4, syncs=3, payload_bytes=sent[0], wait_seconds=1, compute_seconds=9),
        Stats(steps=4, syncs=1, payload_bytes=sent[1], wait_seconds=3, compute_seconds=7),
    )
    return Result(
        job=Job(recipe, "bsp", 2, seed=seed).under(strategy),
        metric=found.metric,
        higher_is_better=found.higher_is_better,
        target=found.target,
        link="loopback",
        machine="Abacus, 2 cores",
        versions={},
        simulated=False,
        points=tuple(points),
        stats=stats,
    )


def rows(results: Sequence[Result]) -> tuple[tuple[str, ...], ...]:
    return report.table(results).rows


def cell(results: Sequence[Result], heading: str) -> str:
    return rows(results)[0][report.HEADINGS.index(heading)]


@pytest.mark.parametrize(
    ("recipe", "curve", "seconds"),
    [
        ("digits", [(1, 0.9), (2, 0.985), (3, 0.9)], 2),  # a later decrease does not matter
        ("digits", [(1, 0.5), (2, 0.9849), (3, 0.98)], None),
        ("digits", [(1, math.nan), (2, 0.99)], 2),
        ("stdlib-lm", [(1, 8.0), (2, 2.4), (3, 2.1)], 2),  # lower is better
    ],
)
def test_time_to_target_is_that_of_the_first_evaluation_at_it(
    recipe: str, curve: Metrics, seconds: float | None
) -> None:
    """The time is never interpolated."""
    one = make("bsp", curve, recipe=recipe)
    assert one.time_to_target_seconds == seconds
    assert cell([one], "time to target") == ("not reached" if seconds is None else f"{seconds}.0 s")


def test_columns_are_means_over_the_workers_and_medians_over_the_seeds() -> None:
    """Cells have the range over the seeds. A row has a time if all of its runs have one."""
    runs = [make("bsp", [(t, 0.99)], seed=t) for t in (6, 2, 3)]
    other = make("local:period=8", [(1, 0.5)])
    times = "3.0 (2.0-6.0) s"
    whole = (times, "1.00x", "0.9900 (0.9900-0.9900)", times, "0.50 (0.50-0.50)", "2.0 MB")
    assert rows([runs[0], other, *runs[1:]]) == (
        ("bsp", *whole, "20 (20-20) %"),
        ("local:period=8", "not reached", "-", "0.5000", "1.0 s", "0.50", "2.0 MB", "20 %"),
    )
    assert "3 seeds" in report.caption(runs)
    missed = make("bsp", [(9, 0.5)], seed=9)
    assert cell([*runs, missed], "time to target") == "not reached, 3 of 4"


@pytest.mark.parametrize(
    ("strategy", "shown"),
    [
        ("local:period=2", "0.50"),
        ("own.module:Strategy", "0.50"),
        ("ssp:staleness=3", "-"),
        ("async:staleness=4,schedule=eager --wire int8", "-"),
        ("streaming", "-"),
        ("streaming:schedule=cyclic", "0.50"),
    ],
)
def test_lssr_is_shown_where_workers_synchronize_in_the_same_steps(
    strategy: str, shown: str
) -> None:
    assert cell([make(strategy, [(1, 0.9)])], "LSSR") == shown


def test_a_row_is_a_strategy_with_its_options() -> None:
    """One strategy with different options has one row for each, with the label as name."""
    runs = [make(text, [(1, 0.9)]) for text in ("bsp", "bsp --wire int8", "bsp --lr-scale 2")]
    assert [row[0] for row in rows(runs)] == ["bsp", "bsp --wire int8", "bsp --lr-scale 2"]
    assert "--wire" not in report.caption(runs)
    names = [row[0] for row in rows([*runs, make("bsp", [(1, 0.9)], seed=1)])]
    assert names == [one.label for one in runs]
    assert runs[1].to_dict()["label"] == "bsp --wire int8"
    assert runs[1].to_dict()["job"]["wire"] == "int8"


@pytest.mark.parametrize(
    ("recipe", "metrics", "shown"),
    [
        ("digits", (0.09, 0.12, 0.1), "0.1000 (chance level)"),  # chance is 0.1
        ("mnist", (0.09, 0.12, 0.1), "0.1000 (chance level)"),  # an alias
        ("digits", (0.09, 0.14, 0.1), "0.1000"),
        ("digits", (0.98, 0.97, 0.97), "0.9700"),  # good from the start
        ("digits", (0.9, math.nan), "nan (diverged)"),
        ("stdlib-lm", (2.5, 2.6, math.inf), "inf (diverged)"),
        ("stdlib-lm", (2.5, 2.6, 9.0), "9.0000 (no progress)"),  # lower is better
        ("stdlib-lm", (2.5, 2.4, 9.0), "9.0000"),
        ("stdlib-lm", (2.5, 2.6), "2.6000"),  # two evaluations are too few
    ],
)
def test_runs_that_did_not_train_are_marked(
    recipe: str, metrics: Sequence[float], shown: str
) -> None:
    """A note explains the marks in use wherever the table is."""
    one = make("bsp", [*enumerate(metrics, start=1)], recipe=recipe)
    assert cell([one], "final") == shown
    mark = shown.partition("(")[2].rstrip(")")
    for page in (report.markdown([one]), report.page([one])):
        assert ("Runs that did not train: " in page) == bool(mark)
        assert (f"Runs that did not train: {mark} (" in page) == bool(mark)


def test_a_report_imports_no_module_that_the_results_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results may come from others."""
    (tmp_path / "evil.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    read = Result.from_dict(make("evil:X", [(1, 0.9)]).to_dict())
    for page in (report.markdown([read]), report.page([read])):
        assert "evil:X" in page
    assert "evil" not in sys.modules


def test_a_model_with_nan_has_diverged_at_any_accuracy() -> None:
    """Constant predictions of such a model have a finite accuracy, here above chance level."""
    one = make("bsp", [(1, 0.9), (2, 0.2)])
    lost = replace(one, points=(one.points[0], replace(one.points[1], finite=False)))
    assert cell([one], "final") == "0.2000"
    assert cell([lost], "final") == "0.2000 (diverged)"
    assert cell([Result.from_dict(lost.to_dict())], "final") == "0.2000 (diverged)"


def test_the_number_of_seeds_that_did_not_train_is_shown() -> None:
    """NaN counts as the worst value. Other runs have finite medians and differences."""
    finals = (0.97, math.nan, 0.98, 0.1)
    runs = [make("bsp", [(1, final)], seed=seed) for seed, final in enumerate(finals)]
    assert cell(runs[:3], "final") == "0.9700 (nan-0.9800) (1 of 3 diverged)"
    assert cell(runs[1:2], "final") == "nan (diverged)"
    assert cell(runs[:2], "final") == "nan (nan-0.9700) (1 of 2 diverged)"
    assert cell(runs, "final").endswith("(1 of 4 diverged, 1 of 4 chance level)")
    loss = [make("bsp", [(1, v)], recipe="stdlib-lm", seed=i) for i, v in enumerate(finals[:3])]
    assert cell(loss, "final") == "0.9800 (0.9700-nan) (1 of 3 diverged)"


def test_differences_from_a_diverged_run_are_marked() -> None:
    ideal = [make("ideal", [(1, 0.9)], seed=seed) for seed in range(2)]
    diverged = [make("bsp", [(2, math.nan)], seed=seed) for seed in range(2)]
    for runs, shown in (
        (diverged, "nan (diverged)"),
        ([diverged[0], make("bsp", [(2, 0.9)], seed=1)], "nan (1 of 2 diverged)"),
    ):
        table = report.differences([*ideal, *runs])
        assert table is not None
        assert table.rows[0][3:] == (shown, "+1.0 s")
    lost = [replace(one, job=replace(one.job, strategy="ideal")) for one in diverged]
    assert report.times_to_targets([*lost, *diverged]) is None


def test_speed_ups_and_shares_of_the_ideal() -> None:
    """A speed-up is relative to the first other row. A share is the ideal's time over the row's.

    There is neither if one of the two rows did not reach the target.
    """
    ideal = make("ideal", [(2, 0.99), (9, 0.99)])
    slow, fast = make("bsp", [(8, 0.99)]), make("async", [(2.5, 0.99)])
    never = make("local:period=8", [(9, 0.5)])
    table = report.table([ideal, slow, fast, never])
    assert table.headings[:5] == ("strategy", "time to target", "speed-up", report.SHARE, "final")
    assert [row[2:4] for row in table.rows] == [
        ("4.00x", "100 %"),
        ("1.00x", "25 %"),
        ("3.20x", "80 %"),
        ("-", "-"),
    ]
    assert {len(row) for row in table.rows} == {len(table.headings)}
    assert [row[2] for row in rows([never, slow])] == ["-", "-"]
    assert [row[3] for row in rows([replace(ideal, target=1.0), slow])] == ["-", "-"]
    assert rows([ideal])[0][2:4] == ("-", "100 %")
    assert report.SHARE_MEANS in report.notes([ideal, slow])
    assert report.SHARE_MEANS not in report.notes([slow])


def test_unknown_values_of_peers_are_dashes() -> None:
    """LSSR, bytes and idle share are unknown; times and metrics are known."""
    one = make("torch:ddp,hook=fp16", [(8, 0.99)])
    other = make("torch:ddp,hook=fp16", [(8, 0.99)], seed=1)
    for runs in ([one], [one, other]):
        assert [cell(runs, name) for name in ("LSSR", "sent per worker", "idle")] == ["-"] * 3
        assert cell(runs, "time to target").startswith("8.0")


def cells_of(page: str) -> list[str]:
    """Return the cells of the first table of a page."""
    return re.findall(r"<td[^>]*>(.*?)</td>", page.partition("</table>")[0], re.DOTALL)


def test_other_metrics_are_below_the_table() -> None:
    """They are the final values: median and range over the seeds."""
    runs = [
        make("bsp", [(1, 0.5), (2, 0.6)], more={"top-5 accuracy": 0.9, "top-10 accuracy": 1.0}),
        make("bsp", [(1, 0.5)], seed=1, more={"top-5 accuracy": 0.7, "top-10 accuracy": 1.0}),
        make("async", [(1, 0.5)], more={"top-5 accuracy": 0.25, "top-10 accuracy": 0.5}),
    ]
    first = "top-5 accuracy 0.8000 (0.7000-0.9000), top-10 accuracy 1.0000 (1.0000-1.0000)"
    second = "top-5 accuracy 0.2500, top-10 accuracy 0.5000"
    lines = report.markdown(runs).splitlines()
    assert lines[-3:] == ["", f"- `bsp`: {first}", f"- `async`: {second}"]
    page = report.page(runs)
    assert f"<li><code>bsp</code>: {first}</li><li><code>async</code>: {second}</li>" in page
    assert cells_of(page) == [text for row in rows(runs) for text in row]
    alone = [make("bsp", [(1, 0.5)])]
    assert report.other_metrics(alone) == []
    assert "At the end" not in report.markdown(alone) + report.page(alone)


def test_page_escapes_names() -> None:
    """A name with markup is shown as text."""
    evil = '<script>alert("1")</script>&amp;'
    one = make("bsp", [(1, 0.5)])
    job = replace(one.job, strategy=evil, recipe=evil)
    one = replace(one, job=job, link=evil, machine=evil, metric=evil)
    text = report.page([one])
    assert "<script" not in text
    assert html.unescape(cells_of(text)[0]) == evil


def test_page_needs_no_other_file() -> None:
    """Its figures are inline, and it loads nothing."""
    text = report.page([make("bsp", [(1, 0.5), (2, 0.99)]), make("ideal", [(1, 0.99)])])
    (source,) = re.findall(r'(?:src|href)="([^"]*)"', text)
    kind, _, content = source.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content).startswith(PNG)
    assert not re.findall(r"https?://", text)
    assert not re.search(r"@import|url\((?!#)", text)


def test_page_has_command_and_configurations() -> None:
    """The command appears once, and no directory of the user appears."""
    job = replace(make("bsp", [(1, 0.5)]).job, data="/home/somebody/data", lr_scale=0.25)
    runs = [replace(make("bsp", [(1, 0.5)]), job=job, command="offbeat compare 'a b' -s bsp")]
    runs += [replace(runs[0], job=replace(job, seed=seed)) for seed in (1, 2)]
    text = html.unescape(report.page(runs))
    assert text.count("offbeat compare 'a b' -s bsp") == 1
    assert '"lr_scale": 0.25' in text
    assert '"data": "data"' in text
    assert "somebody" not in text
    assert text.count('{"seed": ') == 3


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of figures saved from now on."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig

    def keep(figure: Any, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.mark.parametrize("recipe", ["digits", "stdlib-lm"])
def test_plot_draws_every_strategy(drawn: list[Any], tmp_path: Path, recipe: str) -> None:
    """Each strategy has a line at the medians and a legend entry."""
    runs = [
        make("bsp", [(1, 0.95), (2, 0.99)], recipe=recipe),
        make("async", [(1, 0.96), (3, 0.97)], recipe=recipe),
        make("bsp", [(1, 0.94), (2, 0.98)], recipe=recipe, seed=1),
    ]
    runs = [replace(one, simulated=True) for one in runs]
    report.plot(runs, tmp_path / "plot.png")
    ((axes,),) = (figure.axes for figure in drawn)
    *lines, target = axes.get_lines()
    got = sorted(tuple(zip(*line.get_data(), strict=True)) for line in lines)
    want = [((1, 0.945), (2, 0.985)), ((1, 0.96), (3, 0.97))]
    numbers = [number for line in got for point in line for number in point]
    assert numbers == pytest.approx([number for line in want for point in line for number in point])
    assert lines[0].get_color() != lines[1].get_color()
    (band,) = axes.collections  # of the one with two seeds
    heights = sorted({round(float(y), 6) for x, y in band.get_paths()[0].vertices if x == 1})
    assert heights == [0.94, 0.95]
    assert set(target.get_ydata()) == {runs[0].target}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["bsp", "async"]
    assert axes.get_ylabel() == runs[0].metric
    assert axes.get_xlabel() == "training seconds (simulated)"
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_page_says_who_reached_the_target_and_who_did_not(seeds: int) -> None:
    target = find_recipe("digits").target
    curves = {"bsp": [(7.4, target)], "local": [(1.0, 0.0)], "streaming": [(2.5, target)]}
    runs = [make(name, curves[name], seed=seed) for name in curves for seed in range(seeds)]
    sentence = tables.winner(runs)
    assert "streaming reached" in sentence
    assert "first, in 2.5 s; the last was bsp, in 7.4 s; local did not reach it" in sentence
    assert ("(medians)" in sentence) == (seeds > 1)
