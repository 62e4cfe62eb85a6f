"""Super streams made, described and taken apart.

A super stream is a durable direct exchange with the argument `x-super-stream`, and streams bound to it, each by a key
and with the argument `x-stream-partition-order`: what `rabbitmq-streams add_super_stream` makes. It is described by the
stream protocol where that answers, else as far as AMQP 0.9.1 can tell.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeAlias

from pika import BlockingConnection
from pika.adapters.blocking_connection import BlockingChannel
from pika.compat import long

from relatum.checks import checked_count, checked_names, checked_text, shown
from relatum.errors import (
    BrokerUnavailable,
    InvalidInput,
    ProtocolError,
    ReadTimeout,
    SuperStreamConflict,
    SuperStreamNotFound,
)
from relatum.headers import NAME_BYTES_MAX
from relatum.limits import PARTITIONS_MAX
from relatum.reading import NOT_BY_STREAMS, Broker, BrokerAddress, StreamReader
from relatum.superstreams.connections import TIMEOUT_S, address_of, blocking_connection
from relatum.superstreams.layout import Layout, Partition, checked_stream_name
from relatum.superstreams.streams import StreamOptions, declare_stream, exchange_exists, queue_exists, refusals

BrokerOrConnection: TypeAlias = str | Broker | BlockingConnection | BlockingChannel
"""A URL or a `Broker`, or a blocking pika connection or channel that is open.

A connection is left open. Nothing is done on the channel itself: the broker closes one where it refuses something.
"""

PARTITIONS_DEFAULT: Final = 3
"""As many as `rabbitmq-streams add_super_stream` makes."""

ORDER_ARGUMENT: Final = "x-stream-partition-order"
"""The binding argument with a partition's place."""


def declare_super_stream(
    broker: BrokerOrConnection,
    name: str,
    partitions: int | None = None,
    *,
    binding_keys: Sequence[str] | None = None,
    options: StreamOptions | None = None,
) -> Layout:
    """Make a super stream; one that is there as asked for stays as it is.

    The streams are made first and bound last. What was made before an error stays, and calling again goes on with it.

    Args:
        broker: A URL, a `Broker`, or an open blocking connection or channel of pika.
        name: The super stream's name, which becomes the exchange's.
        partitions: How many partitions; their streams are `NAME-0`, `NAME-1` and so on. None (default): 3, or as many
            as there are binding keys.
        binding_keys: The partitions' binding keys in their order, where they are not to be numbers; the streams are
            `NAME-KEY`.
        options: What the streams are declared with. None (default): the broker's own defaults; streams that are there
            may have been declared with anything.

    Returns:
        The partitions in their order.

    Raises:
        InvalidInput: no such name, number or keys can be; nothing was sent.
        SuperStreamConflict: it is there with other partitions, or a stream or the exchange is there and is another;
            the streams before that one were made.
        ConfigurationError: the broker knows no such options; nothing was made.
        BrokerUnavailable, AccessRefused: safe to repeat.
    """
    _check_options(options)
    wanted = _wanted(name, partitions, binding_keys)
    address = address_of(broker)
    with blocking_connection(broker, address) as connection:
        try:
            present = _described(connection, address, name)
        except SuperStreamNotFound:
            pass
        else:
            _check_present(connection, present, wanted)
            if present == wanted and options is None:
                return present
        for partition in wanted:
            declare_stream(connection, partition.stream, options or StreamOptions(), name)
        with connection.channel() as channel:
            with refusals(f"Exchange {name!r} is there and is another", name):
                channel.exchange_declare(name, "direct", durable=True, arguments={"x-super-stream": True})
            for partition in wanted:
                channel.queue_bind(partition.stream, name, partition.binding_key, _order(partition.place))
    return wanted


