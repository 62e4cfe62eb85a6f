"""Groups of messages published through pika, and what is refused before anything is sent."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pika
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

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
from relatum.membership import GROUP_KEY, Anomaly, GroupPosition, Membership, assess, membership, parse_value
from relatum.reading import Message, StreamReader, TimeSource
from tests.support import (
    broker_connection,
    recording,
    rows_of,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.callbacks import open_channel, running
from tests.support.proxy import Proxy

ID = "0123456789abcdef" * 3

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"group_id": ID}, "group_sequence_missing"),
    ({"group_id": ID, "group_last": True}, "group_sequence_missing"),
    ({"group_sequence": 1}, "group_id_missing"),
    ({"group_last": True}, "group_id_missing"),
    ({"group_id": ID[2:], "group_sequence": 1}, "group_id_not_48_hex_digits"),
    ({"group_id": ID + "00", "group_sequence": 1}, "group_id_not_48_hex_digits"),
    ({"group_id": ID.upper(), "group_sequence": 1}, "group_id_not_48_hex_digits"),
    ({"group_id": bytes.fromhex(ID), "group_sequence": 1}, "group_id_not_48_hex_digits"),
    ({"group_id": ID, "group_sequence": 0}, "group_sequence_out_of_range"),
    ({"group_id": ID, "group_sequence": 1_000_000_000}, "group_sequence_out_of_range"),
    ({"group_id": ID, "group_sequence": "1"}, "group_sequence_not_an_integer"),
    ({"group_id": ID, "group_sequence": True}, "group_sequence_not_an_integer"),
    ({"group_id": ID, "group_sequence": 1, "group_last": "yes"}, "group_last_not_a_boolean"),
]


@pytest.fixture
def connection(amqp_url: str) -> Iterator[BlockingConnection]:
    """An intercepted connection."""
    with broker_connection(amqp_url) as connection:
        yield relatum.intercept(connection, keys=["order_id", relatum.GROUP_KEY])


@pytest.fixture
def channel(connection: BlockingConnection) -> BlockingChannel:
    """A channel with confirms: what it has published is in the stream."""
    channel = connection.channel()
    channel.confirm_delivery()
    return channel


def read(stream_url: str, *streams: str) -> list[Message]:
    """All messages of some streams."""
    with StreamReader.open(stream_url) as reader:
        return [message for stream in streams for message in reader.iterate(stream)]


def places(stream_url: str, *streams: str) -> list[tuple[int, bool]]:
    """The numbers and flags of all messages of some streams, which are of one group."""
    found = [membership(message.headers) for message in read(stream_url, *streams)]
    assert len({place.group_id for place in found if place}) <= 1
    return [(place.sequence, place.last) for place in found if place]


def position_of(stream_url: str, group_id: str, *streams: str) -> GroupPosition:
    """How far a group has come, by reading all of the streams."""
    found = [membership(message.headers) for message in read(stream_url, *streams)]
    return assess(group_id, [place for place in found if place])


def put_each(group: relatum.MessageGroup, bodies: Iterable[bytes]) -> None:
    """Put messages, none of which is the last."""
    for body in bodies:
        group.put(body)


def channel_through(proxy: Proxy, amqp_url: str, stream_url: str) -> BlockingChannel:
    """A channel with confirms through a proxy."""
    connection = BlockingConnection(pika.URLParameters(proxy.url(amqp_url)))
    relatum.intercept(connection, broker_url=amqp_url, stream_url=stream_url)
    channel = connection.channel()
    channel.confirm_delivery()
    return channel


# --- logical order ---------------------------------------------------------------------------------------------


def test_a_group_gets_its_id_and_numbers(channel: BlockingChannel, stream_url: str, stream_name: str) -> None:
    """Each message carries the id, its number and the flag; its body and all else are the caller's."""
    properties = pika.BasicProperties(headers={"order_id": "1"}, type="line", message_id="mine")
    before = copy.deepcopy(properties)
    with relatum.MessageGroup(channel, "", stream_name) as group:
        assert group.put(b"one") is None
        group.put("two", properties)
        group.put(b"three", pika.BasicProperties(), last=True)
    assert group.is_complete
    assert group.last_sequence == 3
    messages = read(stream_url, stream_name)
    assert [message.body for message in messages] == [b"one", b"two", b"three"]
    assert [membership(message.headers) for message in messages] == [
        Membership(group.group_id, 1, False),
        Membership(group.group_id, 2, False),
        Membership(group.group_id, 3, True),
    ]
    assert properties == before
    assert messages[1].headers["order_id"] == "1"
    assert (messages[1].properties.type, messages[1].properties.message_id) == ("line", "mine")
    sources = [message.time_source for message in messages]
    assert sources == [TimeSource.MESSAGE_ID, TimeSource.HEADER, TimeSource.MESSAGE_ID]


