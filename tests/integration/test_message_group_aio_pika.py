"""Groups of messages published through aio-pika, and what is refused before anything is sent."""

import asyncio
from typing import Any

import aio_pika
import pytest

import relatum
from relatum.errors import (
    ConfigurationError,
    GroupConflict,
    IncompleteGroup,
    InvalidGroup,
    InvalidRelationshipKey,
    PublishNacked,
    PublishOutcomeUnknown,
    PublishUnroutable,
)
from relatum.membership import Membership, assess, membership
from relatum.reading import Message, StreamReader
from tests.support import in_a_loop, unique_name
from tests.support.proxy import Proxy

CONNECT = [aio_pika.connect, aio_pika.connect_robust]

ID = "fedcba9876543210" * 3


def read(stream_url: str, stream: str) -> list[Message]:
    """All messages of a stream."""
    with StreamReader.open(stream_url) as reader:
        return list(reader.iterate(stream))


def places(stream_url: str, stream: str) -> list[tuple[int, bool]]:
    """The numbers and flags of all messages of a stream, which are of one group."""
    found = [membership(message.headers) for message in read(stream_url, stream)]
    assert len({place.group_id for place in found if place}) <= 1
    return [(place.sequence, place.last) for place in found if place]


def message(body: bytes = b"", **headers: Any) -> aio_pika.Message:
    """A message with these headers."""
    return aio_pika.Message(body, headers=headers)


@pytest.mark.parametrize("connect", CONNECT)
def test_a_group_gets_its_id_and_numbers(amqp_url: str, stream_url: str, stream_name: str, connect: Any) -> None:
    """Each message carries the id, its number and the flag; the caller's message stays as it is."""

    async def scenario() -> str:
        async with await connect(amqp_url) as connection:
            relatum.intercept(connection)
            channel = await connection.channel()
            given = aio_pika.Message(b"two", headers={"order_id": "1", "group_id": "other"}, type="line")
            async with relatum.AsyncMessageGroup(channel, stream_name) as group:
                await group.put(message(b"one"))
                await group.put(given)
                await group.put(message(b"three"), last=True)
            assert group.is_complete
            assert given.headers == {"order_id": "1", "group_id": "other"}
            return group.group_id

    group_id = in_a_loop(scenario())
    messages = read(stream_url, stream_name)
    assert [one.body for one in messages] == [b"one", b"two", b"three"]
    assert [membership(one.headers) for one in messages] == [
        Membership(group_id, 1, False),
        Membership(group_id, 2, False),
        Membership(group_id, 3, True),
    ]
    assert messages[1].headers["order_id"] == "1"
    assert messages[1].properties.type == "line"


