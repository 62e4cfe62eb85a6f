"""How many connections readers have: one limit for all ways to read, blocking and asyncio."""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import isasyncgen, isawaitable
from itertools import islice
from typing import Any

import pytest

from relatum import Broker, MessageId, metrics
from relatum.errors import BrokerUnavailable, ConnectionLost, ConnectionsInUse, StreamNotFound, UsedAfterClose
from relatum.reading import (
    AsyncStreamReader,
    Message,
    ReaderStatistics,
    RecordBatch,
    SocketConnection,
    StreamBounds,
    StreamReader,
)
from relatum.wire import frames
from tests.support import cancel, new_streams, publish_plain
from tests.support._waiting import result_of, wait_until
from tests.support.proxy import Proxy
from tests.support.raising import raising
from tests.support.standstill import in_time


@pytest.fixture
def address(amqp_url: str, stream_url: str, proxy: Proxy) -> Broker:
    return Broker(amqp_url, stream_url=proxy.url(stream_url))


@pytest.fixture(scope="module")
def stream(amqp_url: str) -> Iterator[str]:
    with new_streams(amqp_url, 1) as (name,):
        publish_plain(amqp_url, name, [str(n).encode() for n in range(10)])
        yield name


def ids_in(stream: str) -> list[MessageId]:
    return [MessageId(stream, n) for n in (2, 7, 3)]


WAYS: list[tuple[Callable[[Any, str], Any], Any]] = [
    (lambda reader, stream: reader.read(stream, 5), [5]),
    (lambda reader, stream: reader.read_many(ids_in(stream)), [2, 7, 3]),
    (lambda reader, stream: reader.read_all(ids_in(stream)), [2, 7, 3]),
    (lambda reader, stream: reader.iterate(stream, 8), [8, 9]),
    (lambda reader, stream: reader.batches(stream, 0, follow=False), list(range(10))),
    (lambda reader, stream: reader.scan(stream, 1, 3, lambda message: message), [1, 2]),
    (lambda reader, stream: reader.bounds(stream), [0, 9]),
] * 2


def offsets(result: Any) -> list[int]:
    if isinstance(result, StreamBounds):
        return list(result)  # type: ignore[arg-type]
    each = [result] if isinstance(result, Message) else list(result)
    return [offset for one in each for offset in (one.offsets if isinstance(one, RecordBatch) else [one.offset])]


def read_in_threads(address: Broker, stream: str, **options: Any) -> tuple[list[Any], ReaderStatistics]:
    """What all ways give that are asked in threads at once, and how the reader stands then."""
    with StreamReader.open(address, **options) as reader, ThreadPoolExecutor(len(WAYS)) as threads:
        found = list(threads.map(lambda way: offsets(way[0](reader, stream)), WAYS))
        return found, reader.statistics()


async def read_in_tasks(address: Broker, stream: str, **options: Any) -> tuple[list[Any], ReaderStatistics]:
    async with await AsyncStreamReader.open(address, **options) as reader:

        async def found(ask: Callable[[Any, str], Any]) -> list[int]:
            result = ask(reader, stream)
            return offsets([each async for each in result] if isasyncgen(result) else await result)

        return await asyncio.gather(*(found(ask) for ask, _ in WAYS)), reader.statistics()


@pytest.mark.parametrize("read", [read_in_threads, read_in_tasks])
async def test_all_ways_to_read_share_one_limit(read: Any, address: Broker, stream: str, proxy: Proxy) -> None:
    """Threads, or tasks, read in all ways at once: each has its answer, over no more connections than there may be."""
    given = read(address, stream, broker_connections_max=3, timeout_s=60)
    found, statistics = await given if isawaitable(given) else given
    assert found == [expected for _, expected in WAYS]
    assert proxy.opened <= 3
    assert (statistics.limit, statistics.in_use, statistics.waiting) == (3, 0, 0)
    assert statistics.idle <= 3
    assert statistics.opened == proxy.opened


