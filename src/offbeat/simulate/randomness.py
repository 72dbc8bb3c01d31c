"""The random state of one simulated worker: torch (CPU), numpy and Python's ``random``.

All simulated workers run in one process, which has only one global random state. The simulator
saves and loads this state when it switches between workers, so saving and loading must be fast.

numpy takes 60 µs to read its global state and 60 µs to set it. torch and ``random`` together take
15 µs. Each worker therefore has its own numpy bit generator, and ``load`` exchanges these objects.
numpy draws normal numbers in pairs and keeps the second one outside the bit generator. This number
has to be saved and loaded separately.
"""

import ctypes
import random
from typing import Any

import numpy as np
import torch

# numpy documents these functions, but its type stubs lack them.
_bit_generator: Any = np.random.get_bit_generator  # type: ignore[attr-defined]
_set_bit_generator: Any = np.random.set_bit_generator  # type: ignore[attr-defined]

_WORDS_OF_MT19937 = 625  # 624 words of state and the position


class RandomState:
    """Random state of one worker, saved while another worker runs."""

    def __init__(self, torch_state: torch.Tensor, bits: Any, python_state: tuple[Any, ...]) -> None:
        self._torch, self._bits, self._python = torch_state, bits, python_state
        self._initial: bytes | None = _memory(bits)  # None once the worker has used numpy
        self._pair: dict[str, Any] = {"has_gauss": 0, "gauss": 0.0}

    @classmethod
    def seeded(cls, seed: int, rank: int) -> "RandomState":
        """Return the initial state of worker ``rank``."""
        seeds = [int(one) for one in np.random.SeedSequence((seed, rank)).generate_state(3)]
        bits: Any = np.random.MT19937()
        bits.state = np.random.RandomState(seeds[1]).get_state(legacy=False)
        state = torch.Generator().manual_seed(seeds[0]).get_state()
        return cls(state, bits, random.Random(seeds[2]).getstate())

    @classmethod
    def current(cls) -> "RandomState":
        """Return the present random state of the process."""
        state = cls(torch.get_rng_state(), _bit_generator(), random.getstate())
        state._initial = None
        state.save()
        return state

    def load(self) -> None:
        """Set the random state of the process to this state."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        _set_bit_generator(self._bits)
        if self._pair["has_gauss"]:
            np.random.set_state({**self._bits.state, **self._pair})

    def save(self) -> None:
        """Replace this state by the present random state of the process."""
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        bits = _bit_generator()
        if bits is self._bits and self._initial is not None and _memory(bits) == self._initial:
            return  # numpy has not been used
        self._bits, self._initial = bits, None
        state = np.random.get_state(legacy=False)
        self._pair = {key: state[key] for key in self._pair}


def _memory(bits: Any) -> bytes | None:
    """Return the memory of an MT19937 bit generator; None for another generator."""
    if type(bits) is not np.random.MT19937:
        return None
    return ctypes.string_at(bits.ctypes.state_address, 4 * _WORDS_OF_MT19937)
