"""Super streams over AMQP 0.9.1: declares, describes, changes and deletes them, and publishes to them."""

from relatum.superstreams._super_stream import AffinityHandle, SuperStream
from relatum.superstreams.administration import (
    add_partition,
    declare_super_stream,
    delete_super_stream,
    describe_super_stream,
    unbind_partition,
)
from relatum.superstreams.connections import StreamOptions
from relatum.superstreams.layout import Balance, BalanceName, Candidate, Layout, Partition, balance_of, partition_of
from relatum.superstreams.targets import Outgoing, Target

__all__ = [
    "AffinityHandle",
    "Balance",
    "BalanceName",
    "Candidate",
    "Layout",
    "Outgoing",
    "Partition",
    "StreamOptions",
    "SuperStream",
    "Target",
    "add_partition",
    "balance_of",
    "declare_super_stream",
    "delete_super_stream",
    "describe_super_stream",
    "partition_of",
    "unbind_partition",
]
