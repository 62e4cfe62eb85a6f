"""Lookups by key against real streams and a real database."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pika
import pytest

from relatum import Broker, MessageId, errors
from relatum.keys import KeyDefinition
from relatum.recording import prune
from relatum.store.catalog import add_keys, remove_key
from relatum.superstreams import add_partition
from relatum_consumer import AsyncRelations, Relations, Status
from tests.support import delete_stream, unique_name, wait_until
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.raising import raising
from tests.support.standstill import end_sessions
from tests.support.super_streams import super_stream

KEYS = ["order_id", "host"]


def order(number: Any, host: str = "h", time_us: int | None = None) -> tuple[bytes, dict[str, Any]]:
    time = {} if time_us is None else {"relatum_time": time_us}
    return b"order", {"order_id": number, "host": host} | time


def test_all_messages_that_share_a_key_are_found_and_never_the_message_itself(
    place: Place, relations: Relations, other_stream: str
) -> None:
    """Related messages are those of all streams that share a key, each with its shared keys, oldest first."""
    place.put(order("a", "x", 50), order("a", "y", 20), order("b", "x", 40))
    place.put(order("a", "x", 10), order("c", "z", 30), order("b", "z", 60), to=other_stream)
    place.record(place.stream, other_stream)
    message = relations.read(place.stream, 0)
    answer = relations.related(message)
    assert answer.status is Status.FOUND
    assert [(hit.id, hit.keys) for hit in answer.hits] == [
        (MessageId(other_stream, 0), ("order_id", "host")),
        (MessageId(place.stream, 1), ("order_id",)),
        (MessageId(place.stream, 2), ("host",)),
    ]
    assert [message.body for message in answer] == [b"order"] * 3
    assert relations.related(message, to=other_stream).ids == ((other_stream, 0),)
    assert relations.related(message, to=[place.stream], by="host").ids == ((place.stream, 2),)
    assert relations.related(message, by=["host", "order_id"]).hits[0].keys == ("host", "order_id")
    wrong: Any
    for wrong in (5, "ab", [5], [("s",)]):
        with pytest.raises(errors.InvalidInput):
            list(relations.read_many(wrong))
    results = list(relations.read_many([(place.stream, 2), (place.stream, 7), (other_stream, 0)]))
    assert [getattr(each, "body", type(each)) for each in results] == [b"order", errors.OffsetNotFound, b"order"]


def test_each_order_and_limit_gives_the_head_of_the_whole(
    place: Place, relations: Relations, other_stream: str
) -> None:
    """A limited answer is the head of all messages ordered by time, stream and offset, or by offset alone."""
    times = {place.stream: [30, 10, 20, 20, 50], other_stream: [20, 60, 10, 5, 20]}
    for stream, each in times.items():
        place.put(*[order("a", time_us=time) for time in each], to=stream)
    place.record(place.stream, other_stream)
    places = sorted((time, stream, offset) for stream, each in times.items() for offset, time in enumerate(each))
    by_time = tuple((stream, offset) for _, stream, offset in places)
    for limit in (1, 2, 9, 10, 11, None):
        assert relations.find("order_id", "a", limit=limit).ids == by_time[:limit]
        assert relations.find("order_id", "a", limit=limit, order="newest").ids == by_time[::-1][:limit]
        assert relations.find("order_id", "a", limit=limit, order="offset").ids == tuple(sorted(by_time))[:limit]
    message = relations.read(*by_time[0])
    assert relations.related(message, limit=1).ids == by_time[1:2]


def test_a_span_of_time_has_its_beginning_and_not_its_end(place: Place, relations: Relations) -> None:
    """`since` is in, `until` is out; either may be left out."""
    place.put_recorded(*[order("a", time_us=1_000_000 * n) for n in range(6)])
    at = [relations.read(place.stream, n).time for n in range(6)]
    offsets = lambda **span: [place.offset for place in relations.find("order_id", "a", **span).ids]  # noqa: E731
    assert offsets(since=at[1], until=at[4]) == [1, 2, 3]
    assert offsets(since=at[4]) == [4, 5]
    assert offsets(until=at[2], order="newest") == [1, 0]
    assert relations.find("order_id", "a", since=at[2], until=at[2]).status is Status.ABSENT


def test_values_are_compared_in_canonical_form(place: Place, relations: Relations) -> None:
    """A foreign publisher's number and our text are one value of a text key; true is not 1."""
    place.put_recorded(order(42), order("42"), order(True), order("true"), order(1), order([1]))
    for value in (42, "42"):
        assert [place.offset for place in relations.find("order_id", value, order="offset").ids] == [0, 1]
    assert [place.offset for place in relations.find("order_id", True, order="offset").ids] == [2, 3]
    assert relations.related(relations.read(place.stream, 0), by="order_id").ids == ((place.stream, 1),)
    assert relations.related(relations.read(place.stream, 5), by="order_id").status is Status.ABSENT


