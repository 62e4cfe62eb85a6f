"""What was closed says so, whatever it is asked: neither that a server is away, nor that it is safe to repeat."""

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


def consumer(name: str, database: str, broker: str) -> relatum.SerialConsumer:
    return relatum.SerialConsumer(name, "reader", database=database, broker=broker)


OF_A_STREAM: list[tuple[Callable[[Place], Any], Uses]] = [
    (lambda at: StreamReader.open(at.amqp), READS),
    (lambda at: AsyncStreamReader.open(at.amqp), READS),
    (lambda at: Relations(at.amqp, at.database), LOOKS),
    (lambda at: AsyncRelations(at.amqp, at.database), LOOKS),
    (lambda at: Outcomes(at.database), OUTCOMES),
    (lambda at: AsyncOutcomes(at.database), OUTCOMES),
]
OF_A_SUPER_STREAM: list[tuple[Callable[..., Any], Uses]] = [
    (relatum.ContextRouter, ROUTES),
    (SerializationContexts, CONTEXTS),
    (consumer, [lambda consumer, _: consumer.status()]),
]
OF_SETS: list[tuple[Callable[..., Any], Uses]] = [(relatum.AffinityRouter, ROUTES), (AffinitySets, SETS)]


async def _result(asked: Any) -> Any:
    if isinstance(asked, AsyncIterator):
        return await anext(asked)
    if isinstance(asked, Iterator):
        return next(asked)
    return await asked if isinstance(asked, Awaitable) else asked


async def _check(component: Any, uses: Uses, stream: str) -> None:
    is_async = hasattr(component, "__aenter__")
    async with component if is_async else nullcontext():
        with nullcontext() if is_async else component:
            await _result(uses[0](component, stream))
    for use in uses:
        with pytest.raises(UsedAfterClose) as caught:
            await _result(use(component, stream))
        assert not isinstance(caught.value, Transient)


async def test_what_was_closed_says_so(place: Place) -> None:
    """Each question to it ends as `UsedAfterClose`, which nobody repeats."""
    place.put(b"x")
    for make, uses in OF_A_STREAM:
        await _check(await _result(make(place)), uses, place.stream)


@pytest.mark.parametrize("components", [OF_A_SUPER_STREAM, OF_SETS], ids=["contexts", "sets"])
async def test_what_keeps_contexts_and_sets_says_that_it_is_closed(
    components: list[Any], super_stream: str, place: Place
) -> None:
    """Routers, sets, contexts and consumers of them open no connection again."""
    for make, uses in components:
        await _check(make(super_stream, place.database, broker=place.amqp), uses, super_stream)
