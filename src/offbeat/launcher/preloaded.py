"""Imports what almost every script needs. The fork server imports this module before it forks.

Each worker then starts without these imports, which take seconds.
"""

# ruff: noqa: E402 - imports come after prctl()
import ctypes
import gc
import signal

_PR_SET_PDEATHSIG = 1
# Otherwise the server would outlive a launcher that ends during these imports. Forks do not inherit
# this setting.
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

import torch.utils.data

from offbeat import attach  # noqa: F401 - the first public name imports those of all others
from offbeat.quantization.kernels import kernels

kernels()  # imports numba, and compiles at most once
# The first optimizer and the first batch of a DataLoader import further modules.
torch.optim.SGD([torch.zeros(1)], lr=0.1)
with torch.profiler.record_function("offbeat"):
    pass
# Otherwise each fork collects all these modules at its end, which takes a second.
gc.collect()
gc.freeze()