def test_a_group_may_lie_in_several_streams(
    channel: BlockingChannel, stream_url: str, stream_name: str, other_stream: str
) -> None:
    """Each put may name its own exchange and routing key; the numbers go on across them."""
    exchange = unique_name()
    channel.exchange_declare(exchange, "direct", auto_delete=True)
    channel.queue_bind(other_stream, exchange, "elsewhere")
    with relatum.MessageGroup(channel, "", stream_name) as group:
        group.put(b"")
        group.put(b"", exchange=exchange, routing_key="elsewhere")
        group.put(b"", routing_key=other_stream)
        group.put(b"", last=True)
    assert places(stream_url, stream_name) == [(1, False), (4, True)]
    assert places(stream_url, other_stream) == [(2, False), (3, False)]
    assert position_of(stream_url, group.group_id, stream_name, other_stream).is_complete


def test_every_group_has_an_id_of_its_own(channel: BlockingChannel, stream_url: str, stream_name: str) -> None:
    """Groups published at the same time over one channel do not mix."""
    with (
        relatum.MessageGroup(channel, "", stream_name) as one,
        relatum.MessageGroup(channel, "", stream_name) as other,
    ):
        for last in (False, False, True):
            one.put(b"", last=last)
            other.put(b"", last=last)
    assert one.group_id != other.group_id
    for group in (one, other):
        position = position_of(stream_url, group.group_id, stream_name)
        assert position.is_complete
        assert position.seen == 3


def test_headers_of_another_group_are_replaced(channel: BlockingChannel, stream_url: str, stream_name: str) -> None:
    """A message that is passed on with its old headers becomes one of the new group."""
    old = pika.BasicProperties(headers={**Membership(ID, 7, True).headers, "kept": "yes"})
    with relatum.MessageGroup(channel, "", stream_name) as group:
        group.put(b"", old, last=True)
    (message,) = read(stream_url, stream_name)
    assert membership(message.headers) == Membership(group.group_id, 1, True)
    assert message.headers["kept"] == "yes"


def test_the_table_holds_a_group_as_one_range(
    amqp_url: str, stream_name: str, database_url: str, engine: sa.Engine
) -> None:
    """With the group's key on the connection, each message is a row that tells its place."""
    with (
        recording(amqp_url, engine, stream_name, keys=[GROUP_KEY]),
        broker_connection(amqp_url) as connection,
    ):
        relatum.intercept(connection, database=database_url, keys=[relatum.GROUP_KEY], recorder="external")
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", stream_name, b"in no group")
        with relatum.MessageGroup(channel, "", stream_name) as group:
            group.put(b"")
            group.put(b"", last=True)
        wait_recorded(amqp_url, engine, stream_name)
    rows = rows_of(engine, stream_name)
    assert [(key, parse_value(value), offset) for key, value, offset in rows] == [
        ("message_group", Membership(group.group_id, 1, False), 1),
        ("message_group", Membership(group.group_id, 2, True), 2),
    ]


def test_a_group_can_do_without_confirms(connection: BlockingConnection, stream_url: str, stream_name: str) -> None:
    """On a channel without confirms the numbers are those of the messages sent."""
    channel = connection.channel()
    with relatum.MessageGroup(channel, "", stream_name) as group:
        for _ in range(50):
            group.put(b"")
        group.put(b"", last=True)
    channel.queue_declare(stream_name, passive=True)  # answered after the messages are in the stream
    assert position_of(stream_url, group.group_id, stream_name).is_complete


# --- the end of a group ----------------------------------------------------------------------------------------


def test_leaving_without_a_last_message_is_an_error(
    channel: BlockingChannel, stream_url: str, stream_name: str
) -> None:
    """MQRC_INCOMPLETE_GROUP: the error names the group; what was put stays, and nothing is added."""
    group = relatum.MessageGroup(channel, "", stream_name)
    with pytest.raises(IncompleteGroup) as caught, group:
        put_each(group, [b"", b""])
    assert (caught.value.group_id, caught.value.missing, caught.value.last_sequence) == (group.group_id, (), None)
    assert places(stream_url, stream_name) == [(1, False), (2, False)]


def test_nothing_put_is_no_group(connection: BlockingConnection, channel: BlockingChannel, stream_name: str) -> None:
    """A block in which nothing was put ends without an error and without a message."""
    frames = connection._impl.frames_sent
    with relatum.MessageGroup(channel, "", stream_name):
        pass
    assert connection._impl.frames_sent == frames


