"""Groups of messages published through each client, and what is refused before anything is sent."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from inspect import isawaitable
from typing import Any, Self

import aio_pika
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

import relatum
from relatum import errors
from relatum.membership import GROUP_KEY, Membership, assess, membership
from relatum.reading import Message
from tests.contract._clients import CLIENTS, CONFIRMING, Line, open_line
from tests.support import broker_connection, unique_name, wait_until
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.publishing import lose_confirm
from tests.support.raising import raising

ID = "0123456789abcdef" * 3


def is_of_asyncio(line: Line) -> bool:
    return isinstance(line.connection, aio_pika.abc.AbstractConnection)


def ended(line: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a function gives, called where the connection is, once it has ended."""

    async def awaited() -> Any:
        result = function(*arguments, **options)
        return await result if isawaitable(result) else result

    return line._run(awaited()) if is_of_asyncio(line) else line._call(function, *arguments, **options)


class Putting:
    """A group of a client's own kind, each call run to its end."""

    def __init__(self, line: Line, to: str, channel: Any = None, **options: Any) -> None:
        self._line, self._channel = line, channel or line.channel()
        self._is_async = is_of_asyncio(line)
        kind: Any = relatum.AsyncMessageGroup if self._is_async else relatum.MessageGroup
        self._group = ended(self._line, kind, self._channel, *([] if self._is_async else [""]), to, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def put(self, message: Any = b"", *, exchange: str | None = None, **options: Any) -> Any:
        made = self._line.message(message) if isinstance(message, bytes) else message
        target: Any = exchange
        if self._is_async and exchange is not None:
            target = ended(self._line, self._channel.get_exchange, exchange, ensure=False)
        return ended(self._line, self._group.put, *([made] if self._is_async else made), exchange=target, **options)

    def put_each(self, bodies: Iterable[bytes]) -> None:
        for body in bodies:
            self.put(body)

    def close(self) -> None:
        ended(self._line, self._group.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        ended(self._line, self._group.__aexit__ if self._is_async else self._group.__exit__, *error)


@pytest.fixture(params=CLIENTS)
def line(request: pytest.FixtureRequest, amqp_url: str) -> Iterator[Line]:
    with open_line(request.param, amqp_url) as line:
        line.intercept(keys=["order_id", GROUP_KEY])
        yield line


def messages(place: Place, count: int, stream: str | None = None) -> list[Message]:
    """All messages of a stream, once there are so many: not each client waits for confirms."""
    wait_until(lambda: place.bounds(stream).last == count - 1, what=f"{count} messages")
    return place.messages(stream)


def members_in(found: Iterable[Message]) -> list[Membership]:
    return [each for each in (membership(message.headers) for message in found) if each]


def numbers(found: Iterable[Message]) -> list[tuple[int, bool]]:
    """The numbers and flags of messages, which are of one group."""
    members = members_in(found)
    assert len({each.group_id for each in members}) <= 1
    return [(each.sequence, each.last) for each in members]


def up_to(last: int) -> list[tuple[int, bool]]:
    """The numbers and flags of a whole group in order."""
    return [(number, number == last) for number in range(1, last + 1)]


def test_a_group_gets_its_id_and_numbers(line: Line, place: Place) -> None:
    """A group's id and numbers replace those of another group, and all else of the caller's message stays."""
    old = Membership(ID, 7, True).headers | {"order_id": "1"}
    given = line.message(b"two", headers=old, message_id="mine", type="line")
    before = line.state(given)
    with Putting(line, place.stream) as group:
        group.put(b"one")
        group.put(given)
        group.put(b"three", last=True)
    assert (group.is_complete, group.last_sequence) == (True, 3)
    assert line.state(given) == before
    found = messages(place, 3)
    assert [message.body for message in found] == [b"one", b"two", b"three"]
    assert members_in(found) == [Membership(group.group_id, number, last) for number, last in up_to(3)]
    assert found[1].headers["order_id"] == "1"
    assert (found[1].properties.type, found[1].properties.message_id) == ("line", "mine")
    assert all(message.time_source for message in found)


def test_groups_may_lie_in_several_streams_beside_one_another(
    line: Line, place: Place, other_stream: str, channel: BlockingChannel
) -> None:
    """Each put may name its own exchange and routing key, and each group's numbers continue across them."""
    exchange = unique_name()
    channel.exchange_declare(exchange, "direct")
    channel.queue_bind(other_stream, exchange, "elsewhere")
    shared = line.channel()
    with Putting(line, place.stream, shared) as group, Putting(line, unique_name(), shared) as beside:
        group.put()
        beside.put(routing_key=place.stream, last=True)
        group.put(exchange=exchange, routing_key="elsewhere")
        group.put(routing_key=other_stream)
        group.put(last=True)
    expected = [(group.group_id, 1, False), (beside.group_id, 1, True), (group.group_id, 4, True)]
    assert members_in(messages(place, 3)) == [Membership(*each) for each in expected]
    assert numbers(messages(place, 2, other_stream)) == [(2, False), (3, False)]
    channel.exchange_delete(exchange)


def test_a_group_can_do_without_confirms(line: Line, place: Place) -> None:
    """Without confirms, messages get the numbers in which they were sent."""
    with Putting(line, place.stream, line.channel(confirms=False)) as group:
        group.put_each([b""] * 50)
        group.put(last=True)
    assert numbers(messages(place, 51)) == up_to(51)


def test_a_group_ends_with_its_last_message(line: Line, place: Place) -> None:
    """Leaving a group before its last message is an error that names it, and a group that has ended refuses puts."""
    group = Putting(line, place.stream)
    with raising(errors.IncompleteGroup, group_id=group.group_id, missing=(), last_sequence=None), group:
        group.put_each([b"", b""])
    raised = Putting(line, place.stream, group_id=group.group_id, start=3)
    with pytest.raises(ZeroDivisionError), raised:
        raised.put_each(b"%d" % (1 / number) for number in (1, 0))
    unfinished = Putting(line, place.stream, group_id=group.group_id, start=4)
    unfinished.put()
    with pytest.raises(errors.IncompleteGroup):
        unfinished.close()
    with Putting(line, place.stream) as nothing:
        pass
    assert not nothing.is_complete
    with Putting(line, place.stream, group_id=group.group_id, start=5) as whole:
        whole.put(last=True)
        ended = (group, raised, unfinished, whole)
        for each, last in [(each, last) for each in ended for last in (False, True)]:
            with raising(errors.InvalidGroup, reason="group_has_ended"):
                each.put(last=last)
    # Each had its own channel, and there is no order across channels.
    assert sorted(numbers(messages(place, 5))) == up_to(5)


@pytest.mark.parametrize("line", CONFIRMING, indirect=True)
def test_a_put_that_failed_leaves_no_gap(line: Line, place: Place, connection: BlockingConnection) -> None:
    """A put that was invalid, unroutable or nacked wrote nothing, so the next message gets its number."""
    full = unique_name()
    channels = [line.channel()]
    if is_of_asyncio(line):
        channels.append(ended(line, line.connection.channel, on_return_raises=False))
    bare = connection.channel()
    bare.queue_declare(full, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}, exclusive=True)
    for _ in range(10):
        bare.basic_publish("", full, b"")
    for channel in channels:
        with Putting(line, place.stream, channel) as group:
            group.put()
            with pytest.raises(errors.InvalidRelationshipKey):
                group.put(line.message(headers={"order_id": 1.5}))
            with raising(errors.PublishUnroutable, in_stream=False):
                group.put(routing_key=unique_name())
            with pytest.raises(errors.PublishNacked):
                group.put(routing_key=full)
            with pytest.raises(errors.PublishUnroutable):
                group.put(last=True, routing_key=unique_name())
            with pytest.raises(TypeError):
                group.put(nonsense=1)
            assert (group.next_sequence, group.last_sequence, group.is_complete) == (2, None, False)
            group.put()
            group.put(last=True)
    found = messages(place, 3 * len(channels))
    assert [numbers(found[first : first + 3]) for first in range(0, len(found), 3)] == [up_to(3)] * len(channels)


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("client", CONFIRMING)
def test_behind_a_lost_confirm_a_group_goes_on_where_it_stands(place: Place, client: str, arrives: bool) -> None:
    """A number whose confirm was lost stays taken until the group's position says whether its message arrived."""
    with Proxy.to(place.amqp) as proxy, open_line(client, proxy.url(place.amqp)) as line:
        line.intercept(broker=place.broker)
        group = Putting(line, place.stream)
        group.put()
        lose_confirm(proxy, place.amqp, place.stream, arrives=arrives)
        with pytest.raises(errors.PublishOutcomeUnknown), group:
            group.put()
        assert group.next_sequence == 3
    with open_line(client, place.amqp) as line:
        line.intercept()
        with Putting(line, place.stream) as continued:
            messages(place, 1 + arrives)
            continued.resume(assess(group.group_id, members_in(place.messages())))
            assert (continued.group_id, continued.next_sequence) == (group.group_id, 2 + arrives)
            continued.put_each([b""] * (2 - arrives))
            continued.put(last=True)
    assert numbers(messages(place, 4)) == up_to(4)


async def test_with_aio_pika_puts_at_the_same_time_have_numbers_of_their_own(place: Place) -> None:
    """Concurrent puts get numbers of their own, and the next put fills the gap of one that failed."""
    async with await aio_pika.connect(place.amqp) as connection:
        relatum.intercept(connection)
        async with relatum.AsyncMessageGroup(await connection.channel(), place.stream) as group:
            lost = unique_name()
            puts = [group.put(aio_pika.Message(b""), routing_key=lost if n == 30 else None) for n in range(100)]
            results = await asyncio.gather(*puts, return_exceptions=True)
            assert [number for number, result in enumerate(results) if isinstance(result, BaseException)] == [30]
            assert group.next_sequence == 31
            await group.put(aio_pika.Message(b""), last=True)
            assert not group.is_complete
            with pytest.raises(errors.InvalidGroup):
                await group.put(aio_pika.Message(b""), last=True)
            await group.put(aio_pika.Message(b""))
    found = numbers(place.messages())
    assert sorted(found) == up_to(101)
    assert found[-1] == (31, False)


async def test_with_aio_pika_a_put_that_is_given_up_keeps_its_number(place: Place) -> None:
    """A put that timed out or was cancelled keeps its number, since its message may have arrived."""
    with Proxy.to(place.amqp) as proxy:
        connection = await aio_pika.connect(proxy.url(place.amqp))
        relatum.intercept(connection, broker=place.broker)
        group = relatum.AsyncMessageGroup(await connection.channel(), place.stream)
        await group.put(aio_pika.Message(b""))
        proxy.mode = "blackhole_replies"
        with pytest.raises(errors.PublishOutcomeUnknown) as caught:
            await group.put(aio_pika.Message(b""), timeout=1.0)
        assert [each.stream for each in await caught.value.settle(90)] == [place.stream]
        task = asyncio.create_task(group.put(aio_pika.Message(b"")))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await task
        assert task.cancelled()
        assert group.next_sequence == 4
        with pytest.raises(errors.PublishOutcomeUnknown):
            await group.put(aio_pika.Message(b""), last=True, timeout=1.0)
        assert group.is_complete
        proxy.mode = "pass"
        proxy.reset()
        await asyncio.gather(connection.close(), return_exceptions=True)
    assert numbers(place.messages()) == up_to(4)


def test_several_processes_make_one_group(place: Place, channel: BlockingChannel) -> None:
    """Processes of one group may give id, number and flag themselves in any order; a missing flag is added."""
    relatum.intercept(channel.connection, keys=[GROUP_KEY])
    group_id = relatum.new_group_id()
    with broker_connection(place.amqp) as second:
        other = relatum.intercept(second).channel()
        for number, last in ((5, True), (2, False), (4, False)):
            headers = Membership(group_id, number, last).headers
            other.basic_publish("", place.stream, b"", pika.BasicProperties(headers=headers))
        messages(place, 3)
        without_flag = pika.BasicProperties(headers={"group_id": group_id, "group_sequence": 1})
        channel.basic_publish("", place.stream, b"", without_flag)
    position = assess(group_id, members_in(place.messages()))
    assert (position.contiguous, position.missing, position.last_sequence) == (2, ((3, 3),), 5)
    group = relatum.MessageGroup(channel, "", place.stream)
    group.resume(position)
    group.put(b"")
    group.close()
    assert numbers(messages(place, 5)) == [(5, True), (2, False), (4, False), (1, False), (3, False)]
    assert assess(group_id, members_in(place.messages())).is_complete


def test_what_cannot_be_a_group_is_refused(line: Line, place: Place) -> None:
    """Wrong options, a missing position, a broken group and a bare connection are refused before any put."""
    channel = line.channel()
    group = Putting(line, place.stream, channel)
    for refuse in (
        lambda: Putting(line, place.stream, channel, start=2),
        lambda: Putting(line, None, channel),  # type: ignore[arg-type]
        lambda: group.resume(None),
    ):
        with raising(errors.InvalidGroup, reason="option_invalid"):
            refuse()
    with pytest.raises(errors.GroupConflict):
        group.resume(assess(ID, [Membership(ID, 1, True), Membership(ID, 2, True)]))
    group.put()
    ended(line, relatum.release, line.connection)
    for refuse in (group.put, lambda: Putting(line, place.stream, channel)):
        with pytest.raises(errors.ConfigurationError, match="intercept"):
            refuse()
    assert numbers(messages(place, 1)) == [(1, False)]
