"""Receipts: publish with a confirm, wait for the offsets."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aio_pika
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

import relatum
from relatum import errors
from relatum.reading import StreamBounds, StreamReader
from tests.support import all_plain, broker_connection, run_python, unique_name, until_answered, wait_until
from tests.support.callbacks import open_channel, running
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.routing import confirming
from tests.support.threads import Threads


@pytest.fixture
def recorded(place: Place) -> dict[str, Any]:
    """Options of an interception whose process records, too."""
    return {"database": place.database, "broker": place.broker}


@contextmanager
def open_intercepted(place: Place, **options: Any) -> Iterator[BlockingChannel]:
    """A channel of a connection that is intercepted with these options."""
    with broker_connection(place.amqp) as connection:
        relatum.intercept(connection, **options)
        yield connection.channel()
        relatum.release(connection)


@pytest.fixture
def channel(place: Place, recorded: dict[str, Any]) -> Iterator[BlockingChannel]:
    """A channel of a connection whose process records too."""
    with open_intercepted(place, keys=["order_id"], **recorded) as channel:
        yield channel


def body_at(place: Place, at: relatum.MessageId) -> bytes:
    return place.messages(at.stream)[at.offset].body


def test_a_receipt_gives_one_place_for_each_stream(channel: BlockingChannel, place: Place, other_stream: str) -> None:
    """A receipt gives a place in each stream its own message was routed to, even among messages of one id."""
    fanout = unique_name()
    channel.exchange_declare(fanout, "fanout")
    for stream in (place.stream, other_stream):
        channel.queue_bind(stream, fanout)
    properties = pika.BasicProperties(message_id="mine", timestamp=1_700_000_000)
    receipts = [relatum.publish(channel, fanout, "", b"both", properties) for _ in range(3)]
    for number, receipt in enumerate(receipts):
        places = receipt.wait()
        assert places == tuple((stream, number) for stream in sorted([place.stream, other_stream]))
        assert all(body_at(place, each) == b"both" for each in places)
    channel.exchange_delete(fanout)


def test_a_message_that_was_published_again_adds_no_places(
    channel: BlockingChannel, place: Place, other_stream: str
) -> None:
    """A consumer may publish a message again with all its properties: the receipt gives the first message's place."""
    receipt = relatum.publish(channel, "", place.stream, b"once")
    expected = ((place.stream, 0),)
    assert receipt.wait() == expected
    message = place.messages()[0]
    again = pika.BasicProperties(message_id=message.properties.message_id, headers=dict(message.headers))
    with confirming(place.amqp) as bare:
        for stream in (place.stream, other_stream):
            bare.basic_publish("", stream, b"once", again)
            # It is recorded before a later message of its stream.
            assert relatum.publish(channel, "", stream, b"").wait()
    assert receipt.wait() == expected


def test_a_message_with_copies_has_a_place_in_each_stream(
    channel: BlockingChannel, place: Place, other_stream: str
) -> None:
    """The header CC routes a message to further streams: the receipt gives their places, too."""
    receipt = relatum.publish(channel, "", place.stream, b"", pika.BasicProperties(headers={"CC": [other_stream]}))
    for stream in (place.stream, other_stream):
        assert relatum.publish(channel, "", stream, b"").wait()
    assert receipt.wait() == tuple((stream, 0) for stream in sorted([place.stream, other_stream]))
    assert receipt.streams is None
    queue = channel.queue_declare("", exclusive=True).method.queue
    copied = relatum.publish(channel, "", queue, b"", pika.BasicProperties(headers={"CC": [other_stream]}))
    assert copied.wait() == ((other_stream, 2),)