def test_an_error_in_the_block_goes_through(channel: BlockingChannel, stream_url: str, stream_name: str) -> None:
    """The group is left as it is; the exception is the caller's own."""
    group = relatum.MessageGroup(channel, "", stream_name)
    with pytest.raises(ZeroDivisionError), group:
        put_each(group, (b"%d" % (1 / number) for number in (1, 0)))
    assert places(stream_url, stream_name) == [(1, False)]
    with pytest.raises(InvalidGroup) as caught:
        group.put(b"")
    assert caught.value.reason == "group_has_ended"


def test_nothing_comes_after_the_last_message(
    connection: BlockingConnection, channel: BlockingChannel, stream_url: str, stream_name: str
) -> None:
    """Neither another message nor a second last one is sent."""
    with relatum.MessageGroup(channel, "", stream_name) as group:
        group.put(b"", last=True)
        frames = connection._impl.frames_sent
        for last in (False, True):
            with pytest.raises(InvalidGroup) as caught:
                group.put(b"", last=last)
            assert caught.value.reason == "group_has_ended"
        assert connection._impl.frames_sent == frames
    assert places(stream_url, stream_name) == [(1, True)]


def test_a_group_is_closed_without_a_block(channel: BlockingChannel, stream_url: str, stream_name: str) -> None:
    """`close` does what leaving the block does."""
    group = relatum.MessageGroup(channel, "", stream_name)
    group.put(b"")
    with pytest.raises(IncompleteGroup):
        group.close()
    with pytest.raises(InvalidGroup):
        group.put(b"")
    assert places(stream_url, stream_name) == [(1, False)]


# --- puts that fail --------------------------------------------------------------------------------------------


