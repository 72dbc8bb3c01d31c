"""Tasks of srun as workers, with the variables that two slurmd of Slurm 22.05 have set."""

import subprocess
import sys
from typing import Any

import pytest

from cli.commands import ENVIRONMENT
from offbeat.errors import OffbeatError
from offbeat.lab.launch.slurm import first_node, torchrun_variables, workers_sharing_cores

BATCH = {
    **{"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    **{"SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "127.0.0.[1-2]"},
}
TASK = {
    **BATCH,
    **{"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "127.0.0.[1-2]"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9"},
}
LAST = {**TASK, "SLURM_PROCID": "2", "SLURM_NODEID": "1"}


def test_a_task_gets_the_variables_of_torchrun() -> None:
    """Rank, local rank, and the address: the step's first node, not srun's."""
    assert torchrun_variables(LAST) == {
        **{"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "15113"},  # 16 · 7 + 1
    }
    first = torchrun_variables(TASK)
    assert first["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_PORT"] == "15113"
    assert torchrun_variables({**LAST, "SLURM_JOB_ID": "123456789"})["MASTER_PORT"] == "18625"


def test_address_and_port_can_be_overridden() -> None:
    told = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "SLURM_STEP_NODELIST": "nowhere7"}
    found = torchrun_variables({**LAST, **told})
    assert "MASTER_ADDR" not in found
    assert "MASTER_PORT" not in found


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,  # a batch script has SLURM_NTASKS, too, and runs once
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {**LAST, "RANK": "5"},
        {**LAST, "RANK": "5", "TORCHELASTIC_RUN_ID": "x"},  # torchrun under srun
    ],
)
def test_other_processes_get_no_variables(environment: dict[str, str]) -> None:
    assert torchrun_variables(environment) == {}


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"])
def test_a_missing_variable_is_named(missing: str) -> None:
    environment = {name: value for name, value in LAST.items() if name != missing}
    with pytest.raises(OffbeatError, match=f"{missing} is not set: start the workers with srun"):
        torchrun_variables(environment)


def test_a_node_without_an_address_is_named() -> None:
    with pytest.raises(OffbeatError, match=r"connect to x\.invalid, .*: set MASTER_ADDR to"):
        torchrun_variables({**LAST, "SLURM_STEP_NODELIST": "x.invalid,y"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("a1,b2", "a1"),
        ("node[07-09,12],gpu3", "node07"),
        ("node[3,5]", "node3"),
        ("rack[1-2]node[04-05]-ib", "rack1node04-ib"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_bound_tasks_do_not_share_their_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores, told, expected in ((8, "8", 1), (32, "8", 4), (32, None, 4)):
        mask: Any = set(range(cores))
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, mask=mask: mask, raising=False)
        own = {} if told is None else {"SLURM_CPUS_PER_TASK": told}
        assert workers_sharing_cores({**TASK, **own}, 4) == expected
    assert workers_sharing_cores({"SLURM_CPUS_PER_TASK": "64"}, 4) == 4  # not Slurm's


@pytest.mark.nightly  # three processes import torch
def test_tasks_train_together() -> None:
    """Two processes with Slurm's variables are one run; one alone fails with an error."""
    step = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    argv = (sys.executable, "-m", "offbeat.cli", "train", "digits", "--max-steps", "2")

    def start(job: str, *more: str, **task: str) -> subprocess.Popen[str]:
        environment = {**ENVIRONMENT, **step, "SLURM_JOB_ID": job, **task}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*argv, *more], stdout=pipe, stderr=pipe, encoding="utf-8", env=environment
        )

    second = {"SLURM_PROCID": "1", "SLURM_NODEID": "1"}
    alone = start("70", "--timeout", "2", **second)
    both = [start("71"), start("71", **second)]
    (out, err), (silent, _) = (one.communicate(timeout=100) for one in both)
    assert [one.returncode for one in both] == [0, 0], err
    assert "joined the 2 processes that Slurm has started" in out
    assert "2 workers" in " ".join(out.split())
    assert silent == ""
    _, err = alone.communicate(timeout=100)
    assert alone.returncode == 1
    assert "error: rank 1 of 2 could not connect to the others that Slurm has started, at " in err
    assert "127.0.0.1:16121 (MASTER_ADDR, MASTER_PORT) within --timeout 2" in err
    assert "Traceback" not in err
