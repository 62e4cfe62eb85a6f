"""What was closed says so, whatever it is asked: neither that a server is away, nor that it is safe to repeat."""

from collections.abc import Callable
from typing import Any

import pytest

import relatum
from relatum import AsyncOutcomes, MessageId, Outcomes
from relatum.contexts import AffinitySets, SerializationContexts
from relatum.errors import Transient, UsedAfterClose
from relatum.reading import AsyncStreamReader, StreamReader
from relatum_consumer import AsyncRelations, Relations
from tests.support import publish_plain

PARTITIONS = 1


def _first(items: Any) -> Any:
    return next(iter(items))


async def _first_async(items: Any) -> Any:
    return await anext(aiter(items))


RELATIONS: dict[str, Callable[[Any, str], Any]] = {
    "read": lambda relations, stream: relations.read(stream, 0),
    "find": lambda relations, stream: relations.find("order_id", 1),
    "after": lambda relations, stream: relations.after(relations.message, stream),
    "group_position": lambda relations, stream: relations.group_position("0" * 48),
}


@pytest.mark.parametrize("question", RELATIONS)
async def test_closed_relations_say_that_they_are_closed(
    question: str, amqp_url: str, database_url: str, stream_name: str
) -> None:
    """Each question to closed relations, blocking and asyncio, ends as `UsedAfterClose`, which nobody repeats."""
    publish_plain(amqp_url, stream_name, [b"x"])
    ask = RELATIONS[question]
    with Relations(broker=amqp_url, database=database_url) as relations:
        message = relations.read(stream_name, 0)
    relations.message = message  # type: ignore[attr-defined]
    with pytest.raises(UsedAfterClose, match="closed") as caught:
        ask(relations, stream_name)
    assert not isinstance(caught.value, Transient)
    async with AsyncRelations(broker=amqp_url, database=database_url) as relations:
        await relations.read(stream_name, 0)
    relations.message = message  # type: ignore[attr-defined]
    with pytest.raises(UsedAfterClose, match="closed"):
        await ask(relations, stream_name)


async def test_closed_readers_say_that_they_are_closed(amqp_url: str, stream_name: str) -> None:
    """Each question to a closed reader, blocking and asyncio, ends as `UsedAfterClose`."""
    with StreamReader.open(amqp_url) as reader:
        reader.bounds(stream_name)
    for ask in (
        lambda: reader.read(stream_name, 0),
        lambda: reader.bounds(stream_name),
        lambda: _first(reader.read_many([MessageId(stream_name, 0)])),
        lambda: _first(reader.iterate(stream_name)),
    ):
        with pytest.raises(UsedAfterClose):
            ask()
    async with await AsyncStreamReader.open(amqp_url) as reader:
        await reader.bounds(stream_name)
    for ask in (
        lambda: reader.read(stream_name, 0),
        lambda: reader.bounds(stream_name),
        lambda: _first_async(reader.read_many([MessageId(stream_name, 0)])),
        lambda: _first_async(reader.iterate(stream_name)),
    ):
        with pytest.raises(UsedAfterClose):
            await ask()


async def test_closed_outcomes_say_that_they_are_closed(database_url: str) -> None:
    """Outcomes that were closed end as `UsedAfterClose`."""
    with Outcomes(database_url) as outcomes:
        outcomes.of("nothing")
    with pytest.raises(UsedAfterClose):
        outcomes.of("nothing")
    async with AsyncOutcomes(database_url) as outcomes:
        await outcomes.of("nothing")
    with pytest.raises(UsedAfterClose):
        await outcomes.of("nothing")


def test_what_keeps_contexts_and_sets_says_that_it_is_closed(
    super_stream: str, amqp_url: str, database_url: str
) -> None:
    """Routers, sets, contexts and consumers of them end as `UsedAfterClose`, and open no connection again."""
    with relatum.ContextRouter(super_stream, database_url, broker=amqp_url) as router:
        router.open()
    with SerializationContexts(super_stream, database_url, broker=amqp_url) as contexts:
        contexts.status()
    with relatum.SerialConsumer(super_stream, "reader", database=database_url, broker=amqp_url) as consumer:
        consumer.status()
    for ask in (
        router.open,
        contexts.status,
        contexts.moves,
        lambda: contexts.assignment_of("a"),
        lambda: contexts.move("a", f"{super_stream}-0"),
        consumer.status,
    ):
        with pytest.raises(UsedAfterClose):
            ask()


def test_affinity_sets_say_that_they_are_closed(super_stream: str, amqp_url: str, database_url: str) -> None:
    """Sets and their router end as `UsedAfterClose`."""
    with relatum.AffinityRouter(super_stream, database_url, broker=amqp_url) as router:
        router.open()
    with AffinitySets(super_stream, database_url, broker=amqp_url) as sets:
        sets.count()
    for ask in (router.open, sets.count, sets.list, lambda: sets.inspect("a"), lambda: sets.close_idle(1)):
        with pytest.raises(UsedAfterClose):
            ask()
