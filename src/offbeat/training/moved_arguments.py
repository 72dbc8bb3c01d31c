"""Errors for arguments of ``attach`` that have moved elsewhere."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")
_REPLACEMENTS = {
    "optimizer_state": 'give it to the strategy: LocalSGD(period=8, optimizer_state="average")',
    "distance_every": "call sync.monitor(distance_every=…) after attach()",
    "gradient_change": "call sync.monitor(gradient_change=True) after attach()",
    "max_grad_norm": "call sync.clip_grad_norm_(…) before the step, or torch's function",
    "companions": "call sync.follow(…) after attach()",
    "on_failure": "give min_workers=1 to continue after the loss of workers",
}


def rejects_moved_arguments(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate ``attach``: an argument that has moved raises a TypeError with its replacement."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> T:
        for name in kwargs:
            if name in _REPLACEMENTS:
                raise TypeError(f"attach() no longer takes {name}: {_REPLACEMENTS[name]}")
        if kwargs.get("non_finite") == "leave_out":
            raise ValueError('non_finite="leave_out" is now called non_finite="exclude"')
        return function(*args, **kwargs)

    return checked