async def test_each_put_may_name_its_own_place(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """An exchange and a routing key for one message."""
    async with await aio_pika.connect(amqp_url) as connection:
        relatum.intercept(connection)
        channel = await connection.channel()
        queue = await channel.declare_queue(unique_name(), exclusive=True)
        exchange = await channel.declare_exchange(unique_name(), "direct", auto_delete=True)
        await queue.bind(exchange, "elsewhere")
        async with relatum.AsyncMessageGroup(channel, stream_name) as group:
            await group.put(message())
            await group.put(message(), exchange=exchange, routing_key="elsewhere")
            await group.put(message(), last=True, exchange=exchange, routing_key="elsewhere")
        assert group.is_complete
        got = [await queue.get(no_ack=True, timeout=90) for _ in range(2)]
        assert [(one.headers["group_sequence"], one.headers["group_last"]) for one in got] == [
            (2, False),
            (3, True),
        ]
    assert places(stream_url, stream_name) == [(1, False)]


async def test_puts_at_the_same_time_have_numbers_of_their_own(
    amqp_url: str, stream_url: str, stream_name: str
) -> None:
    """Confirms need not be awaited one by one; a put that failed among others leaves a gap that the next one fills."""
    async with await aio_pika.connect(amqp_url) as connection:
        relatum.intercept(connection)
        channel = await connection.channel()
        async with relatum.AsyncMessageGroup(channel, stream_name) as group:
            lost = unique_name()
            results = await asyncio.gather(
                *(group.put(message(), routing_key=lost if number == 30 else None) for number in range(100)),
                return_exceptions=True,
            )
            assert [number for number, result in enumerate(results) if isinstance(result, BaseException)] == [30]
            assert group.next_sequence == 31
            await group.put(message(), last=True)
            assert not group.is_complete
            with pytest.raises(InvalidGroup):
                await group.put(message(), last=True)
            await group.put(message())
    found = places(stream_url, stream_name)
    assert sorted(found) == [(number, number == 101) for number in range(1, 102)]
    assert found[-1] == (31, False)


def test_the_end_of_a_group(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """Left without a last message: an error; after an exception of the caller's: that one; after the end: refused."""

    async def scenario() -> None:
        async with await aio_pika.connect(amqp_url) as connection:
            relatum.intercept(connection)
            channel = await connection.channel()
            group = relatum.AsyncMessageGroup(channel, stream_name)
            await group.put(message())
            with pytest.raises(IncompleteGroup) as caught:
                async with group:
                    pass
            assert (caught.value.group_id, caught.value.missing, caught.value.last_sequence) == (
                group.group_id,
                (),
                None,
            )
            with pytest.raises(InvalidGroup):
                await group.put(message())
            async with relatum.AsyncMessageGroup(channel, stream_name) as nothing:
                pass
            assert not nothing.is_complete
            again = relatum.AsyncMessageGroup(channel, stream_name, group_id=group.group_id, start=2)
            with pytest.raises(ZeroDivisionError):
                async with again:
                    await group_fails(again)
            again = relatum.AsyncMessageGroup(channel, stream_name)
            again.resume(assess(group.group_id, [Membership(group.group_id, 1), Membership(group.group_id, 2)]))
            await again.put(message(), last=True)
            await again.close()

    async def group_fails(group: relatum.AsyncMessageGroup) -> None:
        await group.put(message())
        raise ZeroDivisionError

    in_a_loop(scenario())
    assert places(stream_url, stream_name) == [(1, False), (2, False), (3, True)]


@pytest.mark.parametrize("on_return_raises", [False, True])
async def test_a_put_that_failed_leaves_no_gap(
    amqp_url: str, stream_url: str, stream_name: str, on_return_raises: bool
) -> None:
    """Invalid, unroutable, nacked, to a wrong place: the message is nowhere, so the next one gets its number."""
    async with await aio_pika.connect(amqp_url) as connection:
        relatum.intercept(connection, keys=["order_id"])
        channel = await connection.channel(on_return_raises=on_return_raises)
        full = await channel.declare_queue(
            unique_name(), exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        for _ in range(10):
            await asyncio.gather(channel.default_exchange.publish(message(), full.name), return_exceptions=True)
        async with relatum.AsyncMessageGroup(channel, stream_name) as group:
            await group.put(message())
            with pytest.raises(InvalidRelationshipKey):
                await group.put(message(order_id=1.5))
            with pytest.raises(PublishUnroutable) as unroutable:
                await group.put(message(), routing_key=unique_name())
            assert unroutable.value.in_stream is False
            with pytest.raises(PublishNacked):
                await group.put(message(), last=True, routing_key=full.name)
            with pytest.raises(TypeError):
                await group.put(message(), nonsense=1)
            assert (group.next_sequence, group.last_sequence) == (2, None)
            await group.put(message(), last=True)
    assert places(stream_url, stream_name) == [(1, False), (2, True)]


async def test_an_unknown_outcome_keeps_the_number(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """No confirm in time, or a cancellation: the message may be there, and the next one has a number of its own."""
    with Proxy.to(amqp_url) as proxy:
        connection = await aio_pika.connect(proxy.url(amqp_url))
        relatum.intercept(connection, broker_url=amqp_url, stream_url=stream_url)
        group = relatum.AsyncMessageGroup(await connection.channel(), stream_name)
        await group.put(message())
        proxy.mode = "blackhole_replies"
        with pytest.raises(PublishOutcomeUnknown) as caught:
            await group.put(message(), timeout=0.2)
        assert [place.stream for place in await caught.value.settle(90)] == [stream_name]
        task = asyncio.create_task(group.put(message()))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await task
        assert task.cancelled()
        assert group.next_sequence == 4
        with pytest.raises(PublishOutcomeUnknown):
            await group.put(message(), last=True, timeout=0.2)
        assert group.is_complete
        proxy.mode = "pass"
        proxy.reset()
        await asyncio.gather(connection.close(), return_exceptions=True)
    assert places(stream_url, stream_name) == [(1, False), (2, False), (3, False), (4, True)]


async def test_bad_headers_of_a_group_are_not_sent(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """What contradicts itself does not leave the process; a missing flag is added; the channel stays usable."""
    refused: list[tuple[dict[str, Any], str]] = [
        ({"group_id": ID}, "group_sequence_missing"),
        ({"group_sequence": 1}, "group_id_missing"),
        ({"group_last": True}, "group_id_missing"),
        ({"group_id": ID[1:], "group_sequence": 1}, "group_id_not_48_hex_digits"),
        ({"group_id": ID, "group_sequence": 0}, "group_sequence_out_of_range"),
        ({"group_id": ID, "group_sequence": 1_000_000_000}, "group_sequence_out_of_range"),
        ({"group_id": ID, "group_sequence": True}, "group_sequence_not_an_integer"),
        ({"group_id": ID, "group_sequence": 1, "group_last": 0}, "group_last_not_a_boolean"),
    ]
    async with await aio_pika.connect(amqp_url) as connection:
        relatum.intercept(connection, keys=[relatum.GROUP_KEY])
        channel = await connection.channel()
        for headers, reason in refused:
            with pytest.raises(InvalidGroup) as caught:
                await channel.default_exchange.publish(message(**headers), stream_name)
            assert caught.value.reason == reason
        sent = message(group_id=ID, group_sequence=1)
        await channel.default_exchange.publish(sent, stream_name)
        assert "group_last" not in sent.headers
    assert places(stream_url, stream_name) == [(1, False)]
    assert len(read(stream_url, stream_name)) == 1


async def test_what_cannot_be_a_group_is_refused(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """Wrong options, a connection that is not intercepted, a group past mending: errors, and nothing is sent."""
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        with pytest.raises(ConfigurationError, match="intercept"):
            relatum.AsyncMessageGroup(channel, stream_name)
        relatum.intercept(connection)
        with pytest.raises(InvalidGroup) as caught:
            relatum.AsyncMessageGroup(channel, stream_name, start=2)
        assert caught.value.reason == "option_invalid"
        group = relatum.AsyncMessageGroup(channel, stream_name)
        with pytest.raises(GroupConflict):
            group.resume(assess(ID, [Membership(ID, 1, True), Membership(ID, 2, True)]))
        relatum.release(connection)
        with pytest.raises(ConfigurationError, match="intercept"):
            await group.put(message())
    assert read(stream_url, stream_name) == []