def test_composite_and_property_keys(place: Place, relations: Relations) -> None:
    """A tuple asks for a composite key, and a key of a property finds the property's value."""
    keys = [
        KeyDefinition("place", source=["site", "rack"]),
        KeyDefinition("correlation", source="property:correlation_id"),
        KeyDefinition("number", type="integer"),
    ]
    headers = [{"site": "a|b", "rack": 1}, {"site": "a", "rack": "b|1"}, {"site": "a|b", "rack": "1", "number": "007"}]
    place.put(*[(b"", pika.BasicProperties(headers=each, correlation_id=f"c{len(each)}")) for each in headers])
    place.record(keys=keys)
    assert [place.offset for place in relations.find("place", ("a|b", 1)).ids] == [0, 2]
    assert [place.offset for place in relations.find("correlation", "c3").ids] == [2]
    assert [place.offset for place in relations.find("number", 7).ids] == [2]
    assert [hit.keys for hit in relations.related(relations.read(place.stream, 0)).hits] == [
        ("correlation",),
        ("place",),
    ]


def test_a_super_stream_counts_as_one(place: Place, relations: Relations) -> None:
    """A super stream's name means all its partitions, also those that are not recorded."""
    with super_stream(place.broker, 3) as layout:
        name = layout.super_stream
        for number, each in enumerate(layout):
            place.put(order("a", f"h{number}"), to=each.stream)
        place.record_partitions(layout)
        recorded = tuple(each.stream for each in layout)
        found = relations.find("order_id", "a", streams=name, order="offset")
        assert (found.ids, found.streams) == (tuple((each, 0) for each in recorded), recorded)
        assert relations.find("order_id", "b", streams=name).status is Status.ABSENT
        late = add_partition(place.broker, name).stream
        place.put(order("b"), to=late)
        # It is named only if the answer covers it, regardless of what the table has.
        assert relations.find("order_id", "a", streams=name).streams == recorded
        missed = relations.find("order_id", "b", streams=name)
        assert (missed.status, missed.streams) == (Status.NOT_RECORDED_YET, (*recorded, late))
        assert relations.find("order_id", "b", streams=name, complete=True).ids == ((late, 0),)


def test_absent_is_said_only_when_all_is_recorded(place: Place, relations: Relations, other_stream: str) -> None:
    """A lookup says `absent` only where all is recorded or the stream is empty, or with `complete` once it is read."""
    add_keys(place.engine, KEYS)
    place.put(order("a"))
    assert relations.find("order_id", "a", streams=place.stream).status is Status.NOT_RECORDED_YET
    assert relations.find("order_id", "a", streams=place.stream, complete=True).ids == ((place.stream, 0),)
    assert relations.find("order_id", "a", streams=other_stream).status is Status.ABSENT
    place.record()
    message = relations.read(place.stream, 0)
    assert relations.find("order_id", "b").status is Status.ABSENT
    assert relations.related(message).status is Status.ABSENT
    place.put(order("b"), order("a"))
    assert relations.find("order_id", "b").status is Status.NOT_RECORDED_YET
    assert relations.related(message).status is Status.NOT_RECORDED_YET
    assert relations.find("order_id", "b", complete=True).ids == ((place.stream, 1),)
    assert relations.find("order_id", "a", complete=True).ids == ((place.stream, 0), (place.stream, 2))
    assert relations.find("order_id", "a", complete=True, limit=1, order="newest").ids == ((place.stream, 2),)
    assert relations.related(message, by="order_id", complete=True).ids == ((place.stream, 2),)
    assert relations.related(message, complete=True).ids == ((place.stream, 1), (place.stream, 2))
    assert relations.find("order_id", "c", complete=True).status is Status.ABSENT
    place.record()
    assert relations.find("order_id", "c").status is Status.ABSENT


