"""The picture of elastic training: which worker uses how many samples, over time.

``python -m benchmarks.lanes`` trains ``examples/train_elastic.py`` with ``offbeat run``. One of
four workers has half the speed, one is killed and restarted, and a fifth one joins. It writes
``results/lanes.json`` and draws ``docs/images/elastic.png``.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import IMAGES, RESULTS, ROOT

EPOCHS, SAMPLES = 60, 1437
STEP_MS, SLOW, KILLED, NEWCOMER = 25, 1, 2, 4
KILL_SECONDS, JOIN_SECONDS = 8.0, 14.0
BIN_SECONDS = 1.0
LIMIT_SECONDS = 120.0


def run() -> dict[str, Any]:
    """Run the training, and return its events.

    ``steps`` has the steps of all workers: seconds since the first one, number of the worker and
    samples. ``killed`` and ``joined`` are the times of these events.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = [str(ROOT / "examples" / "train_elastic.py"), "--log", folder]
        script += ["--epochs", str(EPOCHS), "--step-ms", str(STEP_MS), "--slow", str(SLOW)]
        store = ["--store", f"file://{folder}/store"]
        offbeat = [sys.executable, "-m", "offbeat.cli", "run", "--workers", "4", *store]
        first = subprocess.Popen(
            [*offbeat, "--here", "4", *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output: list[str] = []
        assert first.stdout is not None
        reader = threading.Thread(target=lambda: output.extend(first.stdout or ()), daemon=True)
        reader.start()
        began = _wait_for(lambda: _first_time(folder))
        killed = began + KILL_SECONDS
        time.sleep(max(0.0, killed - time.time()))
        os.kill(_process_of(folder, KILLED), signal.SIGKILL)
        joined = began + JOIN_SECONDS
        time.sleep(max(0.0, joined - time.time()))
        second = subprocess.Popen([*offbeat, "--here", "1", *script])
        for process in (first, second):
            if process.wait(LIMIT_SECONDS):
                raise RuntimeError("".join(output))
        reader.join(10)
        print("".join(output))
        steps = [
            {**json.loads(line), "process": int(path.stem)}
            for path in Path(folder).glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
    return {"began": began, "killed": killed, "joined": joined, "steps": steps}


def _wait_for(function: Any) -> Any:
    deadline = time.monotonic() + LIMIT_SECONDS
    while (value := function()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the training has not begun")
        time.sleep(0.05)
    return value


def _first_time(folder: str) -> float | None:
    times = [
        json.loads(lines[0])["time"]
        for path in Path(folder).glob("*.jsonl")
        if (lines := path.read_text().splitlines())
    ]
    return min(times) if len(times) == 4 else None


def _process_of(folder: str, slot: int) -> int:
    for path in Path(folder).glob("*.jsonl"):
        if json.loads(path.read_text().splitlines()[0])["slot"] == slot:
            return int(path.stem)
    raise LookupError(slot)


def summarize(events: dict[str, Any]) -> dict[str, Any]:
    """Return samples per second for each worker, and how often samples were used."""
    began, late = events["began"], events["joined"] - 0.5
    lanes: dict[str, Counter[int]] = {}
    for step in events["steps"]:
        newcomer = step["slot"] == 0 and _first(events, step["process"]) > late
        name = str(NEWCOMER if newcomer else step["slot"])
        second = int((step["time"] - began) / BIN_SECONDS)
        lanes.setdefault(name, Counter())[second] += step["samples"]
    seconds = 1 + max(second for lane in lanes.values() for second in lane)
    return {
        "killed": events["killed"] - began,
        "joined": events["joined"] - began,
        "samples": {n: [lanes[n][s] for s in range(seconds)] for n in sorted(lanes)},
        "used": sum(step["samples"] for step in events["steps"]),
        "wanted": EPOCHS * SAMPLES,
    }


def _first(events: dict[str, Any], process: int) -> float:
    return float(min(step["time"] for step in events["steps"] if step["process"] == process))


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw one lane for each worker."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {
        "0": "worker 0",
        str(SLOW): f"worker {SLOW}: half the speed",
        str(KILLED): f"worker {KILLED}: killed, restarted",
        "3": "worker 3",
        str(NEWCOMER): "a machine that joins",
    }
    figure, axes = plt.subplots(len(labels), 1, sharex=True, sharey=True, figsize=(8, 4.5))
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        values = summary["samples"].get(name, [])
        axis.bar([s + 0.5 for s in range(len(values))], values, width=0.9, color="#0072b2")
        axis.set_ylabel(label, rotation=0, ha="right", va="center")
        axis.axvline(summary["killed"], color="#d55e00", linestyle=":")
        axis.axvline(summary["joined"], color="#009e73", linestyle=":")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_title("Samples per second of each worker", loc="left", pad=18)
    over = axes[0].get_xaxis_transform()
    axes[0].text(summary["killed"], 1.04, f"worker {KILLED} is killed ", transform=over, ha="right")
    axes[0].text(summary["joined"], 1.04, " another launcher starts", transform=over)
    axes[-1].set_xlabel("seconds since the first step")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Run, store and draw."""
    summary = summarize(run())
    path = RESULTS / "lanes.json"
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    draw(summary, IMAGES / "elastic.png")
    print(f"{summary['used']} samples used, {summary['wanted']} wanted; {path}")


if __name__ == "__main__":
    main()
