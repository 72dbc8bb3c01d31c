"""WHO READS WHAT: how samples are divided among workers."""

from offbeat.data.selective import SelDPSampler

__all__ = ["SelDPSampler"]
