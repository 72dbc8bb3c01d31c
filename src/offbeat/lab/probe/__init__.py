"""What the network between the workers does: interfaces, latencies, bandwidths, and what is odd.

``measure`` takes the figures, ``verdict`` says what is odd about them, ``tables`` shows them.
"""

from offbeat.lab.probe.measure import choose_pairs, probe
from offbeat.lab.probe.result import AllReduce, Pair, Probe, Rank
from offbeat.lab.probe.verdict import find_warnings

__all__ = ["AllReduce", "Pair", "Probe", "Rank", "choose_pairs", "find_warnings", "probe"]