def test_what_retention_dropped_is_expired_and_does_not_hide_the_rest(
    place: Place, relations: Relations, short_stream: str
) -> None:
    """A value whose messages retention dropped is `expired`; where some are left these fill the limit."""
    place.put(order("old"), order("both"), order("both"), to=short_stream)
    place.put(*[b"x" * 10_000] * 60, to=short_stream)
    place.put(order("both"), order("both"), to=short_stream)
    # Rows of dropped messages stay until they are pruned; this recorder starts after retention, so make them here.
    place.record(short_stream)
    place.sql(
        "INSERT INTO relatum.relationships SELECT o, NULL, stream_id, key_id, v FROM relatum.streams, relatum.keys, "
        "(VALUES (0, 'old'), (1, 'both'), (2, 'both')) AS lost (o, v) WHERE keys.name = 'order_id'"
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
    place: Place, relations: Relations, other_stream: str, count: int
) -> None:
    """A stream declared again raises `StreamReplaced` where it is named, and else is left out of unproven answers."""
    place.put(order("a"), to=other_stream)
    place.put(*[order(f"o{n}") for n in range(9)], order("a"))
    place.record(place.stream, other_stream)
    place.declare_again()
    place.put(*[order("new")] * count)
    for value, is_complete in (("a", False), ("none", False), ("new", True)):
        with raising(errors.StreamReplaced, stream=place.stream):
            relations.find("order_id", value, streams=place.stream, complete=is_complete)
    for answer, ids in (
        (relations.find("order_id", "a"), ((other_stream, 0),)),
        (relations.find("order_id", "none"), ()),
        (relations.find("order_id", "new", complete=True), ()),
        (relations.related(relations.read(other_stream, 0)), ()),
    ):
        assert (answer.ids, answer.status) == (ids, Status.UNPROVEN)
        assert ([each.stream for each in answer.unreadable_streams], answer.streams) == (
            [place.stream],
            (other_stream,),
        )
    assert [each.stream for each in relations.trace(("order_id", "a")).unreadable_streams] == [place.stream]
    assert relations.find("order_id", "a", streams=other_stream).ids == ((other_stream, 0),)


