"""How many connections readers have: one limit for all ways to read, blocking and asyncio."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest

from relatum import MessageId
from relatum.errors import ConnectionsInUse, RelatumError
from relatum.reading import AsyncStreamReader, BrokerAddress, StreamReader
from tests.support import publish_plain, wait_until
from tests.support.proxy import Proxy
from tests.support.standstill import in_time

ASKED = 14


@pytest.fixture
def proxy(stream_url: str) -> Iterator[Proxy]:
    """Counts the connections to the broker."""
    with Proxy.to(stream_url) as proxy:
        yield proxy


@pytest.fixture
def address(amqp_url: str, stream_url: str, proxy: Proxy) -> BrokerAddress:
    """The broker by way of the proxy."""
    return BrokerAddress.parse(amqp_url, proxy.url(stream_url))


@pytest.fixture
def stream(amqp_url: str, stream_name: str) -> str:
    """A stream of ten messages."""
    publish_plain(amqp_url, stream_name, [str(n).encode() for n in range(10)])
    return stream_name


def all_ways(reader: StreamReader, stream: str, number: int) -> Any:
    """One of the ways to read."""
    ids = [MessageId(stream, n) for n in (2, 7, 3)]
    ways = [
        lambda: reader.read(stream, 5).offset,
        lambda: [message.offset for message in reader.read_many(ids)],  # type: ignore[union-attr]
        lambda: [message.offset for message in reader.read_all(ids)],  # type: ignore[union-attr]
        lambda: [message.offset for message in reader.iterate(stream, 8)],
        lambda: sum(len(batch or ()) for batch in reader.batches(stream, 0, follow=False)),
        lambda: reader.scan(stream, 1, 3, lambda message: message.offset),
        lambda: tuple(reader.bounds(stream)),
    ]
    return ways[number % len(ways)]()


EXPECTED = [5, [2, 7, 3], [2, 7, 3], [8, 9], 10, [1, 2], (0, 9)]


async def all_ways_async(reader: AsyncStreamReader, stream: str, number: int) -> Any:
    """As `all_ways`."""
    ids = [MessageId(stream, n) for n in (2, 7, 3)]
    match number % len(EXPECTED):
        case 0:
            return (await reader.read(stream, 5)).offset
        case 1:
            return [message.offset async for message in reader.read_many(ids)]  # type: ignore[union-attr]
        case 2:
            return [message.offset for message in await reader.read_all(ids)]  # type: ignore[union-attr]
        case 3:
            return [message.offset async for message in reader.iterate(stream, 8)]
        case 4:
            return sum([len(batch or ()) async for batch in reader.batches(stream, 0, follow=False)])
        case 5:
            return await reader.scan(stream, 1, 3, lambda message: message.offset)
        case _:
            return tuple(await reader.bounds(stream))


def test_all_ways_to_read_share_one_limit(address: BrokerAddress, stream: str, proxy: Proxy) -> None:
    """Many threads read in all ways at once: each has its answer, over no more connections than there may be."""
    with StreamReader.open(address, connections_max=3, timeout_s=60) as reader:
        with ThreadPoolExecutor(ASKED) as threads:
            found = list(threads.map(lambda number: all_ways(reader, stream, number), range(ASKED)))
        assert found == [EXPECTED[number % len(EXPECTED)] for number in range(ASKED)]
        assert proxy.opened <= 3
        statistics = reader.statistics()
        assert (statistics.limit, statistics.in_use, statistics.waiting) == (3, 0, 0)
        assert statistics.idle <= 3
        assert statistics.opened == proxy.opened


async def test_all_ways_to_read_share_one_limit_with_asyncio(address: BrokerAddress, stream: str, proxy: Proxy) -> None:
    """The same for tasks."""
    async with await AsyncStreamReader.open(
        address,
        connections_max=3,
        timeout_s=60,
    ) as reader:
        found = await asyncio.gather(*(all_ways_async(reader, stream, number) for number in range(ASKED)))
        assert found == [EXPECTED[number % len(EXPECTED)] for number in range(ASKED)]
        assert proxy.opened <= 3
        statistics = reader.statistics()
        assert (statistics.limit, statistics.in_use, statistics.waiting) == (3, 0, 0)
        assert statistics.opened == proxy.opened


def test_who_iterates_may_ask_something_else(address: BrokerAddress, stream: str) -> None:
    """Also where there are two connections in all: the question has the other one."""
    with StreamReader.open(address, connections_max=2) as reader:
        assert [reader.read(stream, message.offset).body for message in reader.iterate(stream, 7)] == [b"7", b"8", b"9"]
        assert reader.statistics().in_use == 0


def test_no_connection_in_time_is_an_error_of_its_own(address: BrokerAddress, stream: str) -> None:
    """It comes within the time-out, names limit and option, and passes once an iteration is closed."""
    options: Any = {"connections_max": 2, "timeout_s": 1.5}
    with StreamReader.open(address, **options) as reader, contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(reader.iterate(stream)))  # type: ignore[type-var]
        assert next(first).offset == 0
        began = time.monotonic()
        with in_time(1.5), pytest.raises(ConnectionsInUse, match=r"all 2 connections.* connections_max=") as caught:
            next(reader.iterate(stream))
        assert time.monotonic() - began >= 1.4
        assert (caught.value.limit, caught.value.waiting) == (2, 1)
        assert reader.statistics().in_use == 1
        first.close()
        assert next(reader.iterate(stream)).offset == 0
        assert reader.statistics().in_use == 0


async def test_a_cancelled_call_gives_its_place_back(address: BrokerAddress, stream: str) -> None:
    """Whether it waits or reads: afterwards nothing is in use, and others go on."""
    options: Any = {"connections_max": 2}
    async with await AsyncStreamReader.open(address, **options) as reader:
        async with contextlib.aclosing(reader.iterate(stream)) as messages:
            assert (await anext(messages)).offset == 0
            tasks = [asyncio.create_task(_take_one(reader, stream)) for _ in range(5)]
            # Each runs until it waits.
            await asyncio.sleep(0)
            assert reader.statistics().waiting == len(tasks)
            assert reader.statistics().in_use == 1
            for task in tasks[::2]:
                task.cancel()
            await asyncio.wait(tasks[::2], timeout=90)
            assert reader.statistics().waiting == 2
        assert [await task for task in tasks[1::2]] == [0, 0]
        asking = [asyncio.create_task(reader.read(stream, 3)) for _ in range(10)]
        await asyncio.sleep(0)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        statistics = reader.statistics()
        assert (statistics.in_use, statistics.waiting) == (0, 0)
        assert (await reader.read(stream, 4)).body == b"4"


async def _take_one(reader: AsyncStreamReader, stream: str) -> int:
    async with contextlib.aclosing(reader.iterate(stream)) as messages:
        return (await anext(messages)).offset


def test_followed_streams_are_beside_the_limit(address: BrokerAddress, stream: str) -> None:
    """A recorder of many streams has a connection for each, and still asks."""
    with (
        StreamReader.open(address, connections_max=2) as reader,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(4):
            followed = stack.enter_context(contextlib.closing(reader.iterate(stream, follow=True)))  # type: ignore[type-var]
            assert len(list(islice(followed, 10))) == 10
        assert reader.read(stream, 1).body == b"1"
        statistics = reader.statistics()
        assert (statistics.following, statistics.in_use) == (4, 0)


def test_a_batched_read_holds_no_connection_for_what_has_come(address: BrokerAddress, stream: str) -> None:
    """Who has what he asked for, and takes no more, stops nobody."""
    with StreamReader.open(address, connections_max=2) as reader:
        open_reads: list[Any] = []
        for _ in range(5):
            results: Any = reader.read_many([MessageId(stream, n) for n in range(10)])
            assert [next(results).offset for _ in range(10)] == list(range(10))
            open_reads.append(results)
            assert reader.statistics().in_use == 0
        assert [list(results) for results in open_reads] == [[]] * 5


def test_a_name_that_is_missing_stays_within_the_limit(amqp_url: str, proxy: Proxy) -> None:
    """What asks AMQP 0.9.1 about a missing name has a place, too: threads that ask at once do not open one each."""
    with (
        Proxy.to(amqp_url) as asked,
        StreamReader.open(
            BrokerAddress.parse(asked.url(amqp_url), f"rabbitmq-stream://guest:guest@127.0.0.1:{proxy.port}"),
            connections_max=2,
            timeout_s=60,
        ) as reader,
    ):
        errors: list[RelatumError] = []

        def ask() -> None:
            try:
                reader.read("there-is-none", 0)
            except RelatumError as error:
                errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(errors) == len(threads), what="all answers")
        for thread in threads:
            thread.join()
        assert {type(error).__name__ for error in errors} == {"StreamNotFound"}
        assert asked.most <= 3
        assert proxy.most <= 2
