"""What was closed says so for every call, and programs that close nothing end anyway."""

import subprocess
import sys
import time
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
from relatum.superstreams import Layout
from relatum_consumer import AsyncRelations, Relations
from tests.support import in_a_try
from tests.support.place import FailingPlace, Place

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


ALL_OPEN = """
import asyncio, sys, threading
import pika, relatum
from relatum.collecting import ExecutorOptions
from relatum.reading import StreamReader
from relatum.recording import Recorder
from relatum_consumer import AsyncRelations, Relations

amqp, streams, database, stream, super_stream = sys.argv[1:]
broker = relatum.Broker(amqp, stream_url=streams)
connection = pika.BlockingConnection(pika.URLParameters(amqp))
relatum.intercept(connection, database=database, keys=["order_id"], broker=broker)
channel = connection.channel()
channel.confirm_delivery()
receipt = relatum.publish(channel, "", stream, b"", pika.BasicProperties(headers={"order_id": "a"}))
receipt.wait(90)
collector = relatum.MessageCollector("billing", database=database, broker=broker, streams=[stream])
collector.register_executor("order", lambda bulk: None, ExecutorOptions())
collector.start()
consumer = relatum.SerialConsumer(super_stream, "test", database=database, broker=broker)
consumer.start()
router = relatum.ContextRouter(super_stream, database, broker=broker)
router.open()
recorder = Recorder(broker, database, [stream], keys=["order_id"])
threading.Thread(target=recorder.run, args=[threading.Event()], daemon=True).start()
reader = StreamReader.open(broker)
relations = Relations(broker, database)
assert relations.find("order_id", "a")

in_loop = AsyncRelations(broker, database)
assert asyncio.run(in_loop.find("order_id", "a"))

async def leave() -> None:
    global task
    task = asyncio.create_task(in_loop.find("order_id", "b"))
    await asyncio.sleep(0.1)

print("ready", flush=True)
sys.stdin.readline()
threading.Thread(target=relations.find, args=["order_id", "b"], daemon=True).start()
threading.Thread(target=reader.bounds, args=[stream], daemon=True).start()
asyncio.run(leave())
"""

AT_EXIT = """
import atexit, sys
import pika, relatum
from relatum_consumer import Relations

amqp, streams, database, stream = sys.argv[1:]
connection = pika.BlockingConnection(pika.URLParameters(amqp))
relatum.intercept(connection, database=database, keys=["order_id"], broker=relatum.Broker(amqp, stream_url=streams))
channel = connection.channel()
relations = Relations(streams, database)

def put(value):
    channel.basic_publish("", stream, b"", pika.BasicProperties(headers={"order_id": value}))

def at_exit():
    put("last")
    relatum.release(connection)
    print(relations.find("order_id", "first").status.value)

atexit.register(at_exit)
put("first")
"""


def program(script: str, *arguments: str) -> "subprocess.Popen[str]":
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], text=True, **pipes)


@pytest.mark.parametrize("frozen", ["database frozen", "broker frozen"])
def test_a_program_ends_that_closed_nothing(frozen: str, place: Place, layout: Layout) -> None:
    """A program that closed nothing ends within seconds while a server is frozen."""

    def ends_soon() -> bool:
        line = FailingPlace(place, "blocking")
        urls = line.amqp, line.stream_url, line.database
        with program(ALL_OPEN, *urls, place.stream, layout.super_stream) as running:
            try:
                assert running.stdin is not None
                assert running.stdout is not None
                assert running.stdout.readline() == "ready\n", running.communicate(timeout=90)
                with line.fault(frozen):
                    began = time.monotonic()
                    running.stdin.close()
                    running.wait(90)
                    took_s = time.monotonic() - began
            finally:
                running.kill()
                line.close()
        return took_s < 5.0

    in_a_try(ends_soon, 3, what="the program's end")


def test_what_a_program_does_at_its_very_end_works(place: Place) -> None:
    """Handlers of `atexit` can publish, release the connection and look up, and all is recorded."""
    running = program(AT_EXIT, place.amqp, place.stream_url, place.database, place.stream)
    assert running.communicate(timeout=120) == ("found\n", "")
    assert place.values() == ["first", "last"]
