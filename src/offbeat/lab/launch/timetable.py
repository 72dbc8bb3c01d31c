"""A timetable: actions at given times of a training, such as changes of the bandwidth of links."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from offbeat.lab.events import Event, Start

_LONGEST_ACTION_SECONDS = 60.0

Action = Callable[[], object]


@contextmanager
def timetable(
    actions: Sequence[tuple[float, Action]], on_event: Callable[[Event], None]
) -> Iterator[Callable[[Event], None]]:
    """Provide an event handler that starts a timetable at the event ``Start``.

    A background thread carries out the actions, also while no event arrives because all workers
    wait for a slow link. Actions that are not due at the end of the context are dropped. The error
    of an action ends the timetable. It is raised at the next event, or at the end of the context.

    Args:
        actions: (seconds since ``Start``, action), in the order of the times.
        on_event: Function that receives all events.
    """
    ended, errors, threads = threading.Event(), list[Exception](), list[threading.Thread]()

    def carry_out() -> None:
        start = time.monotonic()
        try:
            for seconds, act in actions:
                if ended.wait(max(0.0, start + seconds - time.monotonic())):
                    return
                act()
        except Exception as error:  # raised by the thread of the events
            errors.append(error)

    def listen(event: Event) -> None:
        if isinstance(event, Start):
            threads.append(threading.Thread(target=carry_out, name="timetable", daemon=True))
            threads[-1].start()
        if errors:
            raise errors[0]
        on_event(event)

    try:
        yield listen
    finally:
        ended.set()
        for thread in threads:
            thread.join(_LONGEST_ACTION_SECONDS)
    if errors:
        raise errors[0]
