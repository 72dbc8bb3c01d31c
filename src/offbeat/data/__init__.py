"""Distribution of training samples among workers: samplers, partitions, and data injection."""

from offbeat.data.describe import PartitionTable, describe_partition
from offbeat.data.injection import DataInjection, injected_batch_size
from offbeat.data.leasing.loader import LeasedLoader
from offbeat.data.leasing.sampler import LeasedSampler
from offbeat.data.leasing.stream import LeasedStream
from offbeat.data.partition import partition_by_label, partition_dirichlet
from offbeat.data.selective import SelDPSampler

__all__ = [
    "DataInjection",
    "LeasedLoader",
    "LeasedSampler",
    "LeasedStream",
    "PartitionTable",
    "SelDPSampler",
    "describe_partition",
    "injected_batch_size",
    "partition_by_label",
    "partition_dirichlet",
]