def test_a_body_that_is_none_is_refused_before_it_is_sent(channel: BlockingChannel, stream_name: str) -> None:
    """A body of a wrong type is one clear error with a receipt, and pika's own error without one."""
    for body in (None, memoryview(b"x"), bytearray(b"x"), 5, ["x"]):
        with pytest.raises(errors.InvalidInput, match="body= takes bytes or text"):
            relatum.publish(channel, "", stream_name, body)  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            channel.basic_publish("", stream_name, body)  # type: ignore[arg-type]
    (at,) = relatum.publish(channel, "", stream_name, "text").wait()
    assert at.offset == 0


def test_what_lies_in_no_stream_is_confirmed_without_places(
    channel: BlockingChannel, caplog: pytest.LogCaptureFixture
) -> None:
    """A message that reached no stream is confirmed without places, and a classic queue is warned of once."""
    name = unique_name()
    channel.queue_declare(name, exclusive=True)
    for _ in range(2):
        assert relatum.publish(channel, "", name, b"").wait() == ()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "relatum.interception"]
    assert f"{name!r} is not a stream" in said
    assert relatum.publish(channel, "", unique_name(), b"", mandatory=False).is_confirmed


@pytest.mark.parametrize("is_away", [False, True])
def test_not_recorded_in_time_says_where_the_message_is(place: Place, recorded: dict[str, Any], is_away: bool) -> None:
    """Without a recorder or its database, the wait ends in time and says that the message is in the stream."""
    recorded["recorder"] = "external"
    if is_away:
        recorded |= {"recorder": "embedded", "database": "postgresql://nobody@127.0.0.1:9/none"}
    with open_intercepted(place, **recorded) as channel:
        receipt = relatum.publish(channel, "", place.stream, b"alone")
        assert receipt.is_confirmed
        with pytest.raises(errors.NotRecordedInTime) as caught:
            receipt.wait(0.2)
        assert (caught.value.in_stream, caught.value.found) == (True, ())
        (at,) = receipt.settle()
        assert body_at(place, at) == b"alone"


async def test_one_thread_asks_for_all_receipts(place: Place, recorded: dict[str, Any], earlier: Threads) -> None:
    """One thread waits for all receipts: each task gets its own place, and a cancelled one disturbs no other."""
    recorded["recorder"] = "external"
    async with await aio_pika.connect(place.amqp) as connection:
        relatum.intercept(connection, **recorded)
        channel = await connection.channel()
        messages = [aio_pika.Message(b"%d" % number) for number in range(100)]
        receipts = [
            await relatum.publish_async(channel.default_exchange, message, place.stream) for message in messages
        ]
        waits = [asyncio.create_task(receipt.wait(90)) for receipt in receipts]
        with pytest.raises(errors.NotRecordedInTime):
            await receipts[0].wait(0.5)
        assert [each.name for each in earlier.begun()].count("relatum-waits") == 1
        for wait in waits[::3]:
            wait.cancel()
        await asyncio.to_thread(place.record)
        found = await asyncio.gather(*waits, return_exceptions=True)
        for number, places in enumerate(found):
            if number % 3:
                assert places == (relatum.MessageId(place.stream, number),)
            else:
                assert isinstance(places, asyncio.CancelledError)
        assert await receipts[0].wait() == ((place.stream, 0),)
        relatum.release(connection)


def test_a_stream_that_lacks_the_message_is_waited_for_to_its_end(
    place: Place, recorded: dict[str, Any], other_stream: str
) -> None:
    """A wait ends once every stream the message may be in is recorded beyond the time it was published."""
    with open_intercepted(place, **recorded | {"recorder": "external"}) as channel:
        direct = unique_name()
        channel.exchange_declare(direct, "direct")
        for key, stream in (("here", place.stream), ("there", other_stream)):
            channel.queue_bind(stream, direct, key)
            relatum.publish(channel, direct, key, b"first")
        place.record(place.stream, other_stream)
        relatum.publish(channel, direct, "there", b"behind")
        receipt = relatum.publish(channel, direct, "here", b"second")
        place.record(place.stream)
        # With one stream, its place is all that is known in time; once the other is recorded, both places come at once.
        began = time.monotonic()
        assert until_answered(lambda: receipt.wait(0.5)) == ((place.stream, 1),)
        assert time.monotonic() - began >= 0.5
        place.record(other_stream)
        began = time.monotonic()
        assert receipt.wait(90) == ((place.stream, 1),)
        assert time.monotonic() - began < 60
        assert receipt.streams is None
        channel.exchange_delete(direct)


