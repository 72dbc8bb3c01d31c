"""The clock and the heap of events."""

from offbeat.simulate.kernel import Kernel


def test_events_happen_in_order_of_time_then_first_in_first_out() -> None:
    kernel, seen = Kernel(), []
    for name, seconds in (("late", 2.0), ("a", 1.0), ("b", 1.0), ("c", 1.0), ("first", 0.0)):
        kernel.at(seconds, lambda name=name: seen.append((kernel.now, name)), name)
    while kernel.step():
        pass
    assert seen == [(0.0, "first"), (1.0, "a"), (1.0, "b"), (1.0, "c"), (2.0, "late")]
    assert list(kernel.recent) == seen
    assert kernel.now == 2.0


def test_a_seed_shuffles_ties_and_nothing_else() -> None:
    def order(seed: int | None) -> list[int]:
        kernel, seen = Kernel(seed), []
        for number in range(20):
            kernel.at(1.0 + (number >= 10), lambda number=number: seen.append(number), "")
        while kernel.step():
            pass
        return seen

    assert order(None) == list(range(20))
    assert order(1) == order(1) != list(range(20))
    assert order(2) != order(1)
    assert sorted(order(1)[:10]) == list(range(10)), "times still come in order"
