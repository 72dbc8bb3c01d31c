"""Cells of the closed forms that ``plan`` had at commit 01ba56b, and where they were wrong.

``reference_cells.json`` was recorded before they went. Seconds and idle share agree within 1 %, and
bytes, but for the cells that are listed here with the reason.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cells import some
from offbeat.averaging.rounds import Rounds
from offbeat.averaging.votes import Round, Vote
from offbeat.plan import plan
from offbeat.simulate import network

RECORDED = json.loads((Path(__file__).parent / "reference_cells.json").read_text())
CELLS: list[dict[str, Any]] = RECORDED["cells"]
CLUSTERS: dict[str, dict[str, Any]] = RECORDED["clusters"]

EAGER = "it assumed two parts in flight at the bound, and no step boundaries in between"
SECONDS = {  # by cluster, strategy and wire: seconds of the step here / those of the closed form
    ("far", "streaming", None): (1.498, EAGER),
    ("slow", "streaming:staleness=8", "float32"): (1.781, EAGER),
    ("sixty-four", "streaming:schedule=cyclic,staleness=64", None): (
        1.03,
        "parts are cut inside tensors, so that they fill four buckets and not three; with a roll "
        "of 126 ms each part then takes longer than its 8 steps",
    ),
    ("much-jitter", "bsp", None): (1.025, "steps are log-normal here and were normal there"),
}
UNSTEADY = 5  # seconds of processor: rows that may end before they are steady
SLOW = {"billion", "billion-nodes", "much-jitter"}


def key(cell: dict[str, Any]) -> tuple[str, str, Any]:
    return cell["cluster"], cell["strategy"], cell["given_wire"]


def takes_long(cell: dict[str, Any]) -> bool:
    """More than about half a second."""
    asks = cell["cluster"] == "jitter" and cell["strategy"].startswith(("async", "streaming"))
    return cell["cluster"] in SLOW or asks or key(cell) == ("far", "streaming", None)


@pytest.fixture(autouse=True)
def messages_in_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the closed forms: an all-gather or all-to-all is a ring, and votes are an all-reduce.

    Since then their messages are sent at the same time.
    """

    def ring(size: float, workers: int, rate: float, latency: float) -> float:
        return (workers - 1) * (latency + size / rate)

    def pairs(size: float, workers: int, rate: float, latency: float) -> float:
        return ring(size / workers, workers, rate, latency)

    def vote(self: Rounds, vote: Vote, optimizer: int = 0) -> Round:
        worker, size = self._worker, self._worker.size
        tensor = torch.tensor(vote.encode(), dtype=torch.float64)
        total = worker.team.communicator.sum(tensor, what=f"votes at step {worker.step}")
        sums = total.then(lambda numbers: vote.tally(numbers.tolist(), size))
        return Round(optimizer, vote, self._checked(sums))

    formulas = dict(network._COLLECTIVES)
    gather, exchange = formulas["gather"], formulas["exchange"]
    formulas["gather"] = gather._replace(seconds=ring, direct=False)
    formulas["exchange"] = exchange._replace(seconds=pairs)
    monkeypatch.setattr(network, "_COLLECTIVES", formulas)
    monkeypatch.setattr(Rounds, "send", vote)


quick = [i for i, cell in enumerate(CELLS) if not takes_long(cell)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "cell", some(CELLS, *quick[::2]), ids=lambda cell: " ".join(map(str, key(cell)))
)
def test_a_cell(cell: dict[str, Any]) -> None:
    (row,) = plan(
        **CLUSTERS[cell["cluster"]], strategies=[cell["strategy"]], wire=cell["given_wire"]
    ).rows
    ratio, _ = SECONDS.get(key(cell), (1.0, ""))
    assert row.step_seconds / cell["step_seconds"] == pytest.approx(ratio, abs=0.01)
    assert row.throughput * row.step_seconds == pytest.approx(
        cell["throughput"] * cell["step_seconds"]
    )
    if ratio == 1:
        assert row.idle == pytest.approx(cell["idle"], abs=0.01)
    assert row.wire == cell["wire"]
    eager = cell["strategy"].startswith("streaming") and "cyclic" not in cell["strategy"]
    jitter = cell["cluster"] == "jitter" and "eager" in cell["strategy"]
    if not (eager or jitter):  # its closed form sent a part as soon as the link was free
        # Since the cells were recorded, the flag and Δ of SelSync have become numbers of their own.
        added = 16 if cell["strategy"].startswith("selsync") else 0
        assert row.payload_bytes == pytest.approx(cell["payload_bytes"] + added, rel=0.01)


def test_few_cells_differ() -> None:
    """Four of 79 cells differ; the others agree within 1 %."""
    assert len(CELLS) == 79
    assert len(SECONDS) == 4
    assert SECONDS.keys() <= {key(cell) for cell in CELLS}


@pytest.mark.parametrize(
    "advice",
    some(RECORDED["advice"], 0, 1, 3, 8),
    ids=lambda advice: advice["cluster"],
)
def test_the_advice(advice: dict[str, Any]) -> None:
    """The same strategies, with nearly the same settings, and the same recommendation."""
    result = plan(**CLUSTERS[advice["cluster"]])
    kinds = [row.strategy.partition(":")[0] for row in result.rows]
    assert kinds == [text.partition(":")[0] for text in advice["strategies"]]
    assert result.recommendation.strategy.startswith("streaming")
    jitter = CLUSTERS[advice["cluster"]].get("jitter", 0)
    for row, seconds in zip(result.rows, advice["steps"], strict=True):
        within = 0.05 if jitter or row.strategy.startswith("streaming") else 0.002
        assert row.step_seconds == pytest.approx(seconds, rel=within)
    if not jitter:
        period, wanted = (
            settings(texts, "local") for texts in (texts_of(result), advice["strategies"])
        )
        assert period == pytest.approx(wanted, abs=1)
        assert settings(texts_of(result), "async")[0] == settings(advice["strategies"], "async")[0]


def texts_of(result: Any) -> list[str]:
    return [row.strategy for row in result.rows]


def settings(texts: list[str], kind: str) -> list[int]:
    """The numbers at the end of the text forms of one kind; 16 where there is none."""
    ends = [text.rpartition("=")[2] for text in texts if text.startswith(kind)]
    return [int(end) if end.isdecimal() else 16 for end in ends]


def test_infinity_is_recorded_as_text() -> None:
    assert {cell["apart_steps"] for cell in CELLS if isinstance(cell["apart_steps"], str)} == {
        "inf"
    }
    assert all(math.isfinite(cell["step_seconds"]) for cell in CELLS)
