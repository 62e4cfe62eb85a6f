"""Look-ups by key against real streams and a real database, through both faces."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pika
import psycopg
import pytest
import sqlalchemy as sa

from relatum import MessageId
from relatum.errors import (
    DatabaseUnavailable,
    InvalidInput,
    InvalidRelationshipKey,
    KeyNotDefined,
    NothingRecorded,
    SchemaMissing,
    StreamNotFound,
    StreamReplaced,
)
from relatum.keys import KeyDefinition
from relatum.recording import backfill
from relatum.store import add_keys, remove_key
from relatum_consumer import AsyncRelations, Relations, Status
from tests import support
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    publish_plain,
    recording,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.relations import FACES, open_relations

KEYS = ["order_id", "host"]


def order(number: Any, host: str = "h", time_us: int | None = None) -> tuple[bytes, dict[str, Any]]:
    """A message with two keys, and a time if given."""
    time = {} if time_us is None else {"relatum_time": time_us}
    return b"order", {"order_id": number, "host": host} | time


record = partial(support.record, keys=KEYS)
"""Records all that is in some streams."""


# --- what is found ----------------------------------------------------------------------------------------


def test_all_messages_that_share_a_key_are_found_and_never_the_message_itself(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str
) -> None:
    """The union over keys and streams, each hit with all keys it shares, oldest first."""
    publish_plain(amqp_url, stream_name, [order("a", "x", 50), order("a", "y", 20), order("b", "x", 40)])
    publish_plain(amqp_url, other_stream, [order("a", "x", 10), order("c", "z", 30), order("b", "z", 60)])
    record(amqp_url, engine, stream_name, other_stream)
    message = relations.read(stream_name, 0)
    answer = relations.related(message)
    assert answer.status is Status.FOUND
    assert [(hit.id, hit.keys) for hit in answer.hits] == [
        (MessageId(other_stream, 0), ("order_id", "host")),
        (MessageId(stream_name, 1), ("order_id",)),
        (MessageId(stream_name, 2), ("host",)),
    ]
    assert [message.body for message in answer] == [b"order"] * 3
    assert relations.related(message, to=other_stream).ids == ((other_stream, 0),)
    assert relations.related(message, to=[stream_name], by="host").ids == ((stream_name, 2),)
    assert relations.related(message, by=["host", "order_id"]).hits[0].keys == ("host", "order_id")


def test_each_order_and_limit_gives_the_head_of_the_whole(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str
) -> None:
    """Times out of the order of offsets, some equal: time, then stream, then offset; and exactly that much of it."""
    times = {stream_name: [30, 10, 20, 20, 50], other_stream: [20, 60, 10, 5, 20]}
    for stream, each in times.items():
        publish_plain(amqp_url, stream, [order("a", time_us=time) for time in each])
    record(amqp_url, engine, stream_name, other_stream)
    places = sorted((time, stream, offset) for stream, each in times.items() for offset, time in enumerate(each))
    by_time = tuple((stream, offset) for _, stream, offset in places)
    for limit in (1, 2, 9, 10, 11, None):
        assert relations.find("order_id", "a", limit=limit).ids == by_time[:limit]
        assert relations.find("order_id", "a", limit=limit, order="newest").ids == by_time[::-1][:limit]
        assert relations.find("order_id", "a", limit=limit, order="offset").ids == tuple(sorted(by_time))[:limit]
    message = relations.read(*by_time[0])
    assert relations.related(message, limit=1).ids == by_time[1:2]


def test_a_span_of_time_has_its_beginning_and_not_its_end(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """`since` is in, `until` is out; either may be left out."""
    publish_plain(amqp_url, stream_name, [order("a", time_us=1_000_000 * n) for n in range(6)])
    record(amqp_url, engine, stream_name)
    at = [relations.read(stream_name, n).time for n in range(6)]
    offsets = lambda **span: [place.offset for place in relations.find("order_id", "a", **span).ids]  # noqa: E731
    assert offsets(since=at[1], until=at[4]) == [1, 2, 3]
    assert offsets(since=at[4]) == [4, 5]
    assert offsets(until=at[2], order="newest") == [1, 0]
    assert relations.find("order_id", "a", since=at[2], until=at[2]).status is Status.ABSENT


def test_values_are_compared_in_canonical_form(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """A foreign publisher's number and our text are one value of a text key; true is not 1."""
    publish_plain(amqp_url, stream_name, [order(42), order("42"), order(True), order("true"), order(1), order([1])])
    record(amqp_url, engine, stream_name)
    for value in (42, "42"):
        assert [place.offset for place in relations.find("order_id", value, order="offset").ids] == [0, 1]
    assert [place.offset for place in relations.find("order_id", True, order="offset").ids] == [2, 3]
    assert relations.related(relations.read(stream_name, 0), by="order_id").ids == ((stream_name, 1),)
    assert relations.related(relations.read(stream_name, 5), by="order_id").status is Status.ABSENT


