"""The options of a job: the fields of ``Job``, in every command."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

from cli.commands import Call
from offbeat import cli
from offbeat_lab.cli import runs
from offbeat_lab.job import Job

APP: Any = typer.main.get_command(cli.app)
SET_OTHERWISE = {"strategy", "scenario", "step_seconds"}
ASKED = {one.name: one for one in dataclasses.fields(Job) if one.name not in SET_OTHERWISE}
VALUES = {  # of every option, another than its default
    **{"recipe": "stdlib-lm", "workers": 3, "epochs": 0.5},
    **{"seed": 7, "data": "some/where", "log": "runs/log.jsonl", "timeout_seconds": 9.5},
    **{"lr_scale": 0.25, "partition": "label:1", "sampler": "defdp", "injection": "0.5,0.25"},
    **{"wire": "int8", "adam_correction": "off", "evaluations": 3},
    **{"max_steps": 100, "max_seconds": 2.5},
    **{"jitter": 0.5, "slow": "0=2", "workers_per_node": 1},
}


def flags_of(command: str) -> dict[str, list[str]]:
    """The flags of each parameter of a command."""
    return {one.name: one.opts for one in APP.commands[command].params}


def test_every_option_arrives(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The job has the values of the command line."""
    seen: list[Job] = []

    def note(job: Job, *args: Any, **kwargs: Any) -> None:
        seen.append(job)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Job, "check", lambda job, task=None: None)
    monkeypatch.setattr(runs.comparison, "run_and_record", note)
    assert VALUES.keys() == ASKED.keys()
    flags = flags_of("compare")
    argv = ["compare", str(VALUES["recipe"]), "-s", "local:period=3", "--step-time", "1ms"]
    for name, value in VALUES.items():
        if name != "recipe":
            argv += [flags[name][-1], str(value)]
    assert call(*argv)[0] == 130
    assert seen == [Job(**VALUES, strategy="local:period=3", step_seconds=0.001)]


FLAGS = [name for names in flags_of("compare").values() for name in names if name[0] == "-"]


@pytest.mark.parametrize("flag", FLAGS)
def test_torchrun_does_not_take_our_options(flag: str) -> None:
    """Each option of `offbeat compare` reaches it through torchrun, which has its own options."""
    ours = ["compare", "digits", flag, "1"]
    parsed = get_args_parser().parse_args(["--nproc-per-node", "2", "-m", "offbeat.cli", *ours])
    assert parsed.training_script_args == ours
    assert parsed.nproc_per_node == "2"
