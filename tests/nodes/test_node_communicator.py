"""Operations between nodes of several workers: results, and the bytes that each worker sends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat.errors import CommunicationError
from offbeat.nodes.communicator import NodeCommunicator
from offbeat.quantization.message import Stream, make_message
from offbeat.quantization.wire import Wire
from offbeat.simulate.communicator import SimulatedCommunicator
from offbeat.simulate.connections import Group
from offbeat.transport.communicator import Communicator
from offbeat.transport.operation import Await, Exchange, Operation, Receive, Send
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Node, Team
from recording import Recording
from transport.operations import classes

LAYOUTS = [(2, 2), (2, 3), (3, 2)]
every_layout = pytest.mark.parametrize(("nodes", "workers"), LAYOUTS)
DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8]


def between(
    nodes: int, workers: int, function: Callable[[NodeCommunicator, int, Recording], Any]
) -> list[Any]:
    """Run ``function(communicator, place in the node, recording of ``across``)`` in simulation.

    Return the results by rank. The ranks of a node are consecutive.
    """
    rows = [Group(tuple(range(n * workers, (n + 1) * workers))) for n in range(nodes)]
    columns = [Group(tuple(range(i, nodes * workers, workers))) for i in range(workers)]

    def worker() -> Any:
        node, place = divmod(dist.get_rank(), workers)
        whole: Any = dist.group.WORLD.make_communicator(60.0)

        def part(line: Group, group: int) -> SimulatedCommunicator:
            return SimulatedCommunicator(whole.cluster, whole.member, line, group, whole.host)

        across = Recording(part(columns[place], 200 + place))
        made = NodeCommunicator(across, part(rows[node], 100 + node))
        return function(made, place, across)

    return offbeat.simulate(
        worker,
        workers=nodes * workers,
        network=offbeat.Network("100Mbit/s"),
        compute=offbeat.Compute(0.001),
    ).results


def numbers(node: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return a vector of small integers, so that sums are exact in every dtype."""
    return torch.tensor([(node * 7 + 3 * i) % 11 + 1 for i in range(count)]).to(dtype)