@pytest.mark.differs
def test_a_stream_that_was_left_out_is_named_even_if_it_counts_again_at_the_end(
    place: Place, other_stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that left out a stream, which is tried again from now on, is unproven and names the stream."""
    monkeypatch.setattr("relatum_consumer.lookups.catalog.UNUSABLE_S", 1.0)
    for stream in (place.stream, other_stream):
        place.put_recorded(order("a"), to=stream, keys=["order_id"])
    place.declare_again()
    place.put(order("b"))
    with (
        Proxy.to(place.stream_url) as line,
        Relations(Broker(place.amqp, stream_url=line.url(place.stream_url)), place.database) as relations,
        ThreadPoolExecutor(1) as thread,
    ):
        assert [each.stream for each in relations.find("order_id", "a").unreadable_streams] == [place.stream]
        line.mode = "frozen"
        asked = thread.submit(relations.find, "order_id", "a")
        wait_until(lambda: not relations._catalog.left_out(), what="the stream counts again")
        line.mode = "pass"
        answer = asked.result()
    assert (answer.ids, answer.status) == (((other_stream, 0),), Status.UNPROVEN)
    assert [each.stream for each in answer.unreadable_streams] == [place.stream]


@pytest.mark.differs
@pytest.mark.parametrize(
    ("change", "recorded_to"),
    [
        ("value = 'b'", 3),
        ("time_us = time_us + 1", 3),
        ("stream_offset = 2", 3),
        ("stream_offset = 99", 3),
        ("stream_offset = 7", 8),  # the stream has lost its tail
    ],
)
def test_a_row_that_the_message_does_not_confirm_is_never_answered_from(
    place: Place, relations: Relations, change: str, recorded_to: int
) -> None:
    """A row with another value, time or offset than a message has is an error that says how to continue."""
    place.put_recorded(order("a"), order("b"), order("c"))
    place.sql("UPDATE relatum.coverage SET last_offset = :end - 1, to_offset = :end", end=recorded_to)
    place.sql(f"UPDATE relatum.relationships SET {change} WHERE value = 'a'")
    with pytest.raises(errors.StreamReplaced, match=f"relatum record {place.stream}"):
        relations.find("order_id", "b" if "value" in change else "a")


def test_a_deleted_stream_is_not_found_by_name_and_holds_nothing_otherwise(
    place: Place, relations: Relations, other_stream: str
) -> None:
    """A deleted stream raises `StreamNotFound` where it is named; else its messages are reported as deleted."""
    place.put(order("a"))
    place.put(order("b"), to=other_stream)
    place.record(place.stream, other_stream)
    delete_stream(place.amqp, place.stream)
    for value in ("a", "none"):
        with raising(errors.StreamNotFound, stream=place.stream):
            relations.find("order_id", value, streams=place.stream)
    gone = relations.find("order_id", "a")
    assert (gone.status, gone.deleted, gone.expired) == (Status.DELETED, ((place.stream, 0),), ())
    assert f"relatum forget {place.stream}" in gone.explanation
    assert relations.find("order_id", "b").ids == ((other_stream, 0),)
    assert relations.find("order_id", "none").status is Status.ABSENT
    # Nobody can say anything about a stream that is gone.
    delete_stream(place.amqp, other_stream)
    assert relations.find("order_id", "a").deleted == ((place.stream, 0),)
    with pytest.raises(errors.NothingRecorded):
        relations.find("order_id", "none")


def test_waiting_in_vain_gives_the_answer_of_that_moment(place: Place, relations: Relations) -> None:
    """A wait that finds nothing gives what is known when its time is over."""
    place.put_recorded(order("a"), (b"", {}))
    first = relations.read(place.stream, 0)

    def proven() -> Status | None:
        found = relations.wait_related(first, timeout_s=0.5).status
        return None if found is Status.UNPROVEN else found  # half a second may be too short for a proof

    assert wait_until(proven, what="a proof") is Status.ABSENT
    place.put(order("z"))
    assert wait_until(proven, what="a proof") is Status.NOT_RECORDED_YET
    assert relations.wait_related(relations.read(place.stream, 1), timeout_s=60).status is Status.ABSENT


def test_names_that_nobody_knows_are_errors(place: Place, relations: Relations) -> None:
    """Unknown keys and streams, and impossible values, are errors that name them, whatever else is found."""
    place.put_recorded(order("a"), order("a"))
    message = relations.read(place.stream, 0)
    nowhere = unique_name()
    for look_up in (
        lambda: relations.related(message, to=[place.stream, nowhere]),
        lambda: relations.find("order_id", "a", streams=nowhere),
        lambda: relations.after(message, nowhere),
        lambda: relations.wait_related(message, to=nowhere, timeout_s=1),
    ):
        with raising(errors.StreamNotFound, stream=nowhere):
            look_up()
    for look_up in (
        lambda: relations.related(message, by="colour"),
        lambda: relations.find("colour", "a"),
        lambda: relations.before(message, place.stream, by="colour"),
    ):
        with raising(errors.KeyNotDefined, key="colour"):
            look_up()
    with pytest.raises(errors.KeyNotDefined, match=r"did you mean 'order_id'"):
        relations.find("orderid", "a")
    with pytest.raises(errors.StreamNotFound, match=f"did you mean '{place.stream}'"):
        relations.find("order_id", "a", streams=place.stream[:-1])
    for value in (1.5, None, "\0", "x" * 2000):
        with raising(errors.InvalidRelationshipKey, key="order_id"):
            relations.find("order_id", value)
    remove_key(place.engine, "host")
    with pytest.raises(errors.KeyNotDefined):
        wait_until(lambda: not relations.find("host", "h"), what="the removed key is noticed")


@pytest.mark.parametrize("complete", [False, True])
def test_a_removed_key_whose_rows_are_pruned_proves_no_absence(
    place: Place, relations: Relations, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    """A lookup that does not know yet that its key was removed does not say that there is no message."""
    monkeypatch.setattr("relatum_consumer.lookups.catalog.CATALOG_AGE_S", 600.0)
    place.put_recorded(order("a"))
    assert relations.find("order_id", "a").ids == ((place.stream, 0),)
    remove_key(place.engine, "order_id")
    prune(place.amqp, place.engine.url)
    for lookup in (
        lambda: relations.find("order_id", "a", complete=complete),
        lambda: relations.trace(("order_id", "a")),
    ):
        with raising(errors.KeyNotDefined, key="order_id"):
            lookup()


def test_a_connection_that_the_database_closed_is_replaced(place: Place, relations: Relations) -> None:
    """Lookups continue after PostgreSQL has ended their sessions."""
    place.put_recorded(order("a"))
    place.engine.dispose()
    for _ in range(3):
        assert relations.find("order_id", "a").ids == ((place.stream, 0),)
        end_sessions(place.database)


async def test_tasks_may_share_one_and_be_cancelled(place: Place) -> None:
    """Tasks share one object, and cancelling some of them at any moment leaves the other answers right."""
    place.put_recorded(*[order(f"o{n % 10}") for n in range(50)])

    async def look_up(relations: AsyncRelations, number: int) -> list[int]:
        answer = await relations.find("order_id", f"o{number}")
        return [message.offset for message in answer]

    async with AsyncRelations(place.amqp, place.database) as relations:
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
