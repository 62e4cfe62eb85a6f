"""Super streams over AMQP 0.9.1: made, described, and published to."""

from relatum.superstreams._admin import (
    Broker,
    add_partition,
    declare_super_stream,
    delete_super_stream,
    describe_super_stream,
    unbind_partition,
)
from relatum.superstreams._balance import AffinityHandle, Balance, BalanceName, Candidate, balance_of
from relatum.superstreams._connections import address_of, blocking_connection, note_secret, vhost_of
from relatum.superstreams._description import bound_streams
from relatum.superstreams._layout import Layout, Partition, checked_stream_name, partition_of
from relatum.superstreams._protocol import Outgoing, Target, TargetExchange, channel_of
from relatum.superstreams._streams import (
    KEPT,
    StreamOptions,
    declare_stream,
    ensure_stream,
    exchange_exists,
    queue_exists,
    stream_exists,
)
from relatum.superstreams._target import SuperStream

__all__ = [
    "KEPT",
    "AffinityHandle",
    "Balance",
    "BalanceName",
    "Broker",
    "Candidate",
    "Layout",
    "Outgoing",
    "Partition",
    "StreamOptions",
    "SuperStream",
    "Target",
    "TargetExchange",
    "add_partition",
    "address_of",
    "balance_of",
    "blocking_connection",
    "bound_streams",
    "channel_of",
    "checked_stream_name",
    "declare_stream",
    "declare_super_stream",
    "delete_super_stream",
    "describe_super_stream",
    "ensure_stream",
    "exchange_exists",
    "note_secret",
    "partition_of",
    "queue_exists",
    "stream_exists",
    "unbind_partition",
    "vhost_of",
]
