"""What the fork server of ``offbeat run`` imports before it forks: what almost every script needs.

Each worker then starts without these imports, which take seconds.
"""

import torch.utils.data  # noqa: F401

from offbeat import attach  # noqa: F401 - the first public name imports those of all others
from offbeat.launcher.forking import AVAILABLE
from offbeat.quantization.kernels import kernels

if AVAILABLE:  # otherwise no server imports this module
    kernels()  # imports numba, and compiles at most once
