"""Public training scripts, moved from DDP to Offbeat by the lines that the page shows.

Each file in this folder holds a small script with the idioms of a public one, twice: as it is, it
trains with DDP. Its marks make the version for Offbeat:

- ``# + code``: a line that the port adds,
- ``code  # -``: a line that it removes,
- ``code  # >``: a line that moves to the right.
"""

import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from pages import DOCS
from workers import run

HERE = Path(__file__).parent
SCRIPTS = {
    "dit": (False, 1.1),
    "mae": (True, 1.4),
    "torchvision_classification": (True, 1.25),
    "dcgan": (False, 1.75),
    "open_clip": (True, 1.3),
    "run_clm": (False, 1.05),
    "nanogpt": (False, 1.3),
}
"""Name: (True if the script resumes from its file, bound of the default's loss over DDP's)."""

_kept: list[nn.Module] = []


def ported(source: str) -> tuple[str, dict[str, list[str]]]:
    """Return the version for Offbeat, with as many lines, and the code of each kind of mark."""
    lines, found = [], {"+": [], "-": [], ">": []}
    for line in source.splitlines():
        added = re.fullmatch(r"( *)# \+ (.*)", line)
        marked = re.fullmatch(r"( *)(.*?)  # ([->])", line)
        if added:
            found["+"].append(added[2])
            line = added[1] + added[2]
        elif marked:
            found[marked[3]].append(marked[2])
            line = "" if marked[3] == "-" else f"    {marked[1]}{marked[2]}"
        lines.append(line)
    return "\n".join(lines), found


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1).double() for t in tensors])


def train(
    rank: int, size: int, name: str, strategy: Any, folder: str, epochs: tuple[int, ...]
) -> tuple[Tensor, Tensor, float]:
    """Run a script as torchrun does. Return parameters, buffers and the last loss."""
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    os.environ |= {variable: str(value) for variable, value in torchrun.items()}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    path = HERE / f"{name}.py"
    source = path.read_text()
    if strategy != "ddp":
        source, _ = ported(source)
        offbeat.attach = functools.partial(offbeat.attach, strategy=strategy, timeout_seconds=20)
    script: dict[str, Any] = {"__name__": name}
    exec(compile(source, path, "exec"), script)
    models, loss = script["main"](Path(folder), *epochs)
    modules = nn.ModuleList(models)
    # A DistributedDataParallel holds its process group. Freeing the group may deadlock: the main
    # thread joins gloo's thread while it holds Python's lock, which gloo's thread needs.
    _kept.append(modules)
    return flat(modules.parameters()), flat([torch.zeros(0), *modules.buffers()]), loss


def trained(name: str, strategy: Any) -> list[Any]:
    """Return the results of both ranks. A script that resumes runs twice, from its own file."""
    resumes, _ = SCRIPTS[name]
    with tempfile.TemporaryDirectory() as folder:
        for epochs in [(1,), ()] if resumes else [()]:
            results = run(train, name, strategy, folder, epochs, workers=2, newcomers=0)
        assert os.listdir(folder), "rank 0 has saved a file"
    return results


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_ported_script_trains_as_with_ddp(name: str) -> None:
    """``BSP()`` has DDP's bits. The default ends equal on all ranks, with about DDP's loss."""
    (ddp, _), bsp, default = (trained(name, how) for how in ("ddp", offbeat.BSP(), None))
    for of_rank in bsp:
        assert torch.equal(of_rank[0], ddp[0])
    for first, second in (bsp, default):
        assert all(map(torch.equal, first[:2], second[:2]))
    assert default[0][2] <= SCRIPTS[name][1] * ddp[2]


def test_the_page_counts_the_lines_of_each_port() -> None:
    """Its table has the number of added, removed and indented lines of each script."""
    page = (DOCS / "coming-from-ddp.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.py`.*? \| (\d+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    told = {name: [int(number) for number in numbers] for name, *numbers in rows}
    assert told == {
        name: [*map(len, ported((HERE / f"{name}.py").read_text())[1].values())] for name in SCRIPTS
    }
    assert {path.stem for path in HERE.glob("*.py")} == {*SCRIPTS, Path(__file__).stem}
