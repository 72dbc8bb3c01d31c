"""The parameter server alone: refused messages, time-outs and shutdown."""

import threading
from typing import Any

import pytest
import torch

import offbeat
from offbeat.transport.team import Team
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator
from offbeat_lab.baselines.parameter_server import ParameterServer
from offbeat_lab.baselines.shard import Rule
from transport.communicators import World, gloo, meet, worlds_of_several
from workers import run


@worlds_of_several
@pytest.mark.parametrize("kind", [77, -1])
def test_a_message_that_is_not_a_request_is_refused(world: World, kind: int) -> None:
    """The server reads nothing more from the rank, and the serving rank raises an OffbeatError."""

    def work(communicator: Any) -> str:
        team = Team(communicator)
        server = ParameterServer(team, torch.zeros(4), Rule())
        server.barrier()
        if world is gloo:
            meet("the barrier is over", [0, 1, 2])
        if team.rank == 1:
            header = torch.tensor([kind, 0, 0])
            team.communicator.send(header, destination=0, tag=1, what="test").wait()
        if team.rank > 0:
            if world is gloo:
                meet("the message is refused", [0, 1, 2])
            return ""
        if world is gloo:
            for thread in threading.enumerate():
                if thread.name == "server of rank 1":
                    thread.join(20)
        else:
            team.host.sleep(1.0, "the message")
        with pytest.raises(offbeat.OffbeatError) as caught:
            server.start("pull")
        if world is gloo:
            meet("the message is refused", [0, 1, 2])
        return f"{type(caught.value).__name__}: {caught.value}"

    text = world(work)[0]
    want = "OffbeatError: rank 1 sent a message that is not a request to a parameter server: "
    assert text.startswith(f"{want}[{kind}, 0, 0]")


def wait_in_vain(rank: int, size: int) -> tuple[str, list[str]]:
    """Exchange values for clock 1, then wait for clock 2, which rank 1 never reaches."""
    team = Team(TorchCommunicator(None, timeout_seconds=0.3, liveness_seconds=0.6))
    server = ParameterServer(team, torch.zeros(6), Rule())

    def exchange(clock: int) -> None:
        server.vector.fill_(1)
        server.start("push_pull", clock=clock, min_clock=clock)
        server.take(wait=True)

    exchange(1)
    meet("all have been answered", [0, 1, 2])
    text = ""
    if rank != 1:
        with pytest.raises(offbeat.CommunicationError) as caught:
            exchange(2)
        text = f"{type(caught.value).__name__}: {caught.value}"
    meet("all have seen it", [0, 1, 2])
    team.close()
    return text, [thread.name for thread in threading.enumerate() if "server" in thread.name]


def test_a_time_out_names_the_worker_that_does_not_answer() -> None:
    """The error also names the setting to change. ``close`` ends all threads."""
    results = run(wait_in_vain, workers=3)
    assert [alive for _, alive in results] == [[], [], []]
    for rank in (0, 2):
        text = results[rank][0]
        assert text.startswith(f"CommunicationTimeout: rank {rank}: "), text
        for part in (
            "push_pull at",
            "timeout_seconds=0.3",
            "no answer from rank 1, busy elsewhere or stuck",
        ):
            assert part in text
