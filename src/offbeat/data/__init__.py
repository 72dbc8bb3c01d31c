"""Distribution of training samples among workers: samplers, partitions, and data injection."""

from offbeat.data.describe import PartitionTable, describe_partition
from offbeat.data.injection import DataInjection, injected_batch_size
from offbeat.data.leased_sampler import LeasedLoader, LeasedSampler
from offbeat.data.partition import partition_by_label, partition_dirichlet
from offbeat.data.selective import SelDPSampler

__all__ = [
    "DataInjection",
    "LeasedLoader",
    "LeasedSampler",
    "PartitionTable",
    "SelDPSampler",
    "describe_partition",
    "injected_batch_size",
    "partition_by_label",
    "partition_dirichlet",
]