def describe_super_stream(broker: BrokerOrConnection, name: str) -> Layout:
    """The partitions of a super stream in their order.

    Where the stream protocol answers, it lists the streams and confirms each one's binding key. AMQP 0.9.1 alone lists
    no bindings: there the streams `NAME-0`, `NAME-1` and so on are taken for the partitions, up to the first that is
    missing. So it sees no binding keys that are not numbers, and no partitions behind one that was taken out. It takes
    a stream of such a name for a partition even if it is not bound.

    Args:
        broker: A URL, a `Broker`, an open connection or channel of pika, or an aio-pika connection. A callback
            connection's thread waits, and other than a blocking connection none is used itself: another is opened.
        name: The super stream's name.

    Raises:
        SuperStreamNotFound: there is none of that name.
        SuperStreamConflict: a partition's binding key is neither the end of its stream's name, nor its place, nor the
            stream's name.
        BrokerUnavailable, AccessRefused: safe to repeat.
    """
    checked_stream_name(name)
    return _described(broker, address_of(broker), name)


def delete_super_stream(broker: BrokerOrConnection, name: str) -> Layout:
    """Delete a super stream and its streams, with all their messages.

    The exchange goes last, so that a call that was cut short can be repeated. Where the stream protocol does not
    answer, only partitions `NAME-0`, `NAME-1` and so on are found and deleted.

    Args:
        broker: A URL, a `Broker`, or an open blocking connection or channel of pika.
        name: The super stream's name.

    Returns:
        What it was.

    Raises:
        SuperStreamNotFound: there is none of that name.
        BrokerUnavailable, AccessRefused: safe to repeat.
    """
    with _opened(broker, name) as (connection, layout), connection.channel() as channel:
        for partition in layout:
            channel.queue_delete(partition.stream)
        channel.exchange_delete(name)
    return layout


def add_partition(
    broker: BrokerOrConnection,
    name: str,
    *,
    binding_key: str | None = None,
    options: StreamOptions | None = None,
) -> Partition:
    """Add a stream behind the others.

    Publishers that route by hash send most keys elsewhere once they know of it, and each knows of it at another
    moment. Contexts and affinity sets stay where they are.

    Args:
        broker: A URL, a `Broker`, or an open blocking connection or channel of pika.
        name: The super stream's name.
        binding_key: The partition's binding key. A stream `NAME-KEY` that is there is bound. None (default): the next
            number whose stream is not there.
        options: What the stream is declared with. None (default): the broker's own defaults.

    Returns:
        The new partition.

    Raises:
        SuperStreamNotFound: there is none of that name.
        SuperStreamConflict: a partition of that binding key is there, or a stream of its name that is another.
        BrokerUnavailable, AccessRefused: not known whether it was added; describe the super stream.
    """
    if binding_key is not None:
        checked_text("binding_key", binding_key, least=1)
    _check_options(options)
    with _opened(broker, name) as (connection, layout):
        order = _next_order(layout)
        if binding_key is None:
            while queue_exists(connection, f"{name}-{order}"):
                order += 1
            binding_key = str(order)
        partition = Partition(len(layout), f"{name}-{binding_key}", binding_key)
        _check_new(layout, partition)
        declare_stream(connection, partition.stream, options or StreamOptions(), name)
        with connection.channel() as channel:
            channel.queue_bind(partition.stream, name, partition.binding_key, _order(order))
    return partition


def unbind_partition(broker: BrokerOrConnection, name: str, stream: str, *, delete: bool = False) -> Partition:
    """Take a stream out of a super stream.

    Publishers that still send by its binding key then reach no stream.

    Args:
        broker: A URL, a `Broker`, or an open blocking connection or channel of pika.
        name: The super stream's name.
        stream: The partition's stream.
        delete: False (default): the stream and its messages stay. True: it is deleted.

    Returns:
        What it was.

    Raises:
        SuperStreamNotFound: there is no super stream of that name.
        NotFound: the stream is no partition of it.
        SuperStreamConflict: it is the last partition, or it stays bound: by arguments that nobody can know.
        BrokerUnavailable, AccessRefused: safe to repeat.
    """
    checked_stream_name(stream, "stream: its name")
    with _opened(broker, name) as (connection, layout):
        partition = layout.partition(stream)
        if len(layout) == 1:
            why = f"{stream!r} is the last partition of {name!r}: delete the super stream."
            raise SuperStreamConflict(why, super_stream=name, reason="last partition")
        with _stream_reader(address_of(broker)) as reader, connection.channel() as channel:
            for bindings in _bindings(partition):
                for arguments in bindings:
                    channel.queue_unbind(stream, name, partition.binding_key, arguments)
                if reader is not None and stream not in reader.bound(name):
                    break
            else:
                if reader is not None:
                    why = f"{stream!r} stays bound to {name!r}, by arguments that are not known: unbind it by hand."
                    raise SuperStreamConflict(why, super_stream=name, reason=f"binding of {stream}")
            if delete:
                channel.queue_delete(stream)
    return partition