def test_a_put_that_failed_leaves_no_gap(channel: BlockingChannel, stream_url: str, stream_name: str) -> None:
    """Invalid, unroutable, nacked: the message is nowhere, so the next one gets its number."""
    full = unique_name()
    channel.queue_declare(full, exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    with suppress(pika.exceptions.NackError):
        for _ in range(10):
            channel.basic_publish("", full, b"")
    with relatum.MessageGroup(channel, "", stream_name) as group:
        group.put(b"")
        with pytest.raises(InvalidRelationshipKey):
            group.put(b"", pika.BasicProperties(headers={"order_id": 1.5}))
        with pytest.raises(PublishUnroutable):
            group.put(b"", routing_key=unique_name())
        with pytest.raises(PublishNacked):
            group.put(b"", routing_key=full)
        with pytest.raises(pika.exceptions.UnroutableError):
            group.put(b"", last=True, routing_key=unique_name())
        with pytest.raises(TypeError):
            group.put(b"", nonsense=1)
        assert (group.next_sequence, group.last_sequence, group.is_complete) == (2, None, False)
        group.put(b"")
        group.put(b"", last=True)
    assert places(stream_url, stream_name) == [(1, False), (2, False), (3, True)]


def test_an_unknown_outcome_keeps_the_number(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """The confirm is lost: the error goes through and the number stays taken; the group is gone on with after it."""
    with Proxy.to(amqp_url) as proxy:
        channel = channel_through(proxy, amqp_url, stream_url)
        group = relatum.MessageGroup(channel, "", stream_name)
        group.put(b"")
        proxy.mode = "blackhole_replies"
        channel.connection._impl.ioloop.call_later(0.2, proxy.reset)
        with pytest.raises(PublishOutcomeUnknown), group:
            group.put(b"")
    assert group.next_sequence == 3
    with broker_connection(amqp_url) as connection:
        relatum.intercept(connection)
        again = connection.channel()
        again.confirm_delivery()
        position = wait_until(
            lambda: (found := position_of(stream_url, group.group_id, stream_name)).seen == 2 and found,
            what="the message whose confirm was lost",
        )
        assert position
        with relatum.MessageGroup(
            again, "", stream_name, group_id=group.group_id, start=position.next_sequence
        ) as continued:
            continued.put(b"", last=True)
    assert places(stream_url, stream_name) == [(1, False), (2, False), (3, True)]


def test_a_message_that_got_lost_is_put_again(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """The message did not arrive: going on from the group's position gives its number to the next one."""
    with Proxy.to(amqp_url) as proxy:
        channel = channel_through(proxy, amqp_url, stream_url)
        group = relatum.MessageGroup(channel, "", stream_name)
        group.put(b"")
        proxy.mode = "blackhole"
        channel.connection._impl.ioloop.call_later(0.2, proxy.reset)
        with pytest.raises(PublishOutcomeUnknown), group:
            group.put(b"", last=True)
    with broker_connection(amqp_url) as connection:
        relatum.intercept(connection)
        again = connection.channel()
        again.confirm_delivery()
        with relatum.MessageGroup(again, "", stream_name) as continued:
            continued.resume(position_of(stream_url, group.group_id, stream_name))
            assert (continued.group_id, continued.next_sequence) == (group.group_id, 2)
            continued.put(b"")
            continued.put(b"", last=True)
    assert places(stream_url, stream_name) == [(1, False), (2, False), (3, True)]


# --- physical order --------------------------------------------------------------------------------------------


def test_several_processes_make_one_group(
    amqp_url: str, channel: BlockingChannel, stream_url: str, stream_name: str
) -> None:
    """In physical order the application gives id, number and flag itself, in any order; a missing flag is added."""
    group_id = relatum.new_group_id()
    with broker_connection(amqp_url) as second:
        relatum.intercept(second)
        other = second.channel()
        other.confirm_delivery()
        for number, last in ((5, True), (2, False), (4, False)):
            headers = Membership(group_id, number, last).headers
            other.basic_publish("", stream_name, b"", pika.BasicProperties(headers=headers))
        channel.basic_publish(
            "", stream_name, b"", pika.BasicProperties(headers={"group_id": group_id, "group_sequence": 1})
        )
    position = position_of(stream_url, group_id, stream_name)
    assert (position.contiguous, position.missing, position.last_sequence) == (2, ((3, 3),), 5)
    group = relatum.MessageGroup(channel, "", stream_name)
    group.resume(position)
    group.put(b"")
    group.close()
    assert places(stream_url, stream_name) == [(5, True), (2, False), (4, False), (1, False), (3, False)]
    assert position_of(stream_url, group_id, stream_name).is_complete


def test_what_comes_back_is_as_it_was_sent(channel: BlockingChannel) -> None:
    """An unroutable message is given back with the flag and the id that were added to it."""
    given = pika.BasicProperties(headers={"group_id": ID, "group_sequence": 1})
    with pytest.raises(pika.exceptions.UnroutableError) as caught:
        channel.basic_publish("", unique_name(), b"", given, mandatory=True)
    returned = caught.value.messages[0].properties
    assert returned.headers == {**given.headers, "group_last": False}
    assert returned.message_id


@pytest.mark.parametrize(("headers", "reason"), REFUSED)
def test_bad_headers_of_a_group_are_not_sent(
    connection: BlockingConnection,
    channel: BlockingChannel,
    stream_url: str,
    stream_name: str,
    headers: dict[str, Any],
    reason: str,
) -> None:
    """One of id and number alone, and what cannot be an id, a number or a flag, do not leave the process."""
    frames = connection._impl.frames_sent
    with pytest.raises(InvalidGroup) as caught:
        channel.basic_publish("", stream_name, b"", pika.BasicProperties(headers=headers))
    assert caught.value.reason == reason
    assert connection._impl.frames_sent == frames
    channel.basic_publish("", stream_name, b"after it")
    assert [message.body for message in read(stream_url, stream_name)] == [b"after it"]


def test_a_receipt_is_not_given_for_a_bad_place(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """Publishing with a receipt refuses the same headers."""
    with broker_connection(amqp_url) as connection:
        relatum.intercept(connection, database=database_url, keys=[relatum.GROUP_KEY], recorder="external")
        channel = connection.channel()
        with pytest.raises(InvalidGroup):
            relatum.publish(channel, "", stream_name, b"", pika.BasicProperties(headers={"group_id": ID}))
        relatum.publish(
            channel, "", stream_name, b"", pika.BasicProperties(headers=Membership(ID, 999_999_999, True).headers)
        )
    assert places(stream_url, stream_name) == [(999_999_999, True)]


def test_bad_headers_can_be_let_through(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """With on_invalid="skip" the message goes out as it is."""
    with broker_connection(amqp_url) as connection:
        relatum.intercept(connection, keys=[relatum.GROUP_KEY], on_invalid="skip")
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", stream_name, b"", pika.BasicProperties(headers={"group_id": "customers"}))
    (message,) = read(stream_url, stream_name)
    assert message.headers["group_id"] == "customers"
    assert membership(message.headers) is None


# --- what is refused before anything is put --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"start": 2}, "option_invalid"),
        ({"group_id": ID[1:]}, "group_id_not_48_hex_digits"),
        ({"group_id": ID, "start": 0}, "group_sequence_out_of_range"),
        ({"group_id": ID, "start": 1_000_000_000}, "group_sequence_out_of_range"),
        ({"group_id": ID, "start": "1"}, "group_sequence_not_an_integer"),
    ],
)
def test_wrong_options_are_refused(channel: BlockingChannel, options: dict[str, Any], reason: str) -> None:
    """What cannot be an option is an error before there is a group."""
    with pytest.raises(InvalidGroup) as caught:
        relatum.MessageGroup(channel, "", "anywhere", **options)
    assert caught.value.reason == reason


def test_a_group_has_a_place_and_goes_on_from_a_position(channel: BlockingChannel) -> None:
    """Neither may be left out; the error names it."""
    with pytest.raises(InvalidGroup, match="routing_key"):
        relatum.MessageGroup(channel, "", None)  # type: ignore[arg-type]
    with pytest.raises(InvalidGroup, match="position"):
        relatum.MessageGroup(channel, "", "anywhere").resume(None)  # type: ignore[arg-type]


def test_a_group_has_at_most_999_999_999_messages(
    connection: BlockingConnection, channel: BlockingChannel, stream_url: str, stream_name: str
) -> None:
    """MQRC_MSG_SEQ_NUMBER_ERROR: the highest number is put, the next one is not sent."""
    group = relatum.MessageGroup(channel, "", stream_name, group_id=ID, start=999_999_999)
    group.put(b"")
    frames = connection._impl.frames_sent
    with pytest.raises(InvalidGroup) as caught:
        group.put(b"", last=True)
    assert caught.value.reason == "group_sequence_out_of_range"
    assert connection._impl.frames_sent == frames
    assert places(stream_url, stream_name) == [(999_999_999, False)]


@pytest.mark.parametrize("anomaly", [Anomaly.TWO_LASTS, Anomaly.PAST_LAST, Anomaly.EXPIRED])
def test_a_broken_group_is_not_gone_on_with(
    connection: BlockingConnection, channel: BlockingChannel, stream_name: str, anomaly: Anomaly
) -> None:
    """Two lasts, a number past the last, a member that retention took: no message makes it whole."""
    members = {
        Anomaly.TWO_LASTS: [Membership(ID, 1, True), Membership(ID, 2, True)],
        Anomaly.PAST_LAST: [Membership(ID, 1, True), Membership(ID, 2, False)],
        Anomaly.EXPIRED: [Membership(ID, 2, True)],
    }[anomaly]
    expired = [Membership(ID, 1, False)] if anomaly is Anomaly.EXPIRED else []
    frames = connection._impl.frames_sent
    group = relatum.MessageGroup(channel, "", stream_name)
    with pytest.raises(GroupConflict) as caught:
        group.resume(assess(ID, members, expired=expired))
    assert caught.value.anomaly == anomaly
    assert connection._impl.frames_sent == frames


def test_a_group_needs_an_intercepted_connection(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """Without the interceptor nobody could tell a message that is nowhere from one that may be there."""
    with broker_connection(amqp_url) as bare:
        channel = bare.channel()
        channel.confirm_delivery()
        with pytest.raises(ConfigurationError, match="intercept"):
            relatum.MessageGroup(channel, "", stream_name)
        relatum.intercept(bare)
        group = relatum.MessageGroup(channel, "", stream_name)
        group.put(b"")
        relatum.release(bare)
        with pytest.raises(ConfigurationError, match="intercept"):
            group.put(b"")
    assert places(stream_url, stream_name) == [(1, False)]


# --- callback connections --------------------------------------------------------------------------------------


def test_a_callback_connection_publishes_groups(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """On the connection's thread a group is put at once, and refused like anywhere else."""
    with running(amqp_url, keys=[relatum.GROUP_KEY]) as (connection, on_thread):
        channel = open_channel(connection, on_thread)

        def publish() -> str:
            with relatum.MessageGroup(channel, "", stream_name) as group:
                for number in range(20):
                    group.put(b"", last=number == 19)
            with pytest.raises(IncompleteGroup), relatum.MessageGroup(channel, "", unique_name()) as incomplete:
                incomplete.put(b"")
            frames = connection.frames_sent
            with pytest.raises(InvalidGroup):
                group.put(b"")
            for headers, _ in REFUSED:
                with pytest.raises(InvalidGroup):
                    channel.basic_publish("", stream_name, b"", pika.BasicProperties(headers=headers))
            assert connection.frames_sent == frames
            return group.group_id

        group_id = on_thread(publish)
        on_thread(relatum.release, connection)
        with broker_connection(amqp_url) as other:
            other.channel().queue_declare(stream_name, passive=True)
    position = position_of(stream_url, group_id, stream_name)
    assert position.is_complete
    assert position.last_sequence == 20
