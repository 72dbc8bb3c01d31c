"""What a notebook shows of a synchronizer, of its totals and of a simulation."""

from typing import Any
from xml.etree import ElementTree

import torch

import offbeat
from offbeat.simulate import Simulation, Span
from problems import loss_of, make_batch, make_model
from worlds import simulated


def page(shown: Any) -> ElementTree.Element:
    """What is shown; that it can be parsed says that everything in it is escaped."""
    return ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")


def cells(shown: Any) -> list[list[str]]:
    rows = [["".join(one.itertext()) for one in row.iter("td")] for row in page(shown).iter("tr")]
    return [row for row in rows if row]


def test_stats_show_their_totals() -> None:
    """Figures with units, the strategy's own details, long ones cut, and no markup from them."""
    stats = offbeat.Stats(
        steps=8,
        syncs=2,
        payload_bytes=1_500_000,
        wait_seconds=0.5,
        compute_seconds=1.5,
        details={"<b>": "</td>&", "gain": 1.23456789, "histogram": [*range(100)]},
    )
    found = dict(cells(stats))
    assert found.pop("histogram").startswith("[0, 1, 2,")
    assert found == {
        "steps": "8",
        "syncs": "2",
        "lssr": "0.750",
        "payload_bytes": "1.5 MB",
        "compute_seconds": "1.5 s",
        "wait_seconds": "500 ms",
        "idle": "25%",
        "<b>": "</td>&",
        "gain": "1.235",
    }
    assert max(len(value) for _, value in cells(stats)) == 80
    assert dict(cells(offbeat.Stats()))["idle"] == "0%"


def spans(*of: tuple[int, Any, float, float]) -> list[Span]:
    return [Span(rank, kind, start, end, "step") for rank, kind, start, end in of]


def test_a_simulation_shows_how_each_worker_spent_its_time() -> None:
    """By hand: worker 0 computes 3 s and waits 1 s; worker 1 computes 2 s, and has no totals."""
    timeline = spans(
        *((0, "compute", 0, 1), (0, "wait", 1, 2), (0, "compute", 2, 4), (0, "transfer", 1, 3)),
        (1, "compute", 0, 2),
    )
    stats = [offbeat.Stats(steps=5, syncs=3), None]
    run = Simulation(4.0, [None] * 2, stats, 1 / 6, timeline, [2e6, 0], {})
    assert cells(run) == [
        ["0", "5", "3", "3 s", "1 s", "25%", "2.0 MB"],
        ["1", "-", "-", "2 s", "0 s", "0%", "0 B"],
    ]
    assert [one.text for one in page(run).iter("caption")] == ["simulated: 4 s, idle 17%"]
    bars = [one.attrib for one in page(run).iter("{http://www.w3.org/2000/svg}rect")]
    assert [float(one["width"]) for one in bars] == [450, 150, 300, 0]  # 4 s are 600 wide
    assert [float(one["x"]) for one in bars] == [0, 450, 0, 300]
    assert bars[0]["fill"] == bars[2]["fill"] != bars[1]["fill"] == bars[3]["fill"]


def test_an_empty_run_is_shown() -> None:
    """Nothing is divided by zero."""
    assert cells(Simulation(0.0, [None], [None], 0.0, [], [0.0], {}))[0][3:] == [
        "0 s",
        "0 s",
        "0%",
        "0 B",
    ]


def states(rank: int, size: int) -> Any:
    model = make_model(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = offbeat.attach(model, optimizer, offbeat.LocalSGD(period=2))
    seen = []
    for step in range(4):
        loss_of(model, make_batch(rank, step)).backward()
        optimizer.step()
        seen.append(sync._repr_html_())
    sync.finish()
    return [*seen, sync._repr_html_()]


def test_a_synchronizer_says_who_it_is_and_what_it_did() -> None:
    """Worker, strategy, whether it is at work, and the totals of the moment; no collective."""
    for rank, shown in enumerate(simulated(states, workers=2)):
        captions = [ElementTree.fromstring(one).findtext(".//caption") for one in shown]
        who = f"worker {rank} of 2, {{}}: local:period=2"
        assert captions == [who.format("active")] * 4 + [who.format("finished")]
        steps = [ElementTree.fromstring(one).findall(".//tr")[1][1].text for one in shown]
        assert steps == ["1", "2", "3", "4", "4"]