@contextmanager
def _opened(broker: BrokerOrConnection, name: str) -> Iterator[tuple[BlockingConnection, Layout]]:
    """A connection, and the super stream as it is now."""
    checked_stream_name(name)
    address = address_of(broker)
    with blocking_connection(broker, address) as connection:
        yield connection, _described(connection, address, name)


def _check_options(options: StreamOptions | None) -> None:
    if options is not None and not isinstance(options, StreamOptions):
        raise InvalidInput(f"options= takes StreamOptions, not {shown(options)}")


def _wanted(name: str, partitions: int | None, binding_keys: Sequence[str] | None) -> Layout:
    """The layout that is asked for, checked."""
    if binding_keys is None:
        count = PARTITIONS_DEFAULT if partitions is None else partitions
        layout = Layout.numbered(name, min(count, PARTITIONS_MAX + 1) if isinstance(count, int) else count)
    else:
        keys = list(checked_names("binding_keys", binding_keys))
        if partitions is not None and checked_count("partitions", partitions) != len(keys):
            raise InvalidInput(f"{len(keys)} binding keys make {len(keys)} partitions, not {partitions!r}.")
        if len(set(keys)) < len(keys):
            raise InvalidInput("Binding keys (binding_keys=) are texts that are not empty, each of them once.")
        layout = Layout.keyed(name, keys)
    if len(layout) > PARTITIONS_MAX:
        raise InvalidInput(f"A super stream has {PARTITIONS_MAX} partitions at most, not {len(layout)}.")
    for partition in layout:
        checked_stream_name(partition.stream, "The name of a super stream's stream")
    return layout


def _check_new(layout: Layout, partition: Partition) -> None:
    """Refuse a partition that cannot be, or is there."""
    checked_stream_name(partition.stream, "The name of a super stream's stream")
    if any(partition.binding_key == present.binding_key for present in layout):
        raise SuperStreamConflict(
            f"Super stream {layout.super_stream!r} has a partition of binding key {partition.binding_key!r} already.",
            super_stream=layout.super_stream,
            reason="partitions",
        )
    if len(layout) >= PARTITIONS_MAX:
        raise InvalidInput(f"A super stream has {PARTITIONS_MAX} partitions at most, not {len(layout) + 1}.")


def _check_present(connection: BlockingConnection, present: Layout, wanted: Layout) -> None:
    """Refuse other partitions than those asked for, unless they are the first of a declaration that was cut short."""
    if present == wanted:
        return
    missing = wanted.partitions[len(present) :]
    if wanted.partitions[: len(present)] == present.partitions and all(
        queue_exists(connection, partition.stream) for partition in missing
    ):
        return
    keys = ", ".join(partition.binding_key for partition in present)
    raise SuperStreamConflict(
        f"Super stream {present.super_stream!r} is there with {len(present)} partitions ({keys}): add partitions, or "
        "delete it first.",
        super_stream=present.super_stream,
        reason="partitions",
    )


def _order(place: int) -> dict[str, Any]:
    # As a long, which is what RabbitMQ's own tools write: bindings are the same only with arguments of the same type.
    return {ORDER_ARGUMENT: long(place)}


