"""Declares, describes, changes and deletes super streams.

A super stream is a durable direct exchange with the argument `x-super-stream`, and streams that are bound to it. Each
binding has a key and the argument `x-stream-partition-order`. `rabbitmq-streams add_super_stream` declares the same.
Relatum describes it over the stream protocol or, if that does not answer, incompletely over AMQP 0.9.1.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, TypeAlias

from pika import BlockingConnection
from pika.adapters.blocking_connection import BlockingChannel

from relatum.common.checks import checked_count, checked_names, checked_text, shown
from relatum.common.headers import NAME_BYTES_MAX
from relatum.common.limits import PARTITIONS_MAX
from relatum.errors import (
    BrokerUnavailable,
    InvalidInput,
    ProtocolError,
    ReadTimeout,
    SuperStreamConflict,
    SuperStreamNotFound,
)
from relatum.reading import STREAM_PORT_ERRORS, Broker, BrokerAddress, StreamReader, pika_long
from relatum.superstreams.connections import (
    TIMEOUT_S,
    StreamOptions,
    address_of,
    blocking_connection,
    declare_stream,
    exchange_exists,
    queue_exists,
    refusals,
)
from relatum.superstreams.layout import Layout, Partition, checked_stream_name

BrokerOrConnection: TypeAlias = str | Broker | BlockingConnection | BlockingChannel
"""A URL, a `Broker`, or an open blocking pika connection or channel.

The connection stays open. Of a channel, only the connection is used, because the broker closes a channel after a
refusal.
"""

PARTITIONS_DEFAULT: Final = 3
"""Default number of partitions, as of `rabbitmq-streams add_super_stream`."""

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
    """Declare a super stream, and return its layout. An existing one with the same partitions is left unchanged.

    Streams are declared first and bound last. After an error, a part may be declared; call this again to continue.

    Args:
        broker: A URL, a `Broker`, or an open blocking pika connection or channel.
        name: The name of the super stream and of its exchange.
        partitions: The number of partitions; their streams are `NAME-0`, `NAME-1` and so on. None (default): 3, or the
            number of binding keys.
        binding_keys: The partitions' binding keys, in order; the streams are `NAME-KEY`. None (default): the numbers
            from 0.
        options: The options of the streams. None (default): the broker's defaults; the streams of an
            existing super stream keep theirs.

    Returns:
        The partitions, in order.

    Raises:
        InvalidInput: The name, number, keys or options are invalid; nothing was sent.
        SuperStreamConflict: The super stream exists with other partitions, or a stream or the exchange exists with
            other arguments; the streams before that one may have been declared.
        ConfigurationError: The broker does not accept the options; nothing was declared.
        BrokerUnavailable, AccessRefused: The broker is unavailable or refuses the user; safe to retry.
    """
    _check_options(options)
    wanted = _wanted(name, partitions, binding_keys)
    address = address_of(broker)
    with blocking_connection(broker, address) as connection:
        with suppress(SuperStreamNotFound):
            present = _described(connection, address, name)
            _check_present(connection, present, wanted)
            if present == wanted and options is None:
                return present
        for partition in wanted:
            declare_stream(connection, partition.stream, options or StreamOptions(), name)
        with connection.channel() as channel:
            with refusals(f"Exchange {name!r} exists with other properties", name):
                channel.exchange_declare(name, "direct", durable=True, arguments={"x-super-stream": True})
            for partition in wanted:
                channel.queue_bind(partition.stream, name, partition.binding_key, _order(partition.place))
    return wanted


def describe_super_stream(broker: BrokerOrConnection, name: str) -> Layout:
    """Return the partitions of a super stream, in order.

    The stream protocol lists the streams and confirms their binding keys. AMQP 0.9.1 lists no bindings. If only AMQP
    answers, the existing streams `NAME-0`, `NAME-1` and so on are returned, up to the first gap. The result then lacks
    partitions with other names, and includes unbound streams with these names.

    Args:
        broker: A URL, a `Broker`, an open pika connection or channel, or an aio-pika connection. A blocking connection
            is reused; otherwise a new connection is opened. The call blocks the thread of a callback connection, too.
        name: The super stream's name.

    Raises:
        SuperStreamNotFound: There is no such super stream.
        SuperStreamConflict: A binding key could not be found: it is not `KEY` of a stream `NAME-KEY`, nor the
            partition's place, nor the stream's name.
        BrokerUnavailable, AccessRefused: The broker is unavailable or refuses the user; safe to retry.
    """
    checked_stream_name(name)
    return _described(broker, address_of(broker), name)


def delete_super_stream(broker: BrokerOrConnection, name: str) -> Layout:
    """Delete a super stream and its streams, with all their messages.

    The exchange is deleted last, so that you can repeat an interrupted call. If the stream protocol does not answer,
    only the streams that `describe_super_stream` finds over AMQP 0.9.1 are deleted.

    Args:
        broker: A URL, a `Broker`, or an open blocking pika connection or channel.
        name: The super stream's name.

    Returns:
        The deleted partitions.

    Raises:
        SuperStreamNotFound: There is no such super stream.
        BrokerUnavailable, AccessRefused: The broker is unavailable or refuses the user; safe to retry.
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
    """Add a partition after the others, and return it.

    Once a publisher that routes by hash sees the new layout, it sends most keys to a different partition than before.
    Contexts and affinity sets keep their partitions.

    Args:
        broker: A URL, a `Broker`, or an open blocking pika connection or channel.
        name: The super stream's name.
        binding_key: The partition's binding key. If a stream `NAME-KEY` exists, it is bound. None (default): the next
            number for which no stream exists.
        options: The options of the stream. None (default): the broker's defaults.

    Returns:
        The new partition.

    Raises:
        SuperStreamNotFound: There is no such super stream.
        SuperStreamConflict: A partition with this binding key exists, or its stream exists with other arguments.
        InvalidInput: An argument is invalid, or the super stream has the maximum number of partitions.
        BrokerUnavailable, AccessRefused: The partition may have been added; describe the super stream to find out.
    """
    if binding_key is not None:
        checked_text("binding_key", binding_key, least=1)
    _check_options(options)
    with _opened(broker, name) as (connection, layout):
        # The new place is after all others. It may exceed their number, since places do not move after an unbinding.
        numbers = [int(present.binding_key) for present in layout if _is_place(present.binding_key)]
        order = max(len(layout), *(number + 1 for number in numbers), 0)
        if binding_key is None:
            while queue_exists(connection, f"{name}-{order}"):
                order += 1
            binding_key = str(order)
        partition = Partition(len(layout), f"{name}-{binding_key}", binding_key)
        checked_stream_name(partition.stream, "The name of a super stream's stream")
        if any(binding_key == present.binding_key for present in layout):
            why = f"Super stream {name!r} already has a partition with binding key {binding_key!r}: choose another key."
            raise SuperStreamConflict(why, super_stream=name, reason="partitions")
        if len(layout) >= PARTITIONS_MAX:
            raise InvalidInput(f"A super stream has at most {PARTITIONS_MAX} partitions, not {len(layout) + 1}.")
        declare_stream(connection, partition.stream, options or StreamOptions(), name)
        with connection.channel() as channel:
            channel.queue_bind(partition.stream, name, partition.binding_key, _order(order))
    return partition


