"""Distribution of training samples among workers: samplers."""

from offbeat.data.leasing.loader import LeasedLoader
from offbeat.data.leasing.sampler import LeasedSampler
from offbeat.data.leasing.stream import LeasedStream
from offbeat.data.selective import SelDPSampler

__all__ = ["LeasedLoader", "LeasedSampler", "LeasedStream", "SelDPSampler"]