def test_who_iterates_may_ask_something_else(address: Broker, stream: str) -> None:
    """Also where there are two connections in all: the question has the other one."""
    with StreamReader.open(address, broker_connections_max=2) as reader:
        assert [reader.read(stream, message.offset).body for message in reader.iterate(stream, 7)] == [b"7", b"8", b"9"]
        assert reader.statistics().in_use == 0


def test_no_connection_in_time_is_an_error_of_its_own(address: Broker, stream: str) -> None:
    """A call without a connection in time fails with limit and option named, until an iteration is closed."""
    options: Any = {"broker_connections_max": 2, "timeout_s": 1.5}
    with StreamReader.open(address, **options) as reader, contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(reader.iterate(stream)))  # type: ignore[type-var]
        assert next(first).offset == 0
        began = time.monotonic()
        words = "all 2 connections.* broker_connections_max="
        with in_time(1.5), raising(ConnectionsInUse, words, limit=2, waiting=1):
            next(reader.iterate(stream))
        assert time.monotonic() - began >= 1.4
        assert reader.statistics().in_use == 1
        first.close()
        assert (next(reader.iterate(stream)).offset, reader.statistics().in_use) == (0, 0)


def test_an_iteration_that_is_dropped_within_a_cycle_gives_its_connection_back(address: Broker, stream: str) -> None:
    """The garbage collector, which ends the objects of a cycle in any order, does not take its socket first."""
    with StreamReader.open(address) as reader:
        messages = reader.iterate(stream)
        assert next(messages).offset == 0
        cycle: list[Any] = [messages]
        cycle.append(cycle)
        del messages, cycle
        gc.collect()
        statistics = reader.statistics()
        assert (statistics.in_use, statistics.idle, statistics.opened) == (0, 1, 1)
        assert (reader.read(stream, 3).offset, reader.statistics().opened) == (3, 1)


async def test_a_cancelled_call_gives_its_place_back(address: Broker, stream: str) -> None:
    """Whether it waits or reads: afterwards nothing is in use, and others continue."""
    async with await AsyncStreamReader.open(address, broker_connections_max=2) as reader:
        async with contextlib.aclosing(reader.iterate(stream)) as messages:
            assert (await anext(messages)).offset == 0
            tasks = [asyncio.create_task(_take_one(reader, stream)) for _ in range(5)]
            # Each runs until it waits.
            await asyncio.sleep(0)
            assert (reader.statistics().waiting, reader.statistics().in_use) == (len(tasks), 1)
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