def unbind_partition(broker: BrokerOrConnection, name: str, stream: str, *, delete: bool = False) -> Partition:
    """Unbind a stream from a super stream, and return the former partition.

    Messages that publishers still send with its binding key are then unroutable.

    Args:
        broker: A URL, a `Broker`, or an open blocking pika connection or channel.
        name: The super stream's name.
        stream: The partition's stream.
        delete: False (default): the stream and its messages remain. True: the stream is deleted.

    Returns:
        The former partition.

    Raises:
        SuperStreamNotFound: There is no such super stream.
        NotFound: The stream is not a partition of the super stream.
        SuperStreamConflict: The stream is the last partition, or is still bound, by a binding with unknown arguments.
        BrokerUnavailable, AccessRefused: The broker is unavailable or refuses the user; safe to retry.
    """
    checked_stream_name(stream, "The stream's name")
    with _opened(broker, name) as (connection, layout):
        partition = layout.partition(stream)
        if len(layout) == 1:
            why = f"{stream!r} is the last partition of {name!r}: delete the super stream instead."
            raise SuperStreamConflict(why, super_stream=name, reason="last partition")
        # Unbinding needs the binding's exact arguments, which no protocol lists. So this tries the most likely ones
        # first, then all possible ones; those that do not match have no effect. The order argument is the place at the
        # time of binding. RabbitMQ's tools write a long; other clients may write another type of integer, or none.
        key = partition.binding_key
        likely = (partition.place, int(key)) if _is_place(key) else (partition.place,)
        with _stream_reader(address_of(broker)) as reader, connection.channel() as channel:
            for orders in (likely, range(PARTITIONS_MAX)):
                channel.queue_unbind(stream, name, key)
                for order in orders:
                    channel.queue_unbind(stream, name, key, _order(order))
                    channel.queue_unbind(stream, name, key, {ORDER_ARGUMENT: order})
                if reader is not None and stream not in reader.bound(name):
                    break
            else:
                if reader is not None:
                    why = f"A binding of {stream!r} to {name!r} has unknown arguments: remove it manually."
                    raise SuperStreamConflict(why, super_stream=name, reason=f"binding of {stream}")
            if delete:
                channel.queue_delete(stream)
    return partition


@contextmanager
def _opened(broker: BrokerOrConnection, name: str) -> Iterator[tuple[BlockingConnection, Layout]]:
    """Provide a connection and the super stream's current layout."""
    checked_stream_name(name)
    address = address_of(broker)
    with blocking_connection(broker, address) as connection:
        yield connection, _described(connection, address, name)


def _check_options(options: StreamOptions | None) -> None:
    if options is not None and not isinstance(options, StreamOptions):
        raise InvalidInput(f"options= takes StreamOptions, not {shown(options)}")