def test_composite_and_property_keys(amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str) -> None:
    """A composite is asked for by a tuple; a property is taken from the properties."""
    keys = [
        KeyDefinition("place", source=["site", "rack"]),
        KeyDefinition("correlation", source="property:correlation_id"),
        KeyDefinition("number", type="integer"),
    ]
    headers = [{"site": "a|b", "rack": 1}, {"site": "a", "rack": "b|1"}, {"site": "a|b", "rack": "1", "number": "007"}]
    publish_plain(
        amqp_url,
        stream_name,
        [(b"", pika.BasicProperties(headers=each, correlation_id=f"c{len(each)}")) for each in headers],
    )
    record(amqp_url, engine, stream_name, keys=keys)
    assert [place.offset for place in relations.find("place", ("a|b", 1)).ids] == [0, 2]
    assert [place.offset for place in relations.find("correlation", "c3").ids] == [2]
    assert [place.offset for place in relations.find("number", 7).ids] == [2]
    assert [hit.keys for hit in relations.related(relations.read(stream_name, 0)).hits] == [
        ("correlation",),
        ("place",),
    ]


def test_a_super_stream_counts_as_one(amqp_url: str, engine: sa.Engine, relations: Relations) -> None:
    """Its name stands for all its partitions, those not recorded too."""
    name = unique_name()
    partitions = [f"{name}-{n}" for n in range(3)]
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(name, "direct", durable=True, arguments={"x-super-stream": True})
        try:
            for place, partition in enumerate(partitions):
                declare_stream(amqp_url, partition)
                channel.queue_bind(partition, name, str(place), arguments={"x-stream-partition-order": place})
                publish_plain(amqp_url, partition, [order("a", f"h{place}")])
            with recording(amqp_url, engine, name, keys=KEYS):
                for partition in partitions:
                    wait_recorded(amqp_url, engine, partition)
            assert relations.find("order_id", "a", streams=name, order="offset").ids == tuple(
                (partition, 0) for partition in partitions
            )
            assert relations.find("order_id", "b", streams=name).status is Status.ABSENT
            late = f"{name}-3"
            declare_stream(amqp_url, late)
            partitions.append(late)
            channel.queue_bind(late, name, "3", arguments={"x-stream-partition-order": 3})
            publish_plain(amqp_url, late, [order("b")])
            assert relations.find("order_id", "b", streams=name).status is Status.NOT_RECORDED_YET
            assert relations.find("order_id", "b", streams=name, complete=True).ids == ((late, 0),)
        finally:
            channel.exchange_delete(name)
            for partition in partitions:
                delete_stream(amqp_url, partition)


# --- what is not found ------------------------------------------------------------------------------------


