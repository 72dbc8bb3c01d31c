"""Random state of torch, numpy and random: one in a process, and so one for each worker here.

Workers change places at each event. numpy takes 60 µs to read its global state and as long to set
it, torch and random 15 µs together. So each worker has a bit generator of its own, which is put in
place as an object. What that leaves behind is the second number of a pair of normal ones, which
numpy keeps beside the generator: it is carried over once the worker has drawn anything at all.
"""

import ctypes
import random
from typing import Any

import numpy as np
import torch

# numpy documents them, its stubs do not know them.
_bit_generator: Any = np.random.get_bit_generator  # type: ignore[attr-defined]
_set_bit_generator: Any = np.random.set_bit_generator  # type: ignore[attr-defined]

_WORDS_OF_MT19937 = 625  # 624 and the position


class RandomState:
    """Of one worker, while another one runs. Start from ``seeded`` or ``current``."""

    def __init__(self, torch_state: torch.Tensor, bits: Any, python_state: tuple[Any, ...]) -> None:
        self._torch, self._bits, self._python = torch_state, bits, python_state
        self._fresh: bytes | None = _memory(bits)  # until it draws
        self._pair: dict[str, Any] = {"has_gauss": 0, "gauss": 0.0}

    @classmethod
    def seeded(cls, seed: int, rank: int) -> "RandomState":
        """That of a worker which begins."""
        fresh = [int(one) for one in np.random.SeedSequence((seed, rank)).generate_state(3)]
        bits: Any = np.random.MT19937()
        bits.state = np.random.RandomState(fresh[1]).get_state(legacy=False)
        state = torch.Generator().manual_seed(fresh[0]).get_state()
        return cls(state, bits, random.Random(fresh[2]).getstate())

    @classmethod
    def current(cls) -> "RandomState":
        """That of the process."""
        found = cls(torch.get_rng_state(), _bit_generator(), random.getstate())
        found._fresh = None
        found.save()
        return found

    def load(self) -> None:
        """Make it that of the process."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        _set_bit_generator(self._bits)
        if self._pair["has_gauss"]:
            np.random.set_state({**self._bits.state, **self._pair})

    def save(self) -> None:
        """Take what the process's has become since ``load``."""
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        bits = _bit_generator()
        if bits is self._bits and self._fresh is not None and _memory(bits) == self._fresh:
            return
        self._bits, self._fresh = bits, None
        state = np.random.get_state(legacy=False)
        self._pair = {key: state[key] for key in self._pair}


def _memory(bits: Any) -> bytes | None:
    """What an MT19937 has in memory; None of another generator."""
    if type(bits) is not np.random.MT19937:
        return None
    return ctypes.string_at(bits.ctypes.state_address, 4 * _WORDS_OF_MT19937)
