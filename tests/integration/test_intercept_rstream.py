"""Intercepted producers of rstream against a real broker."""

import asyncio
import copy
import pickle
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from rstream import (
    AMQPMessage,
    CompressionType,
    ConfirmationStatus,
    Producer,
    RawMessage,
    RouteType,
    SuperStreamProducer,
)
from rstream._pyamqp.message import Properties as SentProperties  # type: ignore[attr-defined]
from rstream.exceptions import ServerError, StreamDoesNotExist

import relatum
from relatum.errors import (
    ConfigurationError,
    InvalidInput,
    InvalidRelationshipKey,
    PublishOutcomeUnknown,
    PublishRejected,
)
from relatum.keys import KeyDefinition
from relatum.reading import Message, StreamReader, TimeSource
from relatum.uuid7 import time_us_of
from relatum_consumer import Relations
from tests.support import broker_connection, in_a_loop, rows_of, unique_name, wait_recorded, wait_until
from tests.support.proxy import Proxy
from tests.support.super_streams import super_stream

SENDS = ["send", "send_wait", "send_batch", "send_sub_entry"]


def place_of(stream_url: str) -> dict[str, Any]:
    """What a producer is told of the broker."""
    parts = urlsplit(stream_url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "username": parts.username or "guest",
        "password": parts.password or "guest",
    }


@asynccontextmanager
async def producing(stream_url: str, **options: Any) -> AsyncIterator[Producer]:
    """A bare producer, open."""
    async with Producer(**place_of(stream_url), load_balancer_mode=True, **options) as producer:
        yield producer


async def send(producer: Any, way: str, stream: str, messages: Sequence[Any], **options: Any) -> None:
    """Send messages in one of `SENDS`, and see that they are confirmed."""
    confirmed: list[ConfirmationStatus] = []
    if way == "send_wait":
        for message in messages:
            await producer.send_wait(stream, message, timeout=90, **options)
        return
    options["on_publish_confirm"] = confirmed.append
    if way == "send":
        for message in messages:
            await producer.send(stream, message, **options)
    elif way == "send_batch":
        await producer.send_batch(stream, messages, **options)
    else:
        await producer.send_sub_entry(stream, sub_entry_messages=messages, **options)
    expected = 1 if way == "send_sub_entry" else len(messages)
    while len(confirmed) < expected:  # noqa: ASYNC110 - rstream signals nothing here
        await asyncio.sleep(0.01)
    assert all(status.is_confirmed for status in confirmed)


def read(stream_url: str, stream: str, count: int) -> list[Message]:
    """What lies in a stream, once so many messages do."""
    with StreamReader.open(stream_url) as reader:

        def found() -> list[Message]:
            messages = list(reader.iterate(stream))
            return messages if len(messages) >= count else []

        messages = wait_until(found)
    assert len(messages) == count
    return messages


@pytest.mark.parametrize("way", SENDS)
async def test_messages_get_what_they_lack(stream_url: str, stream_name: str, way: str) -> None:
    """A message arrives with an id and a time; the caller's stays as it was, but for rstream's own publishing id."""
    async with producing(stream_url) as producer:
        kind = type(producer)
        assert relatum.intercept(producer, keys=["order_id"]) is producer
        assert type(producer) is kind
        plain = AMQPMessage(body=b"plain")
        keyed = AMQPMessage(
            body=b"keyed",
            application_properties={"order_id": "1", "n": 3},
            message_annotations={"x-a": 1},
            properties=SentProperties(correlation_id="c"),
        )
        own = AMQPMessage(body=b"own", properties=SentProperties(message_id="mine"))
        before = copy.deepcopy((plain, keyed, own))
        await send(producer, way, stream_name, [plain, keyed, own])
        assert (plain, keyed, own) == before
        bare = Producer(**place_of(stream_url))
        assert relatum.statistics(producer).published == 3
        assert set(vars(bare)) == set(vars(relatum.release(producer)))
    plain, keyed, own = read(stream_url, stream_name, 3)
    assert [message.body for message in (plain, keyed, own)] == [b"plain", b"keyed", b"own"]
    assert time_us_of(plain.properties.message_id or "")
    assert time_us_of(keyed.properties.message_id or "")
    assert dict(plain.headers) == {}
    assert dict(keyed.headers) == {"order_id": "1", "n": 3, "x-a": 1}
    assert keyed.properties.correlation_id == "c"
    assert own.properties.message_id == "mine"
    assert set(own.headers) == {"relatum_time"}
    assert [message.time_source for message in (plain, keyed, own)] == [
        TimeSource.MESSAGE_ID,
        TimeSource.MESSAGE_ID,
        TimeSource.HEADER,
    ]