def test_absent_is_said_only_when_all_is_recorded(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """One message more than what is recorded makes it `not_recorded_yet`; with `complete` it is read."""
    publish_plain(amqp_url, stream_name, [order("a")])
    record(amqp_url, engine, stream_name)
    message = relations.read(stream_name, 0)
    assert relations.find("order_id", "b").status is Status.ABSENT
    assert relations.related(message).status is Status.ABSENT
    publish_plain(amqp_url, stream_name, [order("b"), order("a")])
    assert relations.find("order_id", "b").status is Status.NOT_RECORDED_YET
    assert relations.related(message).status is Status.NOT_RECORDED_YET
    assert relations.find("order_id", "b", complete=True).ids == ((stream_name, 1),)
    assert relations.find("order_id", "a", complete=True).ids == ((stream_name, 0), (stream_name, 2))
    assert relations.find("order_id", "a", complete=True, limit=1, order="newest").ids == ((stream_name, 2),)
    assert relations.related(message, by="order_id", complete=True).ids == ((stream_name, 2),)
    assert relations.related(message, complete=True).ids == ((stream_name, 1), (stream_name, 2))
    assert relations.find("order_id", "c", complete=True).status is Status.ABSENT
    record(amqp_url, engine, stream_name)
    assert relations.find("order_id", "c").status is Status.ABSENT


def test_a_key_added_later_is_not_recorded_before_its_back_fill(
    amqp_url: str, engine: sa.Engine, database_url: str, relations: Relations, stream_name: str
) -> None:
    """Coverage is by key: the older messages are uncovered for the new one."""
    publish_plain(amqp_url, stream_name, [order("a", "x"), order("b", "y")])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    add_keys(engine, ["host"])
    assert relations.find("order_id", "z").status is Status.ABSENT
    assert relations.find("host", "x").status is Status.NOT_RECORDED_YET
    assert relations.find("host", "x", complete=True).ids == ((stream_name, 0),)
    assert relations.find("host", "z", complete=True).status is Status.ABSENT
    backfill(amqp_url, database_url, stream_name)
    assert relations.find("host", "x").ids == ((stream_name, 0),)
    assert relations.find("host", "z").status is Status.ABSENT


def test_a_stream_that_was_never_recorded_is_no_absence(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """The broker knows it, the database does not: nothing is known of it until it is read."""
    add_keys(engine, KEYS)
    publish_plain(amqp_url, stream_name, [order("a")])
    assert relations.find("order_id", "a", streams=stream_name).status is Status.NOT_RECORDED_YET
    assert relations.find("order_id", "a", streams=stream_name, complete=True).ids == ((stream_name, 0),)
    with pytest.raises(NothingRecorded):
        relations.find("order_id", "a")


def test_an_empty_stream_is_absence(engine: sa.Engine, relations: Relations, stream_name: str) -> None:
    """It retains nothing, so that nothing is uncovered."""
    add_keys(engine, KEYS)
    assert relations.find("order_id", "a", streams=stream_name).status is Status.ABSENT


def _expire(amqp_url: str, stream: str, headers: dict[str, Any]) -> None:
    """Publish so much that the oldest segments go."""
    publish_plain(amqp_url, stream, [(b"x" * 10_000, headers)] * 60)


@pytest.fixture
def short_stream(amqp_url: str) -> Iterator[str]:
    """A stream that retains about 100 kB."""
    name = unique_name()
    declare_stream(amqp_url, name, x_max_length_bytes=100_000, x_stream_max_segment_size_bytes=50_000)
    yield name
    delete_stream(amqp_url, name)


def test_what_retention_dropped_is_expired_and_does_not_hide_the_rest(
    amqp_url: str, engine: sa.Engine, relations: Relations, short_stream: str
) -> None:
    """All gone is `expired`; a limit is filled from what is retained, and the lost ids are told."""
    publish_plain(amqp_url, short_stream, [order("old"), order("both"), order("both")])
    _expire(amqp_url, short_stream, {})
    publish_plain(amqp_url, short_stream, [order("both"), order("both")])
    # The rows of what is gone stay until they are pruned; the recorder here begins after retention, so make them.
    record(amqp_url, engine, short_stream)
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO relatum.relationships SELECT o, NULL, stream_id, key_id, v FROM relatum.streams, "
                "relatum.keys, (VALUES (0, 'old'), (1, 'both'), (2, 'both')) AS lost (o, v) "
                "WHERE keys.name = 'order_id'"
            )
        )
    answer = relations.find("order_id", "old")
    assert (answer.status, answer.ids, answer.expired) == (Status.EXPIRED, (), ((short_stream, 0),))
    assert relations.find("order_id", "never").status is Status.ABSENT
    both = relations.find("order_id", "both", order="offset", limit=2)
    assert both.status is Status.FOUND
    assert len(both) == 2
    assert set(both.expired) == {(short_stream, 1), (short_stream, 2)}
    assert relations.related(both[0], by="order_id", limit=1).ids == both.ids[1:]