def _wanted(name: str, partitions: int | None, binding_keys: Sequence[str] | None) -> Layout:
    if binding_keys is None:
        layout = Layout.numbered(name, PARTITIONS_DEFAULT if partitions is None else partitions)
    else:
        keys = list(checked_names("binding_keys", binding_keys))
        if partitions is not None and checked_count("partitions", partitions) != len(keys):
            raise InvalidInput(f"{len(keys)} binding keys make {len(keys)} partitions, not {partitions!r}.")
        if len(set(keys)) < len(keys):
            raise InvalidInput("binding_keys= takes each binding key only once.")
        layout = Layout.keyed(name, keys)
    if len(layout) > PARTITIONS_MAX:
        raise InvalidInput(f"A super stream has at most {PARTITIONS_MAX} partitions, not {len(layout)}.")
    for partition in layout:
        checked_stream_name(partition.stream, "The name of a super stream's stream")
    return layout


def _check_present(connection: BlockingConnection, present: Layout, wanted: Layout) -> None:
    """Raise if the present partitions differ from the wanted ones, unless an interrupted call declared them."""
    if present == wanted:
        return
    is_first = wanted.partitions[: len(present)] == present.partitions
    if is_first and all(queue_exists(connection, missing.stream) for missing in wanted.partitions[len(present) :]):
        return
    name, keys = present.super_stream, ", ".join(partition.binding_key for partition in present)
    why = f"Super stream {name!r} exists with {len(present)} partitions ({keys}): add partitions, or delete it first."
    raise SuperStreamConflict(why, super_stream=name, reason="partitions")


def _order(place: int) -> dict[str, Any]:
    # A long, as RabbitMQ's tools write it. Arguments of bindings are equal only if their types are.
    return {ORDER_ARGUMENT: pika_long(place)}


def _is_place(binding_key: str) -> bool:
    return binding_key.isdecimal() and binding_key.isascii() and int(binding_key) < PARTITIONS_MAX


@contextmanager
def _stream_reader(address: BrokerAddress) -> Iterator[StreamReader | None]:
    """Provide a reader; None if the stream protocol does not answer at a port that is derived from AMQP's port.

    If a configured port does not answer, this raises: AMQP 0.9.1 may show other partitions, and so route differently.
    """
    reader = None
    if address.stream_port is not None:
        try:
            reader = StreamReader.open(address, timeout_s=TIMEOUT_S)
        except (BrokerUnavailable, ProtocolError, ReadTimeout, *STREAM_PORT_ERRORS):
            # The caller uses AMQP 0.9.1 instead, for which it may have a connection.
            if not address.stream_port_guessed:
                raise
    with nullcontext() if reader is None else reader:
        yield reader


def no_super_stream(name: str) -> SuperStreamNotFound:
    """Return the error of a missing super stream. It names the command that declares one."""
    message = f"there is no super stream {name!r}: `relatum super-stream declare {name}` creates one"
    return SuperStreamNotFound(message, super_stream=name)


def _described(source: Any, address: BrokerAddress, name: str) -> Layout:
    """Return the layout of a super stream. Raises as `describe_super_stream`."""
    with _stream_reader(address) as reader:
        if reader is not None:
            streams = reader.bound(name)
            if not streams:
                raise no_super_stream(name)
            keys = [_binding_key(reader, name, stream, place) for place, stream in enumerate(streams)]
            return Layout.of(name, zip(streams, keys, strict=True))
    with blocking_connection(source, address) as connection:
        if not exchange_exists(connection, name):
            raise no_super_stream(name)
        partitions = 0
        while queue_exists(connection, f"{name}-{partitions}"):
            partitions += 1
    if not partitions:
        raise SuperStreamNotFound(
            f"There is an exchange {name!r}, but no stream {f'{name}-0'!r}. Only the stream protocol shows "
            "partitions with other names: give its URL with Broker(…, stream_url=…) or --stream-url.",
            super_stream=name,
        )
    return Layout.numbered(name, partitions)


def _binding_key(reader: StreamReader, name: str, stream: str, place: int) -> str:
    """Return the binding key of a stream. The broker can confirm a key, but does not list keys."""
    # First the key in a name from RabbitMQ's tools, then keys that are likely for streams with other names.
    for key in dict.fromkeys((stream.removeprefix(f"{name}-"), str(place), stream)):
        routes = reader.routes(name, key)
        if routes is None and stream == f"{name}-{key}":
            return key
        if stream in (routes or ()):
            return key
    raise SuperStreamConflict(
        f"Stream {stream!r} is a partition of {name!r} with an unknown binding key, which the broker does not list: "
        "pass the layout to SuperStream as partitions=.",
        super_stream=name,
        reason=f"binding key of {stream}",
    )


def bound_streams(connection: BlockingConnection, address: BrokerAddress, exchange: str) -> list[str]:
    """Return the streams bound to an exchange. AMQP 0.9.1 alone finds only a super stream's first partition."""
    with _stream_reader(address) as reader:
        if reader is not None:
            return reader.bound(exchange)
    first = f"{exchange}-0"
    return [first] if len(first.encode()) <= NAME_BYTES_MAX and queue_exists(connection, first) else []
