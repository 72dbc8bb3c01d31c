"""Key-value stores: the same rules on torch's stores and in virtual time."""

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from offbeat import Compute, Network, simulate
from offbeat.errors import OffbeatError
from offbeat.simulate.communicator import SimulatedCommunicator
from offbeat.transport.communicator import Communicator
from offbeat.transport.key_value_store import KeyValueStore
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_backend.torch_store import TorchStore

STORES: dict[str, Callable[[Path], Any]] = {
    "hash": lambda folder: dist.HashStore(),
    "file": lambda folder: dist.FileStore(str(folder / "store")),
    "tcp": lambda folder: dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    ),
}


def opener(kind: str, folder: Path) -> Callable[[], KeyValueStore]:
    """Return a function that opens the same store again and again, as several workers do."""
    store = STORES[kind](folder)
    return lambda: TorchStore(dist.PrefixStore("prefix", store))


@pytest.mark.parametrize("kind", sorted(STORES))
def test_values_are_those_of_a_dictionary(kind: str, tmp_path: Path) -> None:
    """Each operation, on present and absent keys, seen by a second worker."""
    opened = opener(kind, tmp_path)
    one, two = opened(), opened()
    assert one.get("a") == ""
    one.put("a", "x y")
    assert one.get("a") == "x y"  # in the order of this worker's operations
    assert two.get("a") == "x y"
    assert one.add("n", 2) == 2
    assert two.add("n", 3) == 5
    assert one.get("n") == "5"
    assert one.compare_set("b", "", "mine") == "mine"
    assert two.compare_set("b", "", "yours") == "mine"
    assert two.compare_set("b", "other", "yours") == "mine"
    assert two.compare_set("b", "mine", "yours") == "yours"
    assert one.get("b") == "yours"


@pytest.mark.parametrize("kind", sorted(STORES))
def test_operations_of_several_threads_are_atomic(kind: str, tmp_path: Path) -> None:
    """Every number is drawn once, and one of the proposals wins."""
    opened = opener(kind, tmp_path)
    drawn: list[int] = []
    won: list[str] = []

    def work(name: str) -> None:
        store = opened()
        drawn.extend(store.add("n", 1) for _ in range(50))
        won.append(store.compare_set("winner", "", name))

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(drawn) == list(range(1, 201))
    assert len(set(won)) == 1


def test_a_closed_store_refuses_operations() -> None:
    store = TorchStore(dist.HashStore())
    store.close()
    with pytest.raises(RuntimeError, match="about to exit"):
        store.get("a")


def test_stores_are_optional() -> None:
    """A single process has one. A communicator without a store says so."""

    class Bare(SingleCommunicator):
        store = Communicator.store

    assert SingleCommunicator().store("b").add("n", 1) == 1
    with pytest.raises(OffbeatError, match="a Bare has no store, so workers cannot lease data"):
        Bare().store("b")


def test_simulated_operations_take_a_round_trip() -> None:
    """Twice the latency, and ``put`` once."""

    def work() -> tuple[list[float], list[str]]:
        communicator: SimulatedCommunicator = dist.group.WORLD.make_communicator(10)
        store, host = communicator.store("b"), communicator.host
        key, times = f"k{dist.get_rank()}", [host.now()]
        operations: list[Callable[[], object]] = [
            lambda: store.put(key, "x"),
            lambda: store.get(key),
            lambda: store.add("n", 1),
            lambda: store.compare_set("c", "", key),
        ]
        results = []
        for operation in operations:
            results.append(str(operation()))
            times.append(host.now())
        return [b - a for a, b in itertools.pairwise(times)], results

    for shuffle in (None, 0, 1, 2):
        results = simulate(
            work,
            workers=3,
            network=Network("1Mbit/s", latency="3ms"),
            compute=Compute("1ms"),
            shuffle_ties=shuffle,
        ).results
        for seconds, _ in results:
            assert seconds == pytest.approx([0.003, 0.006, 0.006, 0.006])
        assert [values[1] for _, values in results] == ["x"] * 3
        assert {values[2] for _, values in results} == {"1", "2", "3"}
        assert len({values[3] for _, values in results}) == 1
