"""The message collector, with asyncio."""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from relatum.checks import checked_event, checked_name, checked_seconds
from relatum.collecting._async_executing import AsyncExecutor
from relatum.collecting._async_following import AsyncCollectedStream
from relatum.collecting._async_keeping import keep_until_end, look_until_end, store_until_end, tick_until_end
from relatum.collecting._async_shared import AsyncShared
from relatum.collecting._async_workers import AsyncWorker
from relatum.collecting._collector import CLOSE_S, END_S
from relatum.collecting._collector_base import Collector
from relatum.collecting._collector_core import Verdict
from relatum.collecting._collector_options import CollectorLimits
from relatum.collecting._collector_state import logger
from relatum.collecting._feed import AsyncFeed
from relatum.collecting._ports import Store
from relatum.errors import AccessRefused, ConfigurationError, NotAStream, StreamNotFound, Transient
from relatum.outcomes import Outcome
from relatum.reading import AsyncStreamReader, Message
from relatum.waiting import backoff


class AsyncMessageCollector(Collector[AsyncShared, AsyncExecutor]):
    """The asyncio twin of `MessageCollector`: the same names, options and promises, in one event loop.

    An executor that is a coroutine function is awaited in the loop; any other is called in a thread. With
    `joins_transaction` its `bulk.connection` is a blocking one: a coroutine function uses it in threads
    (`await asyncio.to_thread(bulk.connection.execute, statement)`), a plain function as it is. Handlers are called in
    the loop; one that is a coroutine function is awaited. PostgreSQL is asked, and dead letters are published, in
    threads.

    An async context manager: entering starts it, leaving closes it. Cancelling a call leaves nothing behind; cancelling
    `close` ends all tasks at once, and what was under way is left to the other members, or to the next start.

    Args: as for `MessageCollector`.
    """

    def _prepare(self, store: Store, limits: CollectorLimits, broker: str) -> AsyncShared:
        self._followers: dict[str, AsyncCollectedStream] = {}
        self._feed: AsyncFeed | None = None
        self._workers: list[AsyncWorker] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = asyncio.Lock()
        self._closer: asyncio.Task[bool] | None = None
        self._is_closed = False
        self._in_time = False
        return AsyncShared(store, limits, broker)

    # --- messages in ----------------------------------------------------------------------------------------------

    async def collect(self, message: Message, *, timeout_s: float | None = None) -> bool:
        """Take a message; see `MessageCollector.collect`. Cancelled while it waits for room, nothing was taken."""
        return (await self.collect_many([message], timeout_s=timeout_s))[0]

    async def collect_many(self, messages: Iterable[Message], *, timeout_s: float | None = None) -> list[bool]:
        """Take messages, in order; see `MessageCollector.collect_many`. Cancelled, the first of them may be taken."""
        if not self._is_started:
            raise ConfigurationError("the collector does not run: start it")
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        if self._is_storer():
            timeout_s = 0.0
        described = self._described(messages)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        shared, taken = self._shared, []
        for message in described:
            while (verdict := shared.intake.collect(message, time.monotonic())) is Verdict.WAIT:
                shared.changed.notify()
                remaining = None if until is None else until - time.monotonic()
                if remaining is not None and remaining <= 0:
                    break
                await shared.changed.wait(remaining)
            taken.append(verdict in (Verdict.TAKEN, Verdict.KNOWN))
        shared.changed.notify()
        return taken

    async def flush(self, type: str | None = None) -> None:  # noqa: A002 - RabbitMQ's word for it
        """Close the bulk being filled of a type, or of all; see `MessageCollector.flush`."""
        self._check_flushed(type)
        shared, waits = self._shared, not self._is_storer()
        mark = shared.intake.mark()
        while waits and not shared.intake.is_stored_to(mark) and not shared.is_abandoned:
            await shared.changed.wait(1.0)
        shared.core.flush(type)
        shared.changed.notify()

    def _is_storer(self) -> bool:
        """Whether the calling task is the one that stores, in a handler: it must not wait for what it does itself."""
        return bool(self._keepers) and asyncio.current_task() is self._keepers[0]

    async def outcome(self, message_id: str) -> Outcome:
        """What became of a message of this collector, by any member."""
        checked_name("message_id", message_id)
        return (await asyncio.to_thread(self._shared.store.outcomes_of, [message_id]))[message_id]

    # --- its life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the collector's members, and begin; see `MessageCollector.start`. Cancelled, it was not started."""
        self._check_startable()
        await self._check_dead_letters()
        names = await self._find_streams()
        await self._check_streams(names)
        await self._join_members()
        self._is_started = True
        self._start_workers()
        self._keepers = [
            _task(store_until_end(self._shared), f"relatum-{self.name}-storer"),
            _task(tick_until_end(self._shared), f"relatum-{self.name}-ticker"),
            _task(keep_until_end(self._shared, self._lease_s), f"relatum-{self.name}-keeper"),
        ]
        if names:
            self._keepers.append(_task(look_until_end(self._shared, self._look), f"relatum-{self.name}-looker"))
        self._follow(names)

    async def _join_members(self) -> None:
        shared = self._shared
        workers = sum(shared.core.options_of(each).bulks_at_once for each in self._executors)
        shared.begin_threads(workers)
        opening = shared.submit(partial(shared.store.open, shared.core.types, self._lease_s))
        try:
            shared.member = await asyncio.shield(asyncio.wrap_future(opening))
        except BaseException:
            await asyncio.shield(_task(self._undo(opening), f"relatum-{self.name}-end"))
            raise

    async def _undo(self, opening: "Future[int]") -> None:
        """Leave nothing of a start that failed, or was cancelled on its way."""
        await self._shared.end_threads(END_S)
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            self._shared.member = opening.result()
            await asyncio.to_thread(self._leave)
        else:
            await asyncio.to_thread(self._shared.store.dispose)

    def _start_workers(self) -> None:
        for type_, executor in self._executors.items():
            options = self._shared.core.options_of(type_)
            for _ in range(options.bulks_at_once):
                open_reader = None if self._address is None else self._open_reader
                worker = AsyncWorker(
                    self._shared, type_, options, executor, open_reader=open_reader, dead_letters=self._dead_letters
                )
                self._workers.append(worker)

    async def _check_dead_letters(self) -> None:
        if self._dead_letters is None:
            return
        async with await self._open_reader() as reader:
            try:
                await reader.bounds(self._dead_letters.stream)
            except NotAStream:
                logger.info("dead letters go to %r, which is a queue", self._dead_letters.stream)

    async def _open_reader(self) -> AsyncStreamReader:
        assert self._address is not None, "only what has a broker is read"
        return await AsyncStreamReader.open(self._address)

    async def _find_streams(self) -> list[str]:
        """The streams to follow: those named, or the partitions where the name is a super stream's."""
        if self._plain.issuperset(self._streams):
            return self._checked_followed(list(self._streams))
        async with await self._open_reader() as reader:
            found: list[str] = []
            for name in self._streams:
                if name in self._plain:
                    found.append(name)
                    continue
                partitions = await reader.partitions(name)
                found += partitions or [name]
                if not partitions and await reader.routes("", name) != []:
                    # A stream is no super stream: asked once, since the broker logs an error each time.
                    self._plain.add(name)
        return self._checked_followed(found)

    async def _check_streams(self, names: Sequence[str]) -> None:
        """Refuse what never becomes a stream; one that is missing, or away, is waited for when it is followed."""
        if not names:
            return
        async with await self._open_reader() as reader:
            for name in names:
                with suppress(Transient, StreamNotFound, AccessRefused):
                    # What is a stream needs no second look; what is none is told apart by the other question.
                    if await reader.routes("", name) == []:
                        await reader.bounds(name)

    async def _look(self) -> None:
        self._follow(await self._find_streams())

    def _follow(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._followers:
                assert self._address is not None, "streams are followed on a broker"
                if self._feed is None:
                    self._feed = AsyncFeed(self._address, self.name)
                self._followers[name] = AsyncCollectedStream(
                    self._shared,
                    name,
                    feed=self._feed,
                    open_reader=self._open_reader,
                    type_of=self._type_of,
                    initial=self._initial,
                )

    async def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop in order; see `MessageCollector.close`. Cancelled, it ends all tasks at once."""
        checked_seconds("timeout_s", timeout_s)
        if not self._is_started:
            return True
        if asyncio.current_task() in self._tasks():
            # What closed it here would wait for itself.
            self._closer = asyncio.create_task(self.close(timeout_s), name=f"relatum-{self.name}-closer")
            return False
        async with self._closing:
            if self._is_closed:
                return self._in_time
            self._is_closed = True
            try:
                self._in_time = await self._drain(timeout_s)
                return self._in_time
            finally:
                await asyncio.shield(_task(self._end(), f"relatum-{self.name}-end"))

    def _tasks(self) -> list[asyncio.Task[None]]:
        of_followers = [follower.task for follower in self._followers.values()]
        return [*self._keepers, *of_followers, *(worker.task for worker in self._workers)]

    async def _drain(self, timeout_s: float) -> bool:
        """Take nothing more, close all bulks, and wait for the executors; whether all was done in time."""
        shared, until = self._shared, time.monotonic() + timeout_s
        shared.stopping.set()
        shared.core.stop()
        shared.changed.notify()
        await _wait([follower.task for follower in self._followers.values()], until)
        return await _wait([worker.task for worker in self._workers], until)

    async def _end(self) -> None:
        """End all tasks, and leave the members."""
        shared = self._shared
        shared.stopping.set()
        shared.core.stop()
        shared.is_abandoned = True
        shared.store.end_in(END_S)
        for task in self._tasks():
            task.cancel()
        await _wait(self._tasks(), time.monotonic() + END_S)
        if self._feed is not None:
            await asyncio.to_thread(self._feed.close)
        await shared.end_threads(END_S)
        await asyncio.to_thread(self._leave)

    async def run(self, stop: asyncio.Event) -> None:
        """Start, waiting for servers that are away; go on until `stop` is set; close. Cancelled, it closes, too.

        Raises:
            RelatumError: what waiting would not cure; see `start`.
        """
        checked_event("stop", stop)
        who = self._shared.who("starting")
        for pause in backoff():
            try:
                await self.start()
                self._shared.outages.over(who)
                break
            except Transient as error:
                self._shared.outages.failed(who, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
                return
        try:
            await stop.wait()
        finally:
            await self.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _task(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(coroutine, name=name)


async def _wait(tasks: Iterable[asyncio.Task[None]], until: float) -> bool:
    """Wait for tasks up to a moment; whether all ended."""
    waited = list(tasks)
    if not waited:
        return True
    _, pending = await asyncio.wait(waited, timeout=max(0.0, until - time.monotonic()))
    return not pending
