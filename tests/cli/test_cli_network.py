"""The command ``plan``."""

import json
import re
import shlex

from cli.commands import Call, one_line
from offbeat import BSP, AsyncAveraging, LocalSGD, SelSync, StreamingAveraging
from offbeat.strategies.registry import parse_strategy

NETWORKED = shlex.split("plan --parameters 25M --step-time 120ms --workers 16 --bandwidth 5gbit")
SUGGESTED = {
    BSP,
    LocalSGD,
    SelSync,
    StreamingAveraging,
    AsyncAveraging,
}  # by plan, if none is given


def test_plan(call: Call) -> None:
    """Every suggestion has a row and a note; one of them is recommended, with its reason."""
    code, out, err = call(*NETWORKED)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("25,000,000 parameters (100.0 MB), 120 ms a step, 16 workers")
    assert "predicted, not measured" in lines[0]
    assert "speed-up counts steps, not the time to a metric" in out
    assert "counts steps, not the time to a metric" in one_line(call("plan", "--help")[1])
    (advice,) = (line for line in lines if line.startswith("Try "))
    chosen, reason = re.fullmatch(r"Try (\S+) first: (.+)\.", advice).groups()  # type: ignore[union-attr]
    rows = [line.split()[0] for line in lines if re.match(r"[\w:=,.]+ {2,}\d", line)]
    assert {type(parse_strategy(row)) for row in rows} == SUGGESTED
    assert chosen in rows
    assert re.search(r"wait.* \d+ %", reason)
    for row in rows:
        assert any(line.startswith(f"{row}: ") for line in lines)


def test_plan_as_json(call: Call) -> None:
    """--json is JSON and nothing else, with the same strategies and recommendation."""
    code, out, err = call(*NETWORKED, "--json", "-s", "bsp", "-s", "local:period=8")
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert values["workers"] == 16
    assert values["model_bytes"] == 1e8
    assert [row["strategy"] for row in values["rows"]] == ["bsp", "local:period=8"]
    assert values["recommendation"] in values["rows"]
    assert values["reason"]


def test_plan_of_strategies_over_a_wire(call: Call) -> None:
    """-s chooses the strategies, --wire the precision."""
    argv = (*NETWORKED, "--json", "-s", "diloco:period=8", "-s", "local:period=8")
    exact, lossy = (json.loads(call(*argv, *wire)[1]) for wire in ((), ("--wire", "int8")))
    assert [row["strategy"] for row in exact["rows"]] == ["diloco:period=8", "local:period=8"]
    assert 0.25 < lossy["rows"][0]["payload_bytes"] / exact["rows"][0]["payload_bytes"] < 0.28
    assert lossy["recommendation"]["strategy"] == "local:period=8"
    code, out, err = call(*NETWORKED, "--wire", "int3", "-s", "easgd")
    assert (code, out) == (2, "")
    assert "int3" in err