@pytest.mark.differs
@pytest.mark.parametrize("count", [0, 3, 30])
def test_a_stream_declared_again_is_named_and_never_answered_from(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str, count: int
) -> None:
    """Shorter, longer or empty: where it is named it is `StreamReplaced`, else left out, and nothing is proven."""
    publish_plain(amqp_url, other_stream, [order("a")])
    publish_plain(amqp_url, stream_name, [order(f"o{n}") for n in range(9)] + [order("a")])
    record(amqp_url, engine, stream_name, other_stream)
    delete_stream(amqp_url, stream_name)
    declare_stream(amqp_url, stream_name)
    publish_plain(amqp_url, stream_name, [(b"new", {"order_id": "new"})] * count)
    for value, is_complete in (("a", False), ("none", False), ("new", True)):
        with pytest.raises(StreamReplaced) as caught:
            relations.find("order_id", value, streams=stream_name, complete=is_complete)
        assert caught.value.stream == stream_name
    for answer, ids in (
        (relations.find("order_id", "a"), ((other_stream, 0),)),
        (relations.find("order_id", "none"), ()),
        (relations.find("order_id", "new", complete=True), ()),
        (relations.related(relations.read(other_stream, 0)), ()),
    ):
        assert (answer.ids, answer.status) == (ids, Status.UNPROVEN)
        assert ([each.stream for each in answer.left_out], answer.streams) == ([stream_name], (other_stream,))
    assert relations.find("order_id", "a", streams=other_stream).ids == ((other_stream, 0),)


