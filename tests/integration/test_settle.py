"""What `settle` says of a message whose confirm did not come: found, surely nowhere, or not known."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import aio_pika
import pika
import pytest
from pika import BlockingConnection

import relatum
from relatum import Broker, MessageId
from relatum.common.waiting import LEAST_S
from relatum.errors import BrokerUnavailable, PublishOutcomeUnknown
from relatum.local import LocalServers
from relatum.reading import StreamBounds
from tests.support import broker_connection, declare_stream, unique_name, wait_until
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.publishing import lose_confirm
from tests.support.standstill import in_time
from tests.support.threads import beside

AT_ONCE = 200
"""Messages that are settled at once."""

CONNECTIONS_MAX = 16
"""Connections of a reader, as docs/limits.md says."""

LATE_S = 130.0
"""Seconds after which pika notices a silent link with RabbitMQ's default heartbeat of 60."""


def lost(place: Place, to: str | None = None, *, arrives: bool = True, **where: Any) -> tuple[Any, float]:
    """A message whose connection ended before its confirm, and when; it is in the stream by then, if it `arrives`."""
    ended: list[float] = []
    options = {"broker": place.broker} | where
    exchange, stream = options.pop("exchange", ""), to or place.stream
    with Proxy.to(place.amqp) as proxy:
        connection = BlockingConnection(pika.URLParameters(proxy.url(place.amqp)))
        channel = relatum.intercept(connection, **options).channel()
        channel.confirm_delivery()
        channel.basic_publish("", stream, b"first")
        lose_confirm(proxy, place.amqp, stream, arrives=arrives, at_end=lambda: ended.append(time.monotonic()))
        with pytest.raises(PublishOutcomeUnknown) as caught:
            channel.basic_publish(exchange, stream, b"second", pika.BasicProperties(message_id=unique_name()))
    settle: Any = caught.value.settle
    return settle.__self__, ended[0]


def streams_of(places: tuple[MessageId, ...]) -> list[str]:
    return [each.stream for each in places]


def sure(unsettled: Any, **changed: Any) -> Any:
    """The same, when nothing can arrive any more; with other facts of what was sent."""
    return replace(unsettled, sent=replace(unsettled.sent, **changed), final_at=time.monotonic() - 1)


async def test_with_aio_pika_the_search_begins_before_the_send(place: Place) -> None:
    """Also after a time-out of aio-pika the search begins at the moment of the send."""
    with Proxy.to(place.amqp) as proxy:
        connection = await aio_pika.connect(proxy.url(place.amqp))
        relatum.intercept(connection, broker=place.broker)
        channel = await connection.channel()
        await channel.default_exchange.publish(aio_pika.Message(b"first"), place.stream)
        proxy.mode = "blackhole_replies"
        with pytest.raises(PublishOutcomeUnknown) as caught:
            await channel.default_exchange.publish(aio_pika.Message(b"second"), place.stream, timeout=0.5)
        ended = time.monotonic()
        settle: Any = caught.value.settle
        unsettled = settle.__self__
        assert unsettled.sent.monotonic_s <= ended - 0.5
        assert streams_of(await settle()) == [place.stream]
        proxy.mode = "pass"
        await connection.close()


@pytest.mark.parametrize("ahead_s", [0, LATE_S, 3600, -3600])
def test_a_stored_message_is_found_however_wrong_the_clock_is(place: Place, ahead_s: float) -> None:
    """A stored message is found from before its send on, although the client's clock is hours ahead or behind."""
    unsettled, ended = lost(place)
    assert unsettled.sent.monotonic_s < ended
    ahead = unsettled.sent.sent_at + timedelta(seconds=ahead_s)
    assert streams_of(sure(unsettled, sent_at=ahead).settle(90)) == [place.stream]


