"""Super streams made, described and taken apart over AMQP 0.9.1."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias, Union

from relatum.superstreams._layout import Layout, Partition

if TYPE_CHECKING:
    from pika import BlockingConnection
    from pika.adapters.blocking_connection import BlockingChannel

Broker: TypeAlias = Union[str, "BlockingConnection", "BlockingChannel"]
"""A URL, or a pika connection or channel that is open; a channel is used as it is, and closed by nobody."""


def declare_super_stream(
    broker: Broker,
    name: str,
    partitions: int | None = None,
    *,
    binding_keys: Sequence[str] | None = None,
    max_length_bytes: int | None = None,
    max_age: timedelta | None = None,
    segment_bytes_max: int | None = None,
    leader_locator: str | None = None,
) -> Layout:
    """Make a super stream; one that is there already as asked for stays as it is."""
    raise NotImplementedError


def describe_super_stream(broker: Broker, name: str, *, stream_url: str | None = None) -> Layout:
    """The partitions of a super stream in their order.

    Raises:
        SuperStreamNotFound: there is none of that name.
    """
    raise NotImplementedError


def delete_super_stream(broker: Broker, name: str, *, stream_url: str | None = None) -> Layout:
    """Delete a super stream and its streams; gives back what it was."""
    raise NotImplementedError


def add_partition(
    broker: Broker, name: str, *, binding_key: str | None = None, stream_url: str | None = None
) -> Partition:
    """Add a stream behind the others; stream arguments are as for `declare_super_stream`."""
    raise NotImplementedError


def unbind_partition(broker: Broker, name: str, stream: str, *, stream_url: str | None = None) -> Partition:
    """Take a stream out of a super stream; the stream and its messages stay."""
    raise NotImplementedError
