"""A closed object says so for every call: not that a server is unavailable, nor that it is safe to repeat."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import pytest

import relatum
from relatum import AsyncOutcomes, MessageId, Outcomes
from relatum.contexts import AffinitySets, SerializationContexts
from relatum.errors import Transient, UsedAfterClose
from relatum.reading import AsyncStreamReader, StreamReader
from relatum_consumer import AsyncRelations, Relations
from tests.support.place import Place

PARTITIONS = 1

Uses = list[Callable[[Any, Any], Any]]
"""What is asked of it, of a stream or a super stream; the first also before it is closed."""

READS: Uses = [
    lambda reader, stream: reader.read(stream, 0),
    lambda reader, stream: reader.bounds(stream),
    lambda reader, stream: reader.read_many([MessageId(stream, 0)]),
    lambda reader, stream: reader.iterate(stream),
]
LOOKS: Uses = [
    lambda relations, stream: relations.read(stream, 0),
    lambda relations, _: relations.find("order_id", 1),
    lambda relations, stream: relations.around(datetime.now(UTC), stream, after_s=1),
    lambda relations, _: relations.group_position("0" * 48),
]
CONTEXTS: Uses = [
    lambda contexts, _: contexts.status(),
    lambda contexts, _: contexts.moves(),
    lambda contexts, _: contexts.assignment_of("a"),
    lambda contexts, super_stream: contexts.move("a", f"{super_stream}-0"),
]
SETS: Uses = [
    lambda sets, _: sets.count(),
    lambda sets, _: sets.list(),
    lambda sets, _: sets.inspect("a"),
    lambda sets, _: sets.close_idle(1),
]

ROUTES: Uses = [lambda router, _: router.open()]
OUTCOMES: Uses = [lambda outcomes, _: outcomes.of("nothing")]


COMPONENTS: dict[str, list[tuple[Callable[[Place, str], Any], Uses]]] = {
    "streams": [
        (lambda at, _: StreamReader.open(at.amqp), READS),
        (lambda at, _: AsyncStreamReader.open(at.amqp), READS),
        (lambda at, _: Relations(at.amqp, at.database), LOOKS),
        (lambda at, _: AsyncRelations(at.amqp, at.database), LOOKS),
        (lambda at, _: Outcomes(at.database), OUTCOMES),
        (lambda at, _: AsyncOutcomes(at.database), OUTCOMES),
    ],
    "contexts": [
        (lambda at, name: relatum.ContextRouter(name, at.database, broker=at.amqp), ROUTES),
        (lambda at, name: SerializationContexts(name, at.database, broker=at.amqp), CONTEXTS),
        (
            lambda at, name: relatum.SerialConsumer(name, "reader", database=at.database, broker=at.amqp),
            [lambda consumer, _: consumer.status()],
        ),
    ],
    "sets": [
        (lambda at, name: relatum.AffinityRouter(name, at.database, broker=at.amqp), ROUTES),
        (lambda at, name: AffinitySets(name, at.database, broker=at.amqp), SETS),
    ],
}


async def _result(asked: Any) -> Any:
    if isinstance(asked, AsyncIterator):
        return await anext(asked)
    if isinstance(asked, Iterator):
        return next(asked)
    return await asked if isinstance(asked, Awaitable) else asked


@pytest.mark.parametrize("kind", COMPONENTS)
async def test_what_was_closed_says_so(kind: str, place: Place, super_stream: str) -> None:
    """Each question to it ends as `UsedAfterClose`, which nobody repeats, and opens no connection again."""
    place.put(b"x")
    name = place.stream if kind == "streams" else super_stream
    for make, uses in COMPONENTS[kind]:
        component = await _result(make(place, name))
        is_async = hasattr(component, "__aenter__")
        async with component if is_async else nullcontext():
            with nullcontext() if is_async else component:
                await _result(uses[0](component, name))
        for use in uses:
            with pytest.raises(UsedAfterClose) as caught:
                await _result(use(component, name))
            assert not isinstance(caught.value, Transient)