def test_a_stream_declared_again_answers_once_it_is_recorded(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """The look-ups of one process go on across the change."""
    publish_plain(amqp_url, stream_name, [order("a"), order("b")])
    record(amqp_url, engine, stream_name)
    assert relations.find("order_id", "b").ids == ((stream_name, 1),)
    delete_stream(amqp_url, stream_name)
    declare_stream(amqp_url, stream_name)
    publish_plain(amqp_url, stream_name, [order("b"), order("c"), order("d")])
    with recording(amqp_url, engine, stream_name):
        wait_until(lambda: _generation(engine, stream_name) == 2, what="a new generation")
        wait_recorded(amqp_url, engine, stream_name)
    assert relations.find("order_id", "b").ids == ((stream_name, 0),)
    assert relations.find("order_id", "a").status is Status.ABSENT


def _generation(engine: sa.Engine, stream: str) -> int:
    query = "SELECT generation FROM relatum.streams WHERE name = :name AND replaced_at IS NULL"
    with engine.connect() as connection:
        return int(connection.execute(sa.text(query), {"name": stream}).scalar_one())


@pytest.mark.differs
@pytest.mark.parametrize("change", ["value = 'b'", "time_us = time_us + 1", "stream_offset = 2", "stream_offset = 99"])
def test_a_row_that_the_message_does_not_confirm_is_never_answered_from(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, change: str
) -> None:
    """Another value, another time, another offset, an offset past the end."""
    publish_plain(amqp_url, stream_name, [order("a"), order("b"), order("c")])
    record(amqp_url, engine, stream_name)
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE relatum.relationships SET {change} WHERE value = 'a'"))
    with pytest.raises(StreamReplaced):
        relations.find("order_id", "b" if "value" in change else "a")


@pytest.mark.differs
def test_a_stream_declared_again_is_told_from_one_that_lost_its_tail(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str
) -> None:
    """Each error says which of both it is, and what to do."""
    publish_plain(amqp_url, stream_name, [order("a"), order("b")])
    publish_plain(amqp_url, other_stream, [order("c")])
    record(amqp_url, engine, stream_name, other_stream)
    delete_stream(amqp_url, stream_name)
    declare_stream(amqp_url, stream_name)
    publish_plain(amqp_url, stream_name, [order("z")])
    with pytest.raises(StreamReplaced, match=f"{stream_name}' was deleted and declared again: relatum record"):
        relations.find("order_id", "b", streams=stream_name)
    with engine.begin() as connection:
        # As if a message more had been recorded, which the stream lost since.
        of_other = "FROM relatum.streams s WHERE s.stream_id = t.stream_id AND s.name = :name"
        for change in (
            "UPDATE relatum.coverage t SET last_offset = 7, to_offset = 8",
            "UPDATE relatum.relationships t SET stream_offset = 7",
        ):
            connection.execute(sa.text(f"{change} {of_other}"), {"name": other_stream})
    with pytest.raises(StreamReplaced, match=f"{other_stream}' has lost its tail: relatum record"):
        relations.find("order_id", "c", streams=other_stream)


def test_a_deleted_stream_is_not_found_by_name_and_holds_nothing_otherwise(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str
) -> None:
    """Named, it is `StreamNotFound`; among all recorded streams its messages are told to be deleted."""
    publish_plain(amqp_url, stream_name, [order("a")])
    publish_plain(amqp_url, other_stream, [order("b")])
    record(amqp_url, engine, stream_name, other_stream)
    delete_stream(amqp_url, stream_name)
    for value in ("a", "none"):
        with pytest.raises(StreamNotFound) as caught:
            relations.find("order_id", value, streams=stream_name)
        assert caught.value.stream == stream_name
    gone = relations.find("order_id", "a")
    assert (gone.status, gone.deleted, gone.expired) == (Status.DELETED, ((stream_name, 0),), ())
    assert f"relatum forget {stream_name}" in gone.explanation
    assert relations.find("order_id", "b").ids == ((other_stream, 0),)
    assert relations.find("order_id", "none").status is Status.ABSENT


# --- waiting ----------------------------------------------------------------------------------------------


def test_waiting_ends_when_the_message_is_recorded(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str
) -> None:
    """The message is published after the wait began."""
    publish_plain(amqp_url, stream_name, [order("a")])
    with recording(amqp_url, engine, stream_name, other_stream, keys=KEYS):
        wait_recorded(amqp_url, engine, stream_name)
        wait_until(lambda: _is_recorded(engine, other_stream), what="the other stream is recorded")
        message = relations.read(stream_name, 0)
        assert relations.wait_related(message, to=other_stream, timeout_s=0).status is Status.ABSENT
        publisher = threading.Timer(0.2, publish_plain, [amqp_url, other_stream, [order("a")]])
        publisher.start()
        answer = relations.wait_related(message, to=other_stream, timeout_s=90)
        publisher.join()
    assert (answer.status, answer.ids) == (Status.FOUND, ((other_stream, 0),))


def _is_recorded(engine: sa.Engine, stream: str) -> bool:
    with engine.connect() as connection:
        query = sa.text("SELECT count(*) FROM relatum.streams WHERE name = :name")
        return bool(connection.execute(query, {"name": stream}).scalar_one())


def test_waiting_in_vain_gives_the_answer_of_that_moment(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """No error: what is known when the time is over."""
    publish_plain(amqp_url, stream_name, [order("a"), (b"", {})])
    record(amqp_url, engine, stream_name)
    first = relations.read(stream_name, 0)

    def proven() -> Status | None:
        found = relations.wait_related(first, timeout_s=0.5).status
        return None if found is Status.UNPROVEN else found  # half a second may be too short for a proof

    assert wait_until(proven, what="a proof") is Status.ABSENT
    publish_plain(amqp_url, stream_name, [order("z")])
    assert wait_until(proven, what="a proof") is Status.NOT_RECORDED_YET
    assert relations.wait_related(relations.read(stream_name, 1), timeout_s=60).status is Status.ABSENT


# --- errors -----------------------------------------------------------------------------------------------


def test_names_that_nobody_knows_are_errors(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """Keys and streams, whether something would be found without them or not."""
    publish_plain(amqp_url, stream_name, [order("a"), order("a")])
    record(amqp_url, engine, stream_name)
    message = relations.read(stream_name, 0)
    nowhere = unique_name()
    for look_up in (
        lambda: relations.related(message, to=[stream_name, nowhere]),
        lambda: relations.find("order_id", "a", streams=nowhere),
        lambda: relations.after(message, nowhere),
        lambda: relations.wait_related(message, to=nowhere, timeout_s=1),
    ):
        with pytest.raises(StreamNotFound) as caught:
            look_up()
        assert caught.value.stream == nowhere
    for look_up in (
        lambda: relations.related(message, by="colour"),
        lambda: relations.find("colour", "a"),
        lambda: relations.before(message, stream_name, by="colour"),
    ):
        with pytest.raises(KeyNotDefined) as missing:
            look_up()
        assert missing.value.key == "colour"
    remove_key(engine, "host")
    with pytest.raises(KeyNotDefined):
        wait_until(lambda: not relations.find("host", "h"), what="the removed key is noticed")


def test_wrong_arguments_are_named(amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str) -> None:
    """Before anything is asked of a server."""
    add_keys(engine, KEYS)
    publish_plain(amqp_url, stream_name, [order("a")])
    message = relations.read(stream_name, 0)
    for look_up in (
        lambda: relations.related(message, limit=0),
        lambda: relations.related(message, limit=True),
        lambda: relations.related(message, order="random"),  # type: ignore[arg-type]
        lambda: relations.related(message, to=[]),
        lambda: relations.related("text"),  # type: ignore[arg-type]
        lambda: relations.find("order_id", "a", since="yesterday"),  # type: ignore[arg-type]
        lambda: relations.after("text", stream_name),  # type: ignore[arg-type]
        lambda: relations.after(message.time, stream_name, by="host"),  # type: ignore[arg-type]
        lambda: relations.window(message, stream_name, before_s=-1),
        lambda: relations.wait_related(message, timeout_s=float("nan")),
    ):
        with pytest.raises(InvalidInput):
            look_up()
    for value in (1.5, None, "\0", "x" * 2000):
        with pytest.raises(InvalidRelationshipKey) as caught:
            relations.find("order_id", value)
        assert caught.value.key == "order_id"


@pytest.mark.parametrize("face", FACES)
def test_a_database_that_is_away_or_empty_is_named(
    amqp_url: str, empty_database_url: str, stream_name: str, face: str
) -> None:
    """No address and no password in the message."""
    with open_relations(face, amqp_url, empty_database_url) as relations, pytest.raises(SchemaMissing):
        relations.find("order_id", "a")
    away = "postgresql://someone:secret@127.0.0.1:1/none"
    with open_relations(face, amqp_url, away) as relations, pytest.raises(DatabaseUnavailable) as caught:
        relations.find("order_id", "a")
    assert "secret" not in str(caught.value)


def test_a_connection_that_the_database_closed_is_replaced(
    amqp_url: str, engine: sa.Engine, database_url: str, relations: Relations, stream_name: str
) -> None:
    """The caller does not notice."""
    publish_plain(amqp_url, stream_name, [order("a")])
    record(amqp_url, engine, stream_name)
    engine.dispose()
    for _ in range(3):
        assert relations.find("order_id", "a").ids == ((stream_name, 0),)
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )


def test_an_engine_of_the_callers_stays_open(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """It is used as it is, and not closed."""
    publish_plain(amqp_url, stream_name, [order("a")])
    record(amqp_url, engine, stream_name)
    with Relations(amqp_url, engine.url) as relations:
        assert relations.find("order_id", "a").ids == ((stream_name, 0),)
        with engine.connect() as connection:
            connection.execute(
                sa.text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
                    "pg_backend_pid() AND datname = current_database()"
                )
            )
        assert relations.find("order_id", "a").ids == ((stream_name, 0),)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1


# --- threads and tasks ------------------------------------------------------------------------------------


def test_threads_may_share_one(amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str) -> None:
    """Each gets its own answers."""
    publish_plain(amqp_url, stream_name, [order(f"o{n % 10}") for n in range(50)])
    record(amqp_url, engine, stream_name)
    wrong: list[Any] = []

    def look_up(number: int) -> None:
        for _ in range(20):
            answer = relations.find("order_id", f"o{number}")
            if [message.offset for message in answer] != list(range(number, 50, 10)):
                wrong.append(answer)

    with Relations(amqp_url, database_url) as relations:
        threads = [threading.Thread(target=look_up, args=[number]) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


async def test_tasks_may_share_one_and_be_cancelled(
    amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """Cancelling some at any moment harms none of the others."""
    publish_plain(amqp_url, stream_name, [order(f"o{n % 10}") for n in range(50)])
    record(amqp_url, engine, stream_name)

    async def look_up(relations: AsyncRelations, number: int) -> list[int]:
        answer = await relations.find("order_id", f"o{number}")
        return [message.offset for message in answer]

    async with AsyncRelations(amqp_url, database_url) as relations:
        for patience in range(20):
            tasks = [asyncio.create_task(look_up(relations, number)) for number in range(10)]
            for _ in range(patience):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for number, result in enumerate(results):
                if not isinstance(result, asyncio.CancelledError):
                    assert result == list(range(number, 50, 10))


def test_reading_goes_through_both_faces(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """`read` and `read_many` are the reader's."""
    publish_plain(amqp_url, stream_name, [b"0", b"1", b"2"])
    assert relations.read(stream_name, 1).body == b"1"
    results = list(relations.read_many([(stream_name, 2), (stream_name, 7), (stream_name, 0)]))
    assert [getattr(result, "body", None) for result in results] == [b"2", None, b"0"]
