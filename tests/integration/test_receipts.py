"""Receipts: publish with a confirm, wait for the offsets."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import aio_pika
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

import relatum
from relatum.errors import (
    ConfigurationError,
    InvalidInput,
    NotRecordedInTime,
    PublishOutcomeUnknown,
    PublishUnroutable,
)
from relatum.reading import StreamReader
from tests.support import broker_connection, unique_name
from tests.support.callbacks import open_channel, running
from tests.support.proxy import Proxy
from tests.support.threads import Threads


@pytest.fixture
def channel(amqp_url: str, stream_url: str, database_url: str) -> Iterator[BlockingChannel]:
    """A channel of a connection whose process records too."""
    with broker_connection(amqp_url) as connection:
        relatum.intercept(connection, database=database_url, keys=["order_id"], stream_url=stream_url)
        yield connection.channel()
        relatum.release(connection)


@pytest.fixture
def fanout(amqp_url: str, stream_name: str, other_stream: str) -> Iterator[str]:
    """An exchange that leads to both streams."""
    name = unique_name()
    with broker_connection(amqp_url) as connection:
        bare = connection.channel()
        bare.exchange_declare(name, "fanout")
        for stream in (stream_name, other_stream):
            bare.queue_bind(stream, name)
        yield name
        bare.exchange_delete(name)


def body_at(stream_url: str, place: relatum.MessageId) -> bytes:
    """What lies there."""
    with StreamReader.open(stream_url) as reader:
        return reader.read(place.stream, place.offset).body


def test_a_receipt_gives_one_place_for_each_stream(
    channel: BlockingChannel, stream_url: str, stream_name: str, other_stream: str, fanout: str
) -> None:
    """An exchange that leads to two streams: two places, by the streams' names, each with the message."""
    places = relatum.publish(channel, fanout, "", b"both").wait()
    assert [place.stream for place in places] == sorted([stream_name, other_stream])
    assert all(body_at(stream_url, place) == b"both" for place in places)


def test_a_message_id_may_be_used_again(channel: BlockingChannel, stream_name: str) -> None:
    """Two messages under one id of the caller's: each receipt gives the place of its own message."""
    properties = pika.BasicProperties(message_id="mine", timestamp=1_700_000_000)
    receipts = [relatum.publish(channel, "", stream_name, b"same", properties) for _ in range(3)]
    places = [place for receipt in receipts for place in receipt.wait()]
    assert len(set(places)) == 3
    assert [place.offset for place in places] == sorted(place.offset for place in places)


@pytest.mark.parametrize(
    "body", [None, memoryview(b"x"), bytearray(b"x"), 5, ["x"]], ids=lambda body: type(body).__name__
)
def test_a_body_that_is_none_is_refused_before_it_is_sent(
    channel: BlockingChannel, stream_name: str, body: Any
) -> None:
    """With a receipt that is one clear error; pika's own publish says what it said before."""
    with pytest.raises(InvalidInput, match="body= takes bytes or text"):
        relatum.publish(channel, "", stream_name, body)
    with pytest.raises(AttributeError):
        channel.basic_publish("", stream_name, body)
    (place,) = relatum.publish(channel, "", stream_name, "text").wait()
    assert place.offset == 0


def test_a_queue_that_is_no_stream_has_no_places_and_is_named_once(
    channel: BlockingChannel, caplog: pytest.LogCaptureFixture
) -> None:
    """A message to a classic queue by the default exchange is confirmed and lies in no stream; a warning says so."""
    name = unique_name()
    channel.queue_declare(name, exclusive=True)
    for _ in range(2):
        assert relatum.publish(channel, "", name, b"").wait() == ()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "relatum.interception"]
    assert f"{name!r} is no stream" in said