def test_a_stream_that_cannot_be_read_now_is_waited_for(
    place: Place, recorded: dict[str, Any], other_stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a stream has no leader, a place in another stream is not all that there is."""
    bounds = StreamReader.bounds

    def leaderless(reader: StreamReader, stream: str) -> StreamBounds:
        if stream == other_stream and threading.current_thread() is threading.main_thread():
            raise errors.StreamUnavailable("no leader", stream=stream)
        return bounds(reader, stream)

    with open_intercepted(place, **recorded | {"recorder": "external"}) as channel:
        fanout = unique_name()
        channel.exchange_declare(fanout, "fanout")
        for stream in (place.stream, other_stream):
            channel.queue_bind(stream, fanout)
        relatum.publish(channel, fanout, "", b"first")
        place.record(place.stream, other_stream)
        receipt = relatum.publish(channel, fanout, "", b"second")
        place.record(place.stream)
        monkeypatch.setattr(StreamReader, "bounds", leaderless)
        recording = threading.Timer(0.5, place.record, [other_stream])
        recording.start()
        assert receipt.wait(90) == tuple(sorted([(place.stream, 1), (other_stream, 1)]))
        monkeypatch.undo()
        recording.join()
        channel.exchange_delete(fanout)


@pytest.mark.parametrize("confirming_already", [False, True])
def test_a_callback_connection_gives_receipts(place: Place, recorded: dict[str, Any], confirming_already: bool) -> None:
    """Each receipt of a callback connection has its own confirm, and the connection's thread may not wait for one."""
    confirms: list[Any] = []
    with running(place.amqp, **recorded) as (connection, on_thread):
        channel = open_channel(connection, on_thread)
        if confirming_already:
            on_thread(channel.confirm_delivery, confirms.append)
        else:
            on_thread(relatum.publish, channel, "", place.stream, b"first")
        receipts = []
        for number in range(50):
            on_thread(channel.basic_publish, "", place.stream, b"plain")
            receipts.append(on_thread(relatum.publish, channel, "", place.stream, b"%d" % number))
        found = [receipt.wait() for receipt in receipts]
        bodies = [message.body for message in place.messages()]
        assert [bodies[at.offset] for (at,) in found] == [b"%d" % number for number in range(50)]
        assert bool(confirms) == confirming_already
        decided, unroutable = threading.Event(), on_thread(relatum.publish, channel, "", unique_name(), b"")
        unroutable.add_done_callback(lambda _: decided.set())
        assert decided.wait(90)
        assert isinstance(unroutable.error, errors.PublishUnroutable)
        with pytest.raises(errors.ConfigurationError, match="thread"):
            on_thread(lambda: relatum.publish(channel, "", place.stream, b"").wait())


@pytest.mark.parametrize("confirming_already", [False, True])
def test_a_busy_channel_confirms_the_right_messages(
    place: Place, recorded: dict[str, Any], confirming_already: bool
) -> None:
    """While a channel waits for an answer, pika holds back `confirm.select`, but no message."""
    with running(place.amqp, **recorded) as (connection, on_thread):
        channel = open_channel(connection, on_thread)

        def publish() -> list[relatum.Receipt]:
            channel.basic_qos(prefetch_count=10, callback=lambda _: None)
            if confirming_already:
                channel.confirm_delivery(lambda _: None)
            return [relatum.publish(channel, "", name, b"") for name in (unique_name(), place.stream)]

        lost, stored = on_thread(publish)
        assert stored.wait()
        assert isinstance(lost.error, errors.PublishUnroutable)


def test_a_message_counts_although_its_publish_raised(place: Place, recorded: dict[str, Any]) -> None:
    """Another wrapper may raise behind a sent message, or be removed: each receipt still waits for its own confirm."""
    acks: list[Any] = []
    with running(place.amqp) as (connection, on_thread):
        channel = open_channel(connection, on_thread)
        relatum.release(connection)
        bare = channel.basic_publish

        def wrapper(exchange: str, routing_key: str, body: bytes, *more: Any) -> None:
            bare(exchange, routing_key, body, *more)
            if body == b"raises":
                raise RuntimeError(body)

        channel.basic_publish, wrapper.__dict__["_original_function"] = wrapper, bare
        on_thread(relatum.intercept, connection, **recorded)
        on_thread(channel.confirm_delivery, acks.append)
        with pytest.raises(errors.PublishOutcomeUnknown):
            on_thread(channel.basic_publish, "", place.stream, b"raises")
        wait_until(lambda: acks, what="the first confirm")
        for body in (b"mine", b"again"):
            (at,) = on_thread(relatum.publish, channel, "", place.stream, body).wait()
            assert body_at(place, at) == body
            # So OpenTelemetry's instrumentation removes its wrapper.
            channel.basic_publish = getattr(channel.basic_publish, "_original_function", None)


def test_a_lost_callback_connection_leaves_the_outcome_unknown(place: Place, recorded: dict[str, Any]) -> None:
    """A receipt whose connection ended before the confirm is of unknown outcome, which the stream settles."""
    with Proxy.to(place.amqp) as proxy, running(proxy.url(place.amqp), **recorded) as (connection, on_thread):
        channel = open_channel(connection, on_thread)
        on_thread(relatum.publish, channel, "", place.stream, b"first").wait()
        proxy.mode = "blackhole_replies"
        receipt = on_thread(relatum.publish, channel, "", place.stream, b"second")
        with pytest.raises(errors.PublishOutcomeUnknown):
            receipt.wait(0.1)
        (at,) = receipt.settle()
        proxy.reset()
        with pytest.raises(errors.PublishOutcomeUnknown) as caught:
            receipt.wait()
        assert caught.value.in_stream is None
        assert caught.value.settle() == (at,)
        assert body_at(place, at) == b"second"


def test_a_channel_that_confirms_already_gives_no_receipts(place: Place, recorded: dict[str, Any]) -> None:
    """A channel that confirmed before it was intercepted gives no receipts, and another channel does."""
    with running(place.amqp, **recorded) as (connection, on_thread):
        channel = open_channel(connection, on_thread)
        receipt = on_thread(relatum.publish, channel, "", place.stream, b"0")
        relatum.release(connection)
        assert receipt.settle(90)
        on_thread(channel.basic_publish, "", place.stream, b"between")
        on_thread(relatum.intercept, connection, **recorded)
        with pytest.raises(errors.ConfigurationError, match="intercept the connection first"):
            on_thread(relatum.publish, channel, "", place.stream, b"")
        assert on_thread(relatum.publish, open_channel(connection, on_thread), "", place.stream, b"").wait(90)


def test_connections_share_one_recorder(place: Place, recorded: dict[str, Any], earlier: Threads) -> None:
    """Connections of one process to the same servers share one recorder, which ends with the last of them."""
    connections = [BlockingConnection(pika.URLParameters(place.amqp)) for _ in range(2)]
    for connection in connections:
        relatum.intercept(connection, **recorded)
    assert sum(thread.name == "relatum-recorder" for thread in earlier.begun()) == 1
    relatum.release(connections[0])
    assert relatum.publish(connections[1].channel(), "", place.stream, b"").wait()
    relatum.release(connections[1])
    for connection in connections:
        connection.close()

    wait_until(
        lambda: not [thread for thread in earlier.begun() if thread.name.startswith("relatum-")],
        what="the end of threads that wait for servers",
    )


def test_a_lost_connection_does_not_keep_the_recorder(place: Place, recorded: dict[str, Any], earlier: Threads) -> None:
    """An application that lost its connection releases only the next one: that ends the recorder they shared."""
    lost, following = (BlockingConnection(pika.URLParameters(place.amqp)) for _ in range(2))
    for connection in (lost, following):
        relatum.intercept(connection, **recorded)
    # A connection that has published nothing is lost as well.
    relatum.publish(following.channel(), "", place.stream, b"")
    lost.close()
    relatum.release(following)
    following.close()
    wait_until(lambda: "relatum-recorder" not in [each.name for each in earlier.begun()], what="the recorder's end")
    assert place.recorded_to() == 1


def test_a_connection_may_be_dropped_while_a_lock_is_held(place: Place) -> None:
    """The garbage collector may take a connection that was not released while a lock is held."""
    program = """
import gc, sys
import pika, relatum
from relatum import metrics

amqp_url, database_url, stream = sys.argv[1:]
connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
relatum.intercept(connection, database=database_url)
relatum.publish(connection.channel(), "", stream, b"").wait()
connection.close()
with metrics._registry._lock:
    del connection
    gc.collect()
print("dropped")
"""
    dropped = run_python("-c", program, place.amqp, place.database, place.stream)
    assert (dropped.stdout, dropped.stderr) == ("dropped\n", "")


async def test_an_awaited_receipt_says_what_it_needs(place: Place) -> None:
    """Without confirms, an intercepted channel or the asyncio function, nothing is sent and the error says why."""
    async with await aio_pika.connect(place.amqp) as connection:
        relatum.intercept(connection, database=place.database, recorder="external")
        channel = await connection.channel(publisher_confirms=False)
        with pytest.raises(errors.ConfigurationError, match="confirms"):
            await relatum.publish_async(channel, aio_pika.Message(b""), place.stream)
        with pytest.raises(errors.ConfigurationError, match="intercepted aio-pika"):
            await relatum.publish_async(connection, aio_pika.Message(b""), place.stream)  # type: ignore[arg-type]
        with pytest.raises(errors.ConfigurationError, match="await relatum"):
            relatum.publish(channel, "", place.stream, "")  # type: ignore[arg-type]
    assert all_plain(place.amqp, place.stream) == []


async def test_an_awaited_receipt_does_not_wait_for_a_lost_connection(place: Place, recorded: dict[str, Any]) -> None:
    """While a robust connection is lost, a publish with a receipt raises aio-pika's error at once, as others do."""
    with Proxy.to(place.amqp) as proxy:
        async with await aio_pika.connect_robust(proxy.url(place.amqp), reconnect_interval=0.1) as connection:
            relatum.intercept(connection, **recorded)
            channel = await connection.channel()
            await relatum.publish_async(channel, aio_pika.Message(b""), place.stream)
            proxy.accepts = False
            proxy.cut()
            await asyncio.to_thread(wait_until, lambda: channel.is_closed, what="the channel's end")
            with pytest.raises(aio_pika.exceptions.ChannelInvalidStateError):
                await asyncio.wait_for(relatum.publish_async(channel, aio_pika.Message(b""), place.stream), 15)
            proxy.accepts = True
            await connection.ready()
            await asyncio.to_thread(relatum.release, connection)


def test_what_a_receipt_needs_is_missed_before_the_message_is_sent(place: Place) -> None:
    """Without credentials to read streams with, a publish with a receipt is refused and nothing is sent."""
    parameters = pika.URLParameters(place.amqp)
    user, password = parameters.credentials.username, parameters.credentials.password
    parameters.credentials = pika.PlainCredentials(user, password, erase_on_connect=True)
    with BlockingConnection(parameters) as connection:
        relatum.intercept(connection, database=place.database, recorder="external")
        with pytest.raises(errors.ConfigurationError, match="erase_on_connect"):
            relatum.publish(connection.channel(), "", place.stream, b"")
    assert all_plain(place.amqp, place.stream) == []
