"""``probe`` measures the network between workers: interfaces, latencies, bandwidths, anomalies."""

from offbeat_lab.probe.diagnosis import find_warnings
from offbeat_lab.probe.measure import choose_pairs, probe
from offbeat_lab.probe.result import Pair, Probe, Rank

__all__ = ["Pair", "Probe", "Rank", "choose_pairs", "find_warnings", "probe"]