async def test_ids_that_do_not_come_hold_nobody_up(address: Broker, stream: str) -> None:
    """Iterations that wait for their ids are cancelled, more than there are threads to close them; others continue."""
    more = threading.Event()

    def ids() -> Iterator[tuple[str, int]]:
        assert more.wait(90)
        yield stream, 0

    try:
        async with await AsyncStreamReader.open(address, broker_connections_max=8) as reader:
            tasks = [asyncio.ensure_future(anext(reader.read_many(ids()))) for _ in range(5)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            with in_time(0.5):
                await asyncio.wait(tasks)
                assert (await reader.read(stream, 3)).offset == 3
    finally:
        more.set()


def test_a_question_that_ends_its_connection_is_not_repeated(
    address: Broker, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker hangs up over it (as some do over Partitions): others' connections are not tried one by one."""
    asked: list[str] = []
    answer = SocketConnection.answer

    def hang_up(self: SocketConnection, request: Any, *arguments: Any) -> Any:
        if frames.Command.PARTITIONS not in arguments:
            return answer(self, request, *arguments)
        asked.extend(arguments[1:])
        self.abandon()
        raise ConnectionLost("The broker hung up.")

    monkeypatch.setattr(SocketConnection, "answer", hang_up)
    with StreamReader.open(address) as reader, contextlib.ExitStack() as stack:
        # Three connections, which are idle afterwards and are then reused.
        for _ in range(3):
            next(stack.enter_context(contextlib.closing(reader.iterate(stream))))  # type: ignore[type-var]
        stack.close()
        assert reader.statistics().idle == 3
        with pytest.raises((ConnectionLost, BrokerUnavailable)):
            reader.partitions("a super stream")
    assert asked == ["a super stream"]


@pytest.mark.parametrize("ask", ["question", "iteration", "following"])
async def test_a_task_cancelled_while_the_broker_is_silent_leaves_nothing_behind(
    address: Broker, stream: str, proxy: Proxy, ask: str
) -> None:
    """It ends at once, its connection is given back, and no thread waits on for an answer."""
    async with (
        await AsyncStreamReader.open(address, broker_connections_max=2) as reader,
        contextlib.AsyncExitStack() as stack,
    ):
        following = await stack.enter_async_context(
            contextlib.aclosing(reader.iterate(stream, "next" if ask == "following" else 9, follow=ask == "following"))
        )
        if ask == "iteration":
            proxy.mode = "frozen"
        asked: Any = reader.read(stream, 3) if ask == "question" else anext(following)
        if ask == "question":
            assert (await reader.read(stream, 3)).offset == 3
            proxy.mode = "frozen"
        task = asyncio.ensure_future(asked)
        await asyncio.sleep(0.3)
        assert not task.done()
        with in_time(0.2):
            await cancel(task)
        await following.aclose()
        statistics = reader.statistics()
        assert (statistics.in_use, statistics.waiting, statistics.following) == (0, 0, 0)
        proxy.mode = "pass"
        found = await asyncio.gather(*(reader.read(stream, n) for n in range(10)))
        assert [message.offset for message in found] == list(range(10))


async def test_iterations_that_stand_still_do_not_keep_questions_from_being_asked(address: Broker, stream: str) -> None:
    """As many as may be open, and more that wait; questions are answered, and each iteration continues."""
    async with await AsyncStreamReader.open(address, broker_connections_max=4, timeout_s=60) as reader:
        open_ones = [reader.iterate(stream) for _ in range(3)]
        firsts = [await anext(each) for each in open_ones]
        waiting = [asyncio.create_task(_take_one(reader, stream)) for _ in range(8)]
        found = await asyncio.gather(*(reader.read(stream, n % 10) for n in range(60)))
        assert [message.offset for message in found] == [n % 10 for n in range(60)]
        assert reader.statistics().waiting == len(waiting)
        rests = [[message.offset async for message in each] for each in open_ones]
        assert rests == [list(range(first.offset + 1, 10)) for first in firsts]
        assert await asyncio.gather(*waiting) == [0] * len(waiting)


async def _take_one(reader: AsyncStreamReader, stream: str) -> int:
    async with contextlib.aclosing(reader.iterate(stream)) as messages:
        return (await anext(messages)).offset


def test_followed_streams_are_beside_the_limit(address: Broker, stream: str) -> None:
    """A recorder of many streams has a connection for each, and still asks."""
    with StreamReader.open(address, broker_connections_max=2) as reader, contextlib.ExitStack() as stack:
        for _ in range(4):
            followed = stack.enter_context(contextlib.closing(reader.iterate(stream, follow=True)))  # type: ignore[type-var]
            assert len(list(islice(followed, 10))) == 10
        assert reader.read(stream, 1).body == b"1"
        assert (reader.statistics().following, reader.statistics().in_use) == (4, 0)


@pytest.mark.parametrize(("kind", "step"), [(StreamReader, next), (AsyncStreamReader, anext)])
def test_a_batched_read_holds_no_connection_for_what_has_come(
    kind: Any, step: Any, address: Broker, stream: str
) -> None:
    """A read that has given all that was asked for holds no connection, though nobody has ended it."""
    with asyncio.Runner() as runner:
        reader = result_of(runner, kind.open(address, broker_connections_max=2))
        reads = []
        for _ in range(5):
            reads.append(reader.read_many([MessageId(stream, n) for n in range(10)]))
            assert [result_of(runner, step(reads[-1])).offset for _ in range(10)] == list(range(10))
            assert reader.statistics().in_use == 0
        assert [list(result_of(runner, each)) for each in reads] == [[]] * 5
        result_of(runner, reader.close())


def test_a_name_that_is_missing_stays_within_the_limit(amqp_url: str, stream_url: str, proxy: Proxy) -> None:
    """What asks AMQP 0.9.1 about a missing name has a place, too: threads that ask at once do not open one each."""
    with Proxy.to(amqp_url) as asked:
        address = Broker(asked.url(amqp_url), stream_url=proxy.url(stream_url))
        with (
            StreamReader.open(address, broker_connections_max=2, timeout_s=60) as reader,
            ThreadPoolExecutor(12) as threads,
        ):
            asking = [threads.submit(reader.read, "there-is-none", 0) for _ in range(12)]
            assert {type(each.exception()) for each in asking} == {StreamNotFound}
        assert asked.most <= 3
        assert proxy.most <= 2


def test_batched_reads_of_missing_names_do_not_wait_for_each_other(address: Broker, amqp_url: str) -> None:
    """To find out what a name is takes another connection: it is asked for when one's own have been given back."""
    with (
        new_streams(amqp_url, 12) as streams,
        StreamReader.open(address, broker_connections_max=2, timeout_s=10) as reader,
        ThreadPoolExecutor(4) as threads,
    ):
        for stream in streams:
            publish_plain(amqp_url, stream, [b""])
        ids = [MessageId("there-is-none", 0), *(MessageId(stream, 0) for stream in streams)]
        found = list(threads.map(lambda _: reader.read_all(ids), range(12)))
    for first, *others in found:
        assert type(first) is StreamNotFound
        assert [each.id for each in others] == ids[1:]


@pytest.mark.parametrize(("most", "lets_in", "opened"), [(16, True, 4), (16, False, 1), (2, True, 1)])
def test_connections_for_attaches_are_those_that_can_be_had(
    address: Broker, amqp_url: str, proxy: Proxy, most: int, lets_in: bool, opened: int
) -> None:
    """Half of those a reader may have, and none beside the first where the broker lets nobody in."""
    with new_streams(amqp_url, 10) as streams, StreamReader.open(address, broker_connections_max=most) as reader:
        for stream in streams:
            publish_plain(amqp_url, stream, [b""])
        proxy.accepts = lets_in
        ids = [MessageId(stream, 0) for stream in streams]
        assert [each.id for each in reader.read_all(ids) if isinstance(each, Message)] == ids
        assert (reader.statistics().opened, reader.statistics().in_use) == (opened, 0)


def test_a_reader_that_was_never_opened_connects_at_its_first_request(address: Broker, stream: str) -> None:
    """`open` only connects at once."""
    with StreamReader(address) as reader:
        assert reader.statistics().opened == 0
        assert reader.bounds(stream) == (0, 9)


def test_a_reader_that_cannot_be_opened_is_in_no_metrics() -> None:
    """Although the error refers to it."""
    broker = Broker("amqp://127.0.0.1:1", stream_url="rabbitmq-stream://127.0.0.1:1")
    gc.collect()
    before = metrics.exposition()
    with pytest.raises(BrokerUnavailable):
        StreamReader.open(broker)
    assert metrics.exposition() == before


def test_a_reader_that_is_closed_while_it_connects_keeps_no_connection(address: Broker, proxy: Proxy) -> None:
    """Closing does not wait for the broker's answer, and nothing connects after it."""
    reader = StreamReader(address, refusing="this is closed")
    assert (proxy.opened, reader.statistics().in_use) == (0, 0)
    proxy.mode = "frozen"
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(reader.missing, ["nothing"])
        wait_until(lambda: reader.statistics().in_use, what="a reader that connects")
        with in_time(5):
            reader.close()
        proxy.mode = "pass"
        assert asking.result() == ["nothing"]
    wait_until(lambda: proxy.opened and not proxy._peers, what="its connection is closed")
    for late in (lambda: reader.missing(["nothing"]), lambda: reader.link(None)):
        with pytest.raises(UsedAfterClose, match="this is closed"):
            late()