def test_a_sleep_after_the_send_does_not_hide_the_message(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine sleeps after a send, the monotonic clock stands still, and the search begins before the send."""

    class AfterSleep(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(hours=1)

    monkeypatch.setattr("relatum.publishing._locate.datetime", AfterSleep)
    began = datetime.now(UTC)
    unsettled, _ = lost(place)
    assert began <= unsettled.sent.sent_at <= datetime.now(UTC)


@pytest.mark.parametrize("since_asked", [False, True])
def test_what_retention_has_dropped_is_not_known_to_be_nowhere(
    place: Place, short_stream: str, since_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that retention may have dropped, also during the search, has an unknown outcome: do not repeat it."""
    unsettled, _ = lost(place, short_stream, arrives=False)
    with relatum.reading.StreamReader.open(place.stream_url) as reader:

        def dropped() -> bool:
            place.put(*[b"x" * 20_000] * 50, to=short_stream)
            return bool(reader.bounds(short_stream).first)

        wait_until(dropped)
    long_ago = sure(unsettled, monotonic_s=time.monotonic() - 3600)
    if since_asked:
        bounds = relatum.reading.StreamReader.bounds

        def before(reader: Any, stream: str) -> StreamBounds:
            return StreamBounds(0, bounds(reader, stream).last, is_proven=True)

        monkeypatch.setattr(relatum.reading.StreamReader, "bounds", before)
    with pytest.raises(PublishOutcomeUnknown, match="retention"):
        long_ago.settle(5.0)


@pytest.fixture
def fanout(place: Place) -> Iterator[str]:
    name = unique_name()
    with broker_connection(place.amqp) as connection:
        channel = connection.channel()
        channel.exchange_declare(name, "fanout")
        channel.queue_bind(place.stream, name)
        yield name
        channel.exchange_delete(name)


@pytest.mark.parametrize("by_default_exchange", [True, False])
@pytest.mark.parametrize("is_silent", [False, True])
def test_while_the_broker_is_away_it_is_said_so_in_time(
    place: Place, fanout: str, by_default_exchange: bool, is_silent: bool
) -> None:
    """A broker that refuses or says nothing is `BrokerUnavailable`, whatever the exchange; the time-out is kept."""
    exchange = "" if by_default_exchange else fanout
    with Proxy.to(place.amqp) as amqp, Proxy.to(place.stream_url) as streams:
        broker = Broker(amqp.url(place.amqp), stream_url=streams.url(place.stream_url))
        unsettled, _ = lost(place, exchange=exchange, broker=broker)
        for proxy in (amqp, streams):
            proxy.mode, proxy.accepts = ("blackhole", True) if is_silent else ("pass", False)
            proxy.reset()
        began = time.monotonic()
        with in_time(2.0), pytest.raises(BrokerUnavailable):
            sure(unsettled).settle(2.0)
        assert time.monotonic() - began > 1.9
        for proxy in (amqp, streams):
            proxy.mode, proxy.accepts = "pass", True
        assert streams_of(unsettled.settle()) == [place.stream]


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_many_at_once_share_few_connections(place: Place, face: str) -> None:
    """After an outage hundreds are settled at once: each is found, over a handful of connections to the broker."""
    with Proxy.to(place.stream_url) as line:
        unsettled, _ = lost(place, broker=Broker(place.amqp, stream_url=line.url(place.stream_url)))
        line.most = 0
        found = settle_all(face, unsettled, AT_ONCE, 240)
        assert {at.stream for (at,) in found} == {place.stream}
        assert len(found) == AT_ONCE
        assert 1 <= line.most <= CONNECTIONS_MAX
        assert line.opened <= 2 * CONNECTIONS_MAX


def settle_all(face: str, unsettled: Any, at_once: int, timeout_s: float) -> list[Any]:
    """What settling a message so many times at once gives, or raises, in threads or in tasks."""
    together = threading.Barrier(at_once)

    def settle(_: int) -> Any:
        together.wait(90)
        try:
            return unsettled.settle(timeout_s)
        except BrokerUnavailable as error:
            return error

    async def settle_in_tasks() -> list[Any]:
        # With asyncio's default there are as few threads as the machine has processors, and as few connections.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(at_once))
        settling = [unsettled.settle_async(timeout_s) for _ in range(at_once)]
        return await asyncio.gather(*settling, return_exceptions=True)

    if face == "asyncio":
        return asyncio.run(settle_in_tasks())
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(settle, range(at_once)))


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_many_at_once_end_in_time_where_the_broker_is_silent(place: Place, face: str) -> None:
    """Many settlements at once each end within their own time-out, in threads and in tasks."""
    with Proxy.to(place.amqp) as amqp, Proxy.to(place.stream_url) as streams:
        broker = Broker(amqp.url(place.amqp), stream_url=streams.url(place.stream_url))
        unsettled, _ = lost(place, broker=broker)
        amqp.mode = streams.mode = "frozen"
        with in_time(1.0 + LEAST_S):
            ended = settle_all(face, unsettled, 40, 1.0)
        assert {type(error) for error in ended} == {BrokerUnavailable}


def test_what_is_released_keeps_no_connection(place: Place) -> None:
    """What is settled after the connection was released leaves no connection open."""
    with Proxy.to(place.stream_url) as line:
        unsettled, _ = lost(place, broker=Broker(place.amqp, stream_url=line.url(place.stream_url)))
        unsettled.locator.close()
        for _ in range(2):
            assert streams_of(unsettled.settle()) == [place.stream]
        wait_until(lambda: not line._peers, what="the connections are closed")


@pytest.mark.parametrize("by_default_exchange", [True, False])
def test_a_broker_that_starts_is_waited_for(
    place: Place, private_servers: LocalServers, by_default_exchange: bool
) -> None:
    """Settling waits for a broker that denies its streams, or their bindings, just after its boot."""
    rabbitmq = private_servers.rabbitmq
    stream = unique_name()
    declare_stream(rabbitmq.broker_url, stream)
    there = replace(place, amqp=rabbitmq.broker_url, stream_url=rabbitmq.stream_url, stream=stream)
    if by_default_exchange:
        unsettled, _ = lost(there)
        unsettled.settle(90)
        rabbitmq.kill()
    else:
        with broker_connection(there.amqp) as connection:
            channel = connection.channel()
            channel.exchange_declare(stream, "fanout", durable=True)
            channel.queue_bind(stream, stream)
        unsettled, _ = lost(there, exchange=stream)
        rabbitmq.stop()
    with beside(rabbitmq.start):
        assert streams_of(sure(unsettled).settle(120)) == [stream]