@pytest.mark.sampled
@every_layout
@pytest.mark.parametrize("count", [1, 5, 12])
def test_results_are_those_of_one_worker_in_each_node(nodes: int, workers: int, count: int) -> None:
    """For every operation and dtype, also if the parts need padding."""

    def work(communicator: NodeCommunicator, place: int, across: Recording) -> Any:
        found = []
        for one in (communicator, communicator.twin()):
            for dtype in DTYPES:
                x = numbers(one.rank, count, dtype)
                rows = torch.cat([x + 10 * k for k in range(nodes)])
                kept = x.clone(), rows.clone()
                handles = {
                    "sum": one.sum(x.clone(), what="a"),
                    "maximum": one.maximum(x.clone(), what="b"),
                    "gather": one.gather(x, what="c"),
                    "exchange": one.exchange(rows, what="d"),
                    # of the first worker of the source alone
                    "broadcast": one.broadcast(x + place, source=nodes - 1, what="e"),
                }
                results = {name: handles[name].wait() for name in reversed(handles)}
                assert all(handle.done() for handle in handles.values())
                assert torch.equal(x, kept[0])
                assert torch.equal(rows, kept[1])
                found.append((dtype, results))
        return communicator.rank, communicator.size, found

    for rank, (node, size, found) in enumerate(between(nodes, workers, work)):
        assert (node, size) == (rank // workers, nodes)
        for dtype, results in found:
            each = [numbers(n, count, dtype) for n in range(nodes)]
            want = {
                "sum": torch.stack(each).sum(0).to(dtype),
                "maximum": torch.stack(each).amax(0),
                "exchange": torch.cat([one + 10 * node for one in each]),
                "broadcast": each[-1],
            }
            for name, one in want.items():
                assert results[name].dtype == dtype
                assert torch.equal(results[name], one), name
            for one, other in zip(results["gather"], each, strict=True):
                assert torch.equal(one, other)


@every_layout
def test_each_worker_sends_its_part(nodes: int, workers: int) -> None:
    """In all collectives but a broadcast, which the first worker of the node sends."""

    def work(communicator: NodeCommunicator, place: int, across: Recording) -> Any:
        x = torch.zeros(12 * nodes)
        for handle in (
            communicator.sum(x, what="a"),
            communicator.maximum(x, what="b"),
            communicator.gather(x, what="c"),
            communicator.exchange(x, what="d"),
            communicator.broadcast(x, what="e"),
        ):
            handle.wait()
        return [(kind, size) for kind, _, size in across.operations]

    size = 4 * 12 * nodes
    for rank, started in enumerate(between(nodes, workers, work)):
        node, place = divmod(rank, workers)
        kinds = ["Sum", "Maximum", "Gather", "Exchange"]
        want = [(kind, size // workers) for kind in kinds]
        if place == 0:
            want.append(("Broadcast", size if node == 0 else 0))
        assert [one for one in started if one[0] != "Await"] == want


def test_all_workers_of_all_nodes_get_the_same_bits() -> None:
    """Even if the tensors of a node differ in the last bit, because one worker sends each part."""

    def work(communicator: NodeCommunicator, place: int, across: Recording) -> Tensor:
        generator = torch.Generator().manual_seed(communicator.rank)
        x = torch.randn(101, generator=generator)
        x[place::2] = torch.nextafter(x[place::2], torch.tensor(9.0))
        return communicator.sum(x, what="test").wait()

    first, *others = between(2, 2, work)
    assert all(torch.equal(first, other) for other in others)
    each = [torch.randn(101, generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
    torch.testing.assert_close(first, each[0] + each[1])


def test_every_operation_is_supported_or_refused_by_name() -> None:
    """A new class of operation must be added to NodeCommunicator."""

    def work(communicator: NodeCommunicator, place: int, across: Recording) -> Any:
        texts = {}
        for kind in classes():
            try:
                communicator.start(_example(kind, communicator)).wait()
            except TypeError as error:
                texts[kind.__name__] = str(error)
        return texts

    for texts in between(2, 2, work):
        assert set(texts) == {"Send", "Receive"}
        assert all("node_group" in text for text in texts.values())


def _example(kind: Any, communicator: Communicator) -> Operation[Any]:
    if kind is Await:
        promise: Any = communicator.host.promise()
        promise.fulfil(1)
        return Await(what="kept", promise=promise)
    x = torch.zeros(communicator.size)
    if kind is Send:
        return Send(what="a push", tensor=x, destination=0)
    if kind is Receive:
        return Receive(what="a pull", tensor=x, source=0)
    return Exchange(what="x", tensor=x) if kind is Exchange else kind(what="x", tensor=x)


class Broken(Recording):
    """A communicator that loses the result of the second sum."""

    def start(self, operation: Operation[Any]) -> Any:
        handle = super().start(operation)
        if operation.collective and sum(kind == "Sum" for kind, *_ in self.operations) == 2:

            def lose(_: Any) -> Any:
                raise CommunicationError("lost on purpose")

            return handle.then(lose)
        return handle


def test_a_failure_in_the_background_is_raised_by_wait() -> None:
    """Later operations raise it, too. Earlier ones return their results."""

    def work(communicator: NodeCommunicator, place: int, across: Recording) -> Any:
        communicator = NodeCommunicator(Broken(communicator._across), communicator._inside)
        handles = [communicator.sum(torch.ones(4), what=f"sum {i}") for i in range(3)]
        found: list[Any] = [handles[0].wait().tolist()]
        for handle in handles[1:]:
            try:
                handle.wait()
            except CommunicationError as error:
                found.append(str(error))
        return found

    for first, *errors in between(2, 2, work):
        assert first == [2.0] * 4
        assert errors[0] == "lost on purpose"
        assert len(errors) == 2


@pytest.mark.parametrize("precision", ["int8", "int2"])
def test_a_lossy_wire_gives_the_bits_of_one_worker_in_each_node(precision: Any) -> None:
    """In two stages and in one, with several sums in flight, and with error feedback."""

    def work(communicator: Communicator) -> list[Tensor]:
        team, cpu = Team(communicator), torch.device("cpu")
        wire, generator = Wire(team, precision), torch.Generator().manual_seed(communicator.rank)
        part = Stream([(3000, torch.float32, cpu)], team.size, cpu)
        part.make_errors()
        found = []
        for _ in range(3):
            updates = [torch.randn(3000, generator=generator) for _ in range(3)]
            sums = [wire.sum(u, stream=f"s{i}", what="x") for i, u in enumerate(updates)]
            message = make_message(team, wire.twin, precision, [part], "y")
            message.write(0, 0, 0, updates[0].clone())
            message.start(None).wait()
            found += [one.wait().clone() for one in sums]
            found.append(torch.empty(3000))
            message.read(0, 0, 0, found[-1], torch.empty(3000))
        return found

    plain = offbeat.simulate(
        lambda: work(dist.group.WORLD.make_communicator(60.0)),
        workers=2,
        network=offbeat.Network("100Mbit/s"),
        compute=offbeat.Compute(0.001),
    ).results
    for found in between(2, 2, lambda communicator, place, across: work(communicator)):
        for one, other in zip(found, plain[0], strict=True):
            assert torch.equal(one, other)


def test_a_node_agrees_on_the_largest_of_each_number() -> None:
    """Over the workers of the node alone. The time counts as waiting."""

    def work(communicator: NodeCommunicator, place: int, across: Recording) -> Any:
        team = Team(communicator, node=Node(communicator, communicator._inside, across))
        rank = dist.get_rank()
        communicator.host.sleep(0.5 * place, "some workers come later")
        agreed = team.agree(float(rank), -float(rank), 3.0)
        return [*agreed, round(team.account.wait_seconds, 1)]

    assert between(2, 2, work) == [
        *([1.0, 0.0, 3.0, 0.5], [1.0, 0.0, 3.0, 0.0]),
        *([3.0, -2.0, 3.0, 0.5], [3.0, -2.0, 3.0, 0.0]),
    ]


def test_without_a_node_agree_returns_its_arguments() -> None:
    assert Team(SingleCommunicator()).agree(2.0, -1.0) == [2.0, -1.0]