@pytest.mark.parametrize("compression", [CompressionType.No, CompressionType.Gzip])
async def test_sub_entry_batches_are_recorded(
    stream_url: str, amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, compression: CompressionType
) -> None:
    """Each message of a batch is stamped, recorded by the recorder beside the producer, and found."""
    async with producing(stream_url) as producer:
        relatum.intercept(producer, database=database_url, keys=["order_id"])
        messages = [
            AMQPMessage(body=b"%d" % number, application_properties={"order_id": f"o{number % 3}"})
            for number in range(30)
        ]
        await send(producer, "send_sub_entry", stream_name, messages, compression_type=compression)
        await asyncio.to_thread(wait_recorded, amqp_url, engine, stream_name)
        await asyncio.to_thread(relatum.release, producer)
    with Relations(stream_url, database_url) as relations:
        found = relations.find("order_id", "o1").messages
        assert [message.body for message in found] == [b"%d" % number for number in range(1, 30, 3)]
        assert len(list(relations.related(found[0]))) == 9


async def test_keys_have_the_values_that_are_recorded(
    stream_url: str, amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Headers, annotations, properties, tables, bodies and functions of bodies: what is checked is what is recorded."""
    keys = [
        KeyDefinition("order_id"),
        KeyDefinition("device", source="header:x-device"),
        KeyDefinition("reply", source="property:correlation_id"),
        KeyDefinition("item", source="header:$.table.items[0]"),
        KeyDefinition("sku", source="body:$.order.sku"),
        KeyDefinition("customer", source=lambda body: body.decode().partition("customer ")[2] or None),
    ]
    async with producing(stream_url) as producer:
        relatum.intercept(producer, database=database_url, keys=keys)
        message = AMQPMessage(
            body=b'{"order": {"sku": 7}}',
            application_properties={"order_id": 42, "table": {"items": ["i1"]}},
            message_annotations={"x-device": "d1"},
            properties=SentProperties(correlation_id="c1"),
        )
        await producer.send_wait(stream_name, message, timeout=90)
        await producer.send_wait(stream_name, AMQPMessage(body=b"customer Ada"), timeout=90)
        await asyncio.to_thread(wait_recorded, amqp_url, engine, stream_name)
        await asyncio.to_thread(relatum.release, producer)
    assert set(rows_of(engine, stream_name)) == {
        ("order_id", "42", 0),
        ("device", "d1", 0),
        ("reply", "c1", 0),
        ("item", "i1", 0),
        ("sku", "7", 0),
        ("customer", "Ada", 1),
    }


@pytest.mark.parametrize("way", SENDS)
@pytest.mark.parametrize("value", [1.5, datetime(2026, 1, 1, 0, 0, 0, 500_000, tzinfo=UTC)])
async def test_bad_keys_are_refused(stream_url: str, stream_name: str, way: str, value: object) -> None:
    """Nothing of the call is sent, and the producer stays usable."""
    async with producing(stream_url) as producer:
        relatum.intercept(producer, keys=["order_id"])
        bad = AMQPMessage(body=b"bad", application_properties={"order_id": value})
        with pytest.raises(InvalidRelationshipKey):
            await send(producer, way, stream_name, [AMQPMessage(body=b"beside")] * (way in SENDS[2:]) + [bad])
        await send(producer, way, stream_name, [AMQPMessage(body=b"good")])
    assert [message.body for message in read(stream_url, stream_name, 1)] == [b"good"]


@pytest.mark.parametrize("way", SENDS)
async def test_bytes_that_are_no_message_are_refused_or_counted(stream_url: str, stream_name: str, way: str) -> None:
    """They have no place for a key: an error that says what to send; with on_invalid="skip" they go as they are."""
    async with producing(stream_url) as producer:
        relatum.intercept(producer, keys=["order_id"])
        for raw in (b"raw", RawMessage(b"raw"), b""):
            with pytest.raises(InvalidInput, match="AMQPMessage"):
                await send(producer, way, stream_name, [raw])
        relatum.release(producer)
        relatum.intercept(producer, keys=["order_id"], on_invalid="skip")
        await send(producer, way, stream_name, [b"raw", RawMessage(b"raw too")])
        assert relatum.statistics(producer).skipped == {"undecodable_message": 2}
        encoded = bytes(AMQPMessage(body=b"encoded", application_properties={"order_id": "1"}))
        await send(producer, way, stream_name, [encoded])
    raw, too, encoded = read(stream_url, stream_name, 3)
    assert [(message.body, message.is_amqp) for message in (raw, too)] == [(b"raw", False), (b"raw too", False)]
    assert (encoded.body, encoded.headers["order_id"]) == (b"encoded", "1")
    assert time_us_of(encoded.properties.message_id or "")


@pytest.mark.parametrize("is_intercepted", [False, True])
async def test_deduplication_goes_by_the_callers_publishing_ids(
    stream_url: str, stream_name: str, is_intercepted: bool
) -> None:
    """A named producer's ids are the caller's, given or written into the message; the broker drops the same ones."""
    async with producing(stream_url) as producer:
        if is_intercepted:
            relatum.intercept(producer)
        for publishing_id in (1, 2, 3, 2, 3, 4):
            message = AMQPMessage(body=b"%d" % publishing_id)
            message.publishing_id = publishing_id
            sent = await producer.send_wait(stream_name, message, publisher_name="named", timeout=90)
            assert sent == publishing_id
    async with producing(stream_url) as producer:
        if is_intercepted:
            relatum.intercept(producer)
        again = AMQPMessage(body=b"again")
        for _ in range(2):
            # rstream numbers on from what the broker has, in the caller's message: it is the same one then.
            assert await producer.send_wait(stream_name, again, publisher_name="named", timeout=90) == 5
        assert again.publishing_id == 5
    bodies = [message.body for message in read(stream_url, stream_name, 5)]
    assert bodies == [b"1", b"2", b"3", b"4", b"again"]


FRAME = 1 << 20
"""Bytes of the largest frame that RabbitMQ takes by default; a larger one ends the connection."""


async def test_what_fits_without_an_id_is_confirmed_with_one(stream_url: str, stream_name: str) -> None:
    """A batch that is a frame long, as rstream alone sends it at one go, and the longest message."""
    async with producing(stream_url) as producer:
        relatum.intercept(producer)
        batch = [AMQPMessage(body=b"%04d" % number + bytes(1000)) for number in range(FRAME // 1040)]
        await send(producer, "send_batch", stream_name, batch)
        assert [message.publishing_id for message in batch] == list(range(1, len(batch) + 1))
        assert relatum.statistics(producer).published == len(batch)
        await send(producer, "send_wait", stream_name, [AMQPMessage(body=bytes(FRAME - 100))])
    messages = read(stream_url, stream_name, FRAME // 1040 + 1)
    assert [int(message.body[:4]) for message in messages[:-1]] == list(range(FRAME // 1040))


@pytest.mark.parametrize("way", SENDS)
async def test_what_no_frame_takes_is_refused(stream_url: str, stream_name: str, way: str) -> None:
    """Nothing of it is sent, and what was sent before is confirmed: RabbitMQ would end the connection."""
    async with producing(stream_url) as producer:
        relatum.intercept(producer)
        await send(producer, "send_wait", stream_name, [AMQPMessage(body=b"good")])
        with pytest.raises(InvalidInput, match="1048576") as refused:
            await send(producer, way, stream_name, [AMQPMessage(body=bytes(FRAME - 50))])
        assert "nothing was sent" in str(refused.value)
        await send(producer, way, stream_name, [AMQPMessage(body=b"good")])
    assert [message.body for message in read(stream_url, stream_name, 2)] == [b"good"] * 2


@pytest.mark.parametrize("is_intercepted", [False, True])
async def test_filters_see_the_callers_messages(
    stream_url: str, stream_name: str, is_intercepted: bool, broker_version: tuple[int, ...]
) -> None:
    """The function that gives a filter's value is called with what rstream alone would call it with."""
    if broker_version < (3, 13):
        pytest.skip("RabbitMQ filters streams from 3.13 on")
    seen: list[Any] = []

    async def extract(message: Any) -> str:
        seen.append(message)
        return "region"

    async with producing(stream_url, filter_value_extractor=extract) as producer:
        if is_intercepted:
            relatum.intercept(producer, on_invalid="skip")
        message = AMQPMessage(body=b"")
        await send(producer, "send_wait", stream_name, [message, b"raw"])
        assert seen[0] is message
        assert seen[1] == RawMessage(b"raw", publishing_id=2)
        relatum.release(producer)
        assert producer._filter_value_extractor is extract
    read(stream_url, stream_name, 2)


@pytest.mark.parametrize("routing", RouteType)
def test_super_streams_are_routed_by_the_callers_message(
    stream_url: str,
    amqp_url: str,
    database_url: str,
    engine: sa.Engine,
    routing: RouteType,
    broker_version: tuple[int, ...],
) -> None:
    """Partitions are chosen as without us, by hash and by key, and recorded; in two of them a message is one."""
    if broker_version < (3, 13):
        pytest.skip("rstream cannot read what RabbitMQ 3.10 answers about super streams")
    seen: list[Any] = []

    async def extract(message: Any) -> str:
        seen.append(message)
        return str(message.application_properties["order_id"])

    async def scenario(name: str, *, is_intercepted: bool) -> None:
        producer = SuperStreamProducer(
            **place_of(stream_url), super_stream=name, routing_extractor=extract, routing=routing
        )
        before = set(vars(producer))
        if is_intercepted:
            relatum.intercept(producer, database=database_url, keys=["order_id"])
        async with producer:
            # rstream asks the broker for the route of the first key alone.
            orders = ["o1"] if routing is RouteType.Key else [f"o{number}" for number in range(9)]
            sent = [AMQPMessage(body=b"", application_properties={"order_id": order}) for order in orders]
            for message in sent:
                await producer.send(message)
            assert all(one is other for one, other in zip(seen, sent, strict=True))
            seen.clear()
        if not is_intercepted:
            return
        inner: Any = producer._producer
        await asyncio.to_thread(relatum.release, producer)
        assert not {"send", "send_wait", "send_batch", "send_sub_entry"} & set(vars(inner))
        assert set(vars(producer)) - before <= {"super_stream_metadata", "_routing_strategy"}

    keys = ["o0", "o1", "o2"] if routing is RouteType.Key else None
    with super_stream(amqp_url, stream_url, 3, binding_keys=keys) as layout, StreamReader.open(stream_url) as reader:
        with broker_connection(amqp_url) as connection:
            if routing is RouteType.Key:
                connection.channel().queue_bind(layout.partitions[2].stream, layout.super_stream, "o1")
        in_a_loop(scenario(layout.super_stream, is_intercepted=False))
        in_a_loop(scenario(layout.super_stream, is_intercepted=True))
        ids: list[str] = []
        for each in layout:
            messages = list(reader.iterate(each.stream))
            half = len(messages) // 2
            orders = [message.headers["order_id"] for message in messages]
            assert orders[:half] == orders[half:]
            assert all(message.properties.message_id is None for message in messages[:half])
            ids += [message.properties.message_id or "" for message in messages[half:]]
            if messages:
                wait_recorded(amqp_url, engine, each.stream)
                assert [value for _, value, _ in sorted(rows_of(engine, each.stream), key=lambda row: row[2])] == orders
    assert (len(ids), len(set(ids))) == ((2, 1) if routing is RouteType.Key else (9, 9))


async def test_a_stream_that_is_not_there_is_rstreams_own_error(stream_url: str) -> None:
    """Nothing was sent: the client's error as it is, and nothing counted."""
    async with producing(stream_url) as producer:
        relatum.intercept(producer)
        with pytest.raises(StreamDoesNotExist) as caught:
            await producer.send_wait(unique_name(), AMQPMessage(body=b""), timeout=90)
        assert type(caught.value) is StreamDoesNotExist
        assert relatum.statistics(producer).published == 0


async def test_what_is_not_confirmed_in_time_is_an_unknown_outcome(stream_url: str, stream_name: str) -> None:
    """Rstream's error and ours; the stream settles it. rstream's table of errors is as it was."""
    before = dict(ServerError._registry)
    parts = urlsplit(stream_url)
    with Proxy(parts.hostname or "", parts.port or 5552) as proxy:
        place = place_of(stream_url) | {"port": urlsplit(proxy.url(stream_url)).port}
        producer = Producer(**place)
        relatum.intercept(producer, stream_url=None, broker_url=stream_url)
        await producer.start()
        # It goes to the leader's own port for streams: through the proxy likewise.
        producer._clients[stream_name] = client = await producer._pool.get(
            connection_name="proxied", stream=stream_name, connection_closed_handler=producer._on_connection_closed
        )
        assert client is not None
        await producer.send_wait(stream_name, AMQPMessage(body=b"first"), timeout=90)
        proxy.mode = "blackhole_replies"
        with pytest.raises(PublishOutcomeUnknown) as caught:
            await producer.send_wait(stream_name, AMQPMessage(body=b"second"), timeout=1)
        assert isinstance(caught.value, TimeoutError)
        unknown: Any = caught.value
        (place_found,) = await unknown.settle()
        assert place_found.stream == stream_name
        lost = asyncio.create_task(producer.send_wait(stream_name, AMQPMessage(body=b"third"), timeout=90))
        while not any(producer._waiting_for_confirm.values()):  # noqa: ASYNC110 - rstream signals nothing here
            await asyncio.sleep(0)
        proxy.reset()
        with pytest.raises(PublishOutcomeUnknown) as ended:
            await lost
        assert isinstance(ended.value, ServerError)
        assert isinstance(pickle.loads(pickle.dumps(ended.value)), PublishOutcomeUnknown)
        assert relatum.statistics(producer).errors == {"unknown": 2}
        assert ServerError._registry == before
        producer._close_called = True


async def test_what_is_cancelled_stays_cancelled(stream_url: str, stream_name: str) -> None:
    """Who times a publish out gets what asyncio gives."""
    async with producing(stream_url) as producer:
        relatum.intercept(producer)
        await producer.send_wait(stream_name, AMQPMessage(body=b""), timeout=90)
        task = asyncio.create_task(producer.send_wait(stream_name, AMQPMessage(body=b"")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_refusal_of_the_brokers_is_a_rejection(stream_url: str) -> None:
    """A publish error with a code says that the stream does not have it."""
    from relatum.publishing.clients import _rstream

    async with producing(stream_url) as producer:
        relatum.intercept(producer)
        before = dict(ServerError._registry)
        error = vars(producer)["send_wait"]._outcome(StreamDoesNotExist(), "s", [], 0.0)
        assert isinstance(error, PublishRejected)
        assert isinstance(error, StreamDoesNotExist)
        assert ServerError._registry == before
        assert _rstream.NAME == "rstream"


async def test_a_receipt_tells_the_place(stream_url: str, database_url: str, stream_name: str) -> None:
    """Of a message without an id, and of one whose id was used before; without a database nothing is sent."""
    async with producing(stream_url) as producer:
        with pytest.raises(ConfigurationError):
            await relatum.publish_async(producer, AMQPMessage(body=b""), stream_name)
        relatum.intercept(producer)
        with pytest.raises(ConfigurationError, match="database="):
            await relatum.publish_async(producer, AMQPMessage(body=b""), stream_name)
        relatum.release(producer)
        relatum.intercept(producer, database=database_url)
        with pytest.raises(InvalidInput):
            await relatum.publish_async(producer, RawMessage(b"raw"), stream_name)  # type: ignore[arg-type]
        own = AMQPMessage(body=b"own", properties=SentProperties(message_id="mine"))
        for offset, message in enumerate((AMQPMessage(body=b"plain"), own, own, AMQPMessage(body=b""))):
            message.publishing_id = None
            receipt = await relatum.publish_async(producer, message, stream_name, timeout=90)
            (place,) = await receipt.wait(90)
            assert (place.stream, place.offset) == (stream_name, offset)
        await asyncio.to_thread(relatum.release, producer)


def test_a_consumer_is_no_producer(stream_url: str) -> None:
    """The error names what can be intercepted."""
    from rstream import Consumer

    with pytest.raises(ConfigurationError, match="producer of rstream"):
        relatum.intercept(Consumer(**place_of(stream_url)))


@pytest.mark.parametrize("ours_first", [True, False])
async def test_instrumentation_composes(stream_url: str, stream_name: str, ours_first: bool) -> None:
    """Whoever wraps the object's method first or last sees each message once; release leaves theirs."""
    seen: list[Any] = []
    async with producing(stream_url) as producer:

        def instrument() -> None:
            wrapped = producer.send_wait

            async def traced(*args: Any, **kwargs: Any) -> Any:
                seen.append(args[1])
                return await wrapped(*args, **kwargs)

            producer.send_wait = traced  # type: ignore[method-assign]

        if ours_first:
            relatum.intercept(producer)
        instrument()
        theirs = producer.send_wait
        relatum.intercept(producer)
        await producer.send_wait(stream_name, AMQPMessage(body=b"one"), timeout=90)
        relatum.release(producer)
        assert producer.send_wait is theirs
        await producer.send_wait(stream_name, AMQPMessage(body=b"two"), timeout=90)
        assert len(seen) == 2
    one, two = read(stream_url, stream_name, 2)
    assert time_us_of(one.properties.message_id or "")
    assert two.properties.message_id is None