def _bindings(partition: Partition) -> Iterator[list[dict[str, Any] | None]]:
    """The arguments that a partition was most likely bound with; then all that it may have been bound with.

    Unbinding needs the exact arguments, which no protocol lists: the order is its place when it was bound, which stays
    when others are taken out. A `long` is what RabbitMQ's tools write; other clients' integers may be of another type,
    or there may be none. Where there is no such binding, nothing happens.
    """
    number = partition.binding_key
    likely = (partition.place, int(number)) if _is_place(number) else (partition.place,)
    for orders in (likely, range(PARTITIONS_MAX)):
        yield [None, *(arguments for order in orders for arguments in (_order(order), {ORDER_ARGUMENT: order}))]


def _next_order(layout: Layout) -> int:
    """A place behind all others. Places stay when partitions are taken out, so it may be more than their number."""
    numbers = [int(partition.binding_key) for partition in layout if _is_place(partition.binding_key)]
    return max(len(layout), *(number + 1 for number in numbers), 0)


def _is_place(binding_key: str) -> bool:
    return binding_key.isdecimal() and binding_key.isascii() and int(binding_key) < PARTITIONS_MAX


@contextmanager
def _stream_reader(address: BrokerAddress) -> Iterator[StreamReader | None]:
    """A reader over the stream protocol; None where that does not answer at the port that was derived from AMQP's.

    Raises:
        BrokerUnavailable, ProtocolError, ReadTimeout: it does not answer where it was said to be. AMQP 0.9.1 may show
            other partitions, which would send messages elsewhere, so a broker that starts is no reason to ask it.
    """
    reader = None
    if address.stream_port is not None:
        try:
            reader = StreamReader.open(address, timeout_s=TIMEOUT_S)
        except (BrokerUnavailable, ProtocolError, ReadTimeout, *NOT_BY_STREAMS):
            # Whether AMQP 0.9.1 answers is for the caller to find out: it may have a connection of its own.
            if not address.stream_port_guessed:
                raise
    with nullcontext() if reader is None else reader:
        yield reader


def _described(source: Any, address: BrokerAddress, name: str) -> Layout:
    """The layout of a super stream; raises as `describe_super_stream`."""
    with _stream_reader(address) as reader:
        if reader is not None:
            streams = reader.bound(name)
            if not streams:
                raise SuperStreamNotFound(f"There is no super stream {name!r}.", super_stream=name)
            keys = [_binding_key(reader, name, stream, place) for place, stream in enumerate(streams)]
            return Layout.of(name, zip(streams, keys, strict=True))
    with blocking_connection(source, address) as connection:
        if not exchange_exists(connection, name):
            raise SuperStreamNotFound(f"There is no super stream {name!r}.", super_stream=name)
        partitions = 0
        while queue_exists(connection, f"{name}-{partitions}"):
            partitions += 1
    if not partitions:
        raise SuperStreamNotFound(
            f"There is an exchange {name!r}, but no stream {f'{name}-0'!r}. Only the stream protocol shows "
            "partitions of other names: give its URL, Broker(…, stream_url=…) or --stream-url.",
            super_stream=name,
        )
    return Layout.numbered(name, partitions)


def _binding_key(reader: StreamReader, name: str, stream: str, place: int) -> str:
    """The key by which the exchange leads to a stream. The broker only confirms a key, and does not list them."""
    # The names that RabbitMQ's tools give partitions; then keys that are likely for streams of other names.
    for key in dict.fromkeys((stream.removeprefix(f"{name}-"), str(place), stream)):
        routes = reader.routes(name, key)
        if routes is None and stream == f"{name}-{key}":
            return key
        if stream in (routes or ()):
            return key
    raise SuperStreamConflict(
        f"Stream {stream!r} is a partition of {name!r} by a binding key that the broker does not show: give the layout "
        "yourself.",
        super_stream=name,
        reason=f"binding key of {stream}",
    )


def bound_streams(connection: BlockingConnection, address: BrokerAddress, exchange: str) -> list[str]:
    """Streams that are bound to an exchange: by AMQP alone, the one that a super stream's first partition would be."""
    with _stream_reader(address) as reader:
        if reader is not None:
            return reader.bound(exchange)
    first = f"{exchange}-0"
    return [first] if len(first.encode()) <= NAME_BYTES_MAX and queue_exists(connection, first) else []
