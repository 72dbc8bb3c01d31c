"""Distribution of training samples among workers: samplers."""

from offbeat.data.leased_sampler import LeasedLoader, LeasedSampler
from offbeat.data.selective import SelDPSampler

__all__ = ["LeasedLoader", "LeasedSampler", "SelDPSampler"]