def test_not_recorded_in_time_says_where_the_message_is(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """Without a recorder the message is confirmed and in the stream, and the wait ends in time."""
    with broker_connection(amqp_url) as connection:
        relatum.intercept(connection, database=database_url, recorder="external", stream_url=stream_url)
        receipt = relatum.publish(connection.channel(), "", stream_name, b"alone")
        with pytest.raises(NotRecordedInTime) as caught:
            receipt.wait(0.2)
        assert caught.value.in_stream is True
        assert caught.value.found == ()
        (place,) = receipt.settle()
        assert body_at(stream_url, place) == b"alone"
        relatum.release(connection)


def test_with_the_database_away_publishing_goes_on(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """PostgreSQL that was never there: messages are published and confirmed, only receipts do not come."""
    with broker_connection(amqp_url) as connection:
        relatum.intercept(connection, database="postgresql://nobody@127.0.0.1:9/none", stream_url=stream_url)
        receipt = relatum.publish(connection.channel(), "", stream_name, b"")
        assert receipt.is_confirmed
        with pytest.raises(NotRecordedInTime):
            receipt.wait(0.2)
        relatum.release(connection)


@pytest.mark.parametrize("confirming_already", [False, True])
def test_a_callback_connection_gives_receipts(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str, confirming_already: bool
) -> None:
    """Receipts among ordinary publishes: each is decided by its own confirm; the caller's confirms come too."""
    confirms: list[Any] = []
    with running(amqp_url, database=database_url, stream_url=stream_url) as (connection, on_thread):
        channel = open_channel(connection, on_thread)
        if confirming_already:
            on_thread(channel.confirm_delivery, confirms.append)
        else:
            on_thread(relatum.publish, channel, "", stream_name, b"first")
        receipts = []
        for number in range(50):
            on_thread(channel.basic_publish, "", stream_name, b"plain")
            receipts.append(on_thread(relatum.publish, channel, "", stream_name, b"%d" % number))
        for number, receipt in enumerate(receipts):
            (place,) = receipt.wait()
            assert body_at(stream_url, place) == b"%d" % number
        assert bool(confirms) == confirming_already


def test_callbacks_are_called_once_the_broker_has_answered(amqp_url: str, stream_url: str, database_url: str) -> None:
    """With a callback connection that is after publishing; the receipt has the error then."""
    with running(amqp_url, database=database_url, stream_url=stream_url) as (connection, on_thread):
        channel, decided = open_channel(connection, on_thread), threading.Event()
        unroutable = on_thread(relatum.publish, channel, "", unique_name(), b"")
        unroutable.add_done_callback(lambda _: decided.set())
        assert decided.wait(90)
        assert isinstance(unroutable.error, PublishUnroutable)


def test_waiting_on_the_thread_of_confirms_is_an_error(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """The thread that must receive the confirm is told so, instead of waiting for itself."""
    with running(amqp_url, database=database_url, stream_url=stream_url) as (connection, on_thread):
        channel = open_channel(connection, on_thread)
        with pytest.raises(ConfigurationError, match="thread"):
            on_thread(lambda: relatum.publish(channel, "", stream_name, b"").wait())


def test_a_lost_callback_connection_leaves_the_outcome_unknown(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """The connection ends before the confirm: the receipt says so, and settles it from the stream."""
    with Proxy.to(amqp_url) as proxy:
        options = {"database": database_url, "broker_url": amqp_url, "stream_url": stream_url}
        with running(proxy.url(amqp_url), **options) as (connection, on_thread):
            channel = open_channel(connection, on_thread)
            on_thread(relatum.publish, channel, "", stream_name, b"first").wait()
            proxy.mode = "blackhole_replies"
            receipt = on_thread(relatum.publish, channel, "", stream_name, b"second")
            with pytest.raises(PublishOutcomeUnknown):
                receipt.wait(0.1)
            (place,) = receipt.settle()
            proxy.reset()
            with pytest.raises(PublishOutcomeUnknown) as caught:
                receipt.wait()
            assert caught.value.in_stream is None
            assert caught.value.settle() == (place,)
            assert body_at(stream_url, place) == b"second"


def test_confirm_mode_from_before_cannot_be_counted(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """Delivery tags of a channel that was confirming before us are not known: an error says what to do."""
    with running(amqp_url, database=database_url, stream_url=stream_url) as (connection, on_thread):
        relatum.release(connection)
        channel = open_channel(connection, on_thread)
        on_thread(channel.confirm_delivery, lambda _: None)
        relatum.intercept(connection, database=database_url, stream_url=stream_url)
        with pytest.raises(ConfigurationError, match="intercept first"):
            on_thread(relatum.publish, channel, "", stream_name, b"")


async def test_an_awaited_receipt_needs_confirms(amqp_url: str, database_url: str) -> None:
    """Without them nothing is sent."""
    async with await aio_pika.connect(amqp_url) as connection:
        relatum.intercept(connection, database=database_url, recorder="external")
        channel = await connection.channel(publisher_confirms=False)
        with pytest.raises(ConfigurationError, match="confirms"):
            await relatum.publish_async(channel, aio_pika.Message(b""), "x")


def test_what_need_not_be_routed_is_confirmed(channel: BlockingChannel) -> None:
    """The broker drops it, as the caller has said that it may."""
    assert relatum.publish(channel, "", unique_name(), b"", mandatory=False).is_confirmed


def test_connections_share_one_recorder(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str, earlier: Threads
) -> None:
    """Two connections of one process to the same servers have one recorder, which goes with the last of them."""
    connections = [BlockingConnection(pika.URLParameters(amqp_url)) for _ in range(2)]
    for connection in connections:
        relatum.intercept(connection, database=database_url, stream_url=stream_url)
    assert sum(thread.name == "relatum-embedded" for thread in earlier.begun()) == 1
    relatum.release(connections[0])
    assert relatum.publish(connections[1].channel(), "", stream_name, b"").wait()
    relatum.release(connections[1])
    for connection in connections:
        connection.close()
    # The thread that keeps readers' idle connections alive belongs to the process, and ends when it finds none.
    left = {thread.name for thread in earlier.begun()} - {"relatum-heartbeats"}
    assert not [name for name in left if name.startswith("relatum-")]


def test_a_connection_may_be_dropped_while_a_lock_is_held(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """The garbage collector takes away what was not released, in any thread, in the midst of anything."""
    program = """
import gc, sys
import pika, relatum
from relatum.metrics import _reporting

amqp_url, stream_url, database_url, stream = sys.argv[1:]
connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
relatum.intercept(connection, database=database_url, stream_url=stream_url)
relatum.publish(connection.channel(), "", stream, b"").wait()
connection.close()
with _reporting._registry._lock:
    del connection
    gc.collect()
print("dropped")
"""
    command = [sys.executable, "-c", program, amqp_url, stream_url, database_url, stream_name]
    dropped = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert (dropped.stdout, dropped.stderr) == ("dropped\n", "")


def test_delivery_tags_are_counted_while_a_connection_is_released(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """Released and intercepted again, with messages in between: each receipt is confirmed by its own confirm."""
    options: dict[str, Any] = {"database": database_url, "stream_url": stream_url}
    with running(amqp_url, **options) as (connection, on_thread):
        channel = open_channel(connection, on_thread)
        for again in range(3):
            receipt = on_thread(relatum.publish, channel, "", stream_name, b"%d" % again)
            (place,) = receipt.wait(90)
            assert body_at(stream_url, place) == b"%d" % again
            relatum.release(connection)
            for _ in range(5):
                on_thread(channel.basic_publish, "", stream_name, b"between")
            on_thread(relatum.intercept, connection, **options)
        receipts = [on_thread(relatum.publish, channel, "", name, b"") for name in (stream_name, "nobody", stream_name)]
        for receipt in (receipts[0], receipts[2]):
            assert receipt.wait(90)
        with pytest.raises(PublishUnroutable):
            receipts[1].wait(90)
