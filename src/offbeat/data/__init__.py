"""WHO READS WHAT: how samples are divided among workers."""

from offbeat.data.describe import PartitionTable, describe_partition
from offbeat.data.partition import partition_by_label, partition_dirichlet
from offbeat.data.selective import SelDPSampler

__all__ = [
    "PartitionTable",
    "SelDPSampler",
    "describe_partition",
    "partition_by_label",
    "partition_dirichlet",
]
