"""The command ``plan``."""

import json
import re
import shlex

from cli.commands import Call, one_line

PLANNED = shlex.split("plan --parameters 25M --step-time 120ms --workers 16 --bandwidth 5gbit")


def test_plan(call: Call) -> None:
    """A row for each strategy, S, a recommendation with its reason, and a warning."""
    code, out, err = call(*PLANNED)
    assert (code, err) == (0, "")
    assert out.startswith("25,000,000 parameters (100.0 MB), 120 ms a step, 16 workers")
    told = one_line(out)
    assert "predicted, not measured" in told
    assert "speed-up counts steps, not the time to a metric" in told
    assert "counts steps, not the time to a metric" in one_line(call("plan", "--help")[1])
    assert "S = 1.3: a link needs 1.3 steps to send the model once in float32." in told
    assert "Try streaming first: DDP would wait 68 % of the time." in told
    assert "Warning: this is beyond what was measured (models of up to 0.5 million" in told
    for row in ("bsp", "bsp --wire int4", "local:period=2 --wire int4", "streaming"):
        assert re.search(rf"^{re.escape(row)} +\d", out, re.MULTILINE), row


def test_plan_as_json(call: Call) -> None:
    """--json is JSON and nothing else, with the given strategies."""
    code, out, err = call(*PLANNED, "--json", "-s", "bsp", "-s", "local:period=8 --wire int8")
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert values["model_bytes"] == 1e8
    rows = [row["strategy"] for row in values["rows"]]
    assert rows == ["bsp", "local:period=8 --wire int8"]
    assert values["recommendation"] == "streaming"
    assert values["reason"]
    code, out, err = call(*PLANNED, "-s", "bsp --wire int3")
    assert (code, out) == (2, "")
    assert "int3" in err


def test_the_usual_workers_and_latency(call: Call) -> None:
    _, out, _ = call("plan", *PLANNED[1:5], "--bandwidth", "1gbit", "-s", "bsp")
    assert "4 workers, 1 Gbit/s, latency 100 us" in one_line(out)
