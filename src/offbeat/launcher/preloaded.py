"""What the fork server of ``offbeat run`` imports before it forks: what almost every script needs.

Each worker then starts without these imports, which take seconds.
"""

import torch.utils.data

from offbeat import attach  # noqa: F401 - the first public name imports those of all others
from offbeat.launcher.forking import AVAILABLE
from offbeat.quantization.kernels import kernels

with torch.profiler.record_function("offbeat"):  # as the first batch of a DataLoader
    pass  # imports another module
if AVAILABLE:  # otherwise no server imports this module
    kernels()  # imports numba, and compiles at most once
