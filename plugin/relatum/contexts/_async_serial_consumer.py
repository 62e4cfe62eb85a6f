"""The asyncio serial consumer and its batches: tasks wait in the event loop for batches that threads read."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cached_property
from typing import Final, Self

import sqlalchemy as sa

from relatum.common.checks import checked_callable, checked_seconds
from relatum.common.closing import AsyncClosing
from relatum.common.waiting import Threads, in_thread
from relatum.contexts._partition_following import Step
from relatum.contexts._serial_consumer import CLOSE_S, POLL_S, BatchBase, ConsumerBase, processing_span
from relatum.contexts._serial_member import Taken
from relatum.contexts._serial_partition import Partition
from relatum.contexts._serial_status import SerialStatus
from relatum.reading import Message

THREADS_MAX: Final = 32
"""The most concurrent calls of PostgreSQL, such as commits."""


class AsyncSerialBatch(BatchBase):
    __doc__ = BatchBase.__doc__

    def __init__(self, source: Partition, step: Step, threads: Threads) -> None:
        super().__init__(source, step)
        self._threads = threads

    async def acknowledge(self) -> None:
        """Store that these messages are consumed; see `SerialBatch.acknowledge`."""
        self._check()
        await asyncio.shield(in_thread(self._threads, self._acknowledge))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sa.Connection]:
        """Open a transaction that acknowledges the batch when it commits; see `SerialBatch.transaction`.

        The connection is blocking: use it in threads (`await asyncio.to_thread(connection.execute, statement)`).
        """
        # A transaction has its own thread, and never queues behind calls that wait for PostgreSQL.
        context, threads = self._transaction(), Threads(1, f"relatum-transaction-{self.partition}")
        cancelled = asyncio.CancelledError, asyncio.CancelledError(), None
        async with AsyncExitStack() as stack:
            stack.callback(threads.shutdown)
            connection = await in_thread(threads, context.__enter__, returned=lambda _: context.__exit__(*cancelled))
            stack.push_async_exit(lambda *ended: asyncio.shield(in_thread(threads, context.__exit__, *ended)))
            yield connection


class AsyncSerialConsumer(ConsumerBase, AsyncClosing):
    """`SerialConsumer` for asyncio: the same methods, options and guarantees, in one event loop.

    Threads read partitions and call PostgreSQL. An async context manager: entering starts the consumer, leaving closes
    it. A cancelled call takes no batch.

    Args: see `SerialConsumer`.
    """

    @cached_property
    def _threads(self) -> Threads:
        return Threads(THREADS_MAX, f"relatum-{self.name}-asks")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Join as a member of the consumer with this name, and start to read; see `SerialConsumer.start`.

        A cancelled call undoes the start before it ends.
        """
        self._check_startable()
        starting = asyncio.ensure_future(in_thread(self._threads, self._member.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.shield(self._undo_start(starting))
            raise
        self._is_started = True

    async def _undo_start(self, starting: "asyncio.Future[None]") -> None:
        # The caller cancelled the start, so its error has no receiver.
        with suppress(Exception):
            await starting
        await in_thread(self._threads, self._member.close, CLOSE_S)

    async def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop reading and immediately release the partitions; see `SerialConsumer.close`."""
        checked_seconds("timeout_s", timeout_s)
        if self._is_closed:
            return True
        self._is_closed = True
        # Use other threads: those of this consumer may all be waiting for PostgreSQL. They end when they are idle.
        return await asyncio.shield(in_thread(None, self._member.close, timeout_s))

    async def next_batch(self, timeout_s: float | None = None) -> AsyncSerialBatch | None:
        """Return the next batch of any partition; see `SerialConsumer.next_batch`."""
        for waiting, left_s in self._waits(timeout_s):
            try:
                await self._wait_for_batch(waiting, left_s)
            except BaseException:
                self._member.give_up(waiting)
                raise
            taken = self._member.taken(waiting)
            if taken is not None:
                return AsyncSerialBatch(*taken, self._threads)
        return None

    async def _wait_for_batch(self, waiting: "Future[Taken]", timeout_s: float | None) -> None:
        """Wait until a batch is available, at most for `timeout_s`."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object) -> None:
            try:
                loop.call_soon_threadsafe(ended.set)
            except RuntimeError:
                self._member.give_up(waiting)  # The event loop has ended.

        waiting.add_done_callback(wake)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ended.wait()

    async def batches(self, timeout_s: float | None = None) -> AsyncIterator[AsyncSerialBatch]:
        """Iterate over batches; see `SerialConsumer.batches`."""
        while (batch := await self.next_batch(timeout_s)) is not None:
            yield batch

    async def messages(self, timeout_s: float | None = None) -> AsyncIterator[Message]:
        """Iterate over messages; see `SerialConsumer.messages`."""
        async for batch in self.batches(timeout_s):
            # If the loop ends inside a batch, the whole batch is delivered again.
            with self._give_back_on_error(batch):
                for message in batch.messages:
                    yield message
                await asyncio.shield(in_thread(self._threads, self._acknowledge, batch))

    def __aiter__(self) -> AsyncIterator[Message]:
        return self.messages()

    async def run(
        self, handler: Callable[[AsyncSerialBatch], Awaitable[object]], stop: asyncio.Event | None = None
    ) -> None:
        """Call a coroutine function with each batch in turn; see `SerialConsumer.run`."""
        checked_callable("handler", handler)
        while not self._is_ending(stop):
            batch = await self.next_batch(POLL_S)
            if batch is None:
                continue
            with self._give_back_on_error(batch):
                with processing_span(self.super_stream, self.name, batch):
                    await handler(batch)
                if not batch.is_acknowledged:
                    await asyncio.shield(in_thread(self._threads, self._acknowledge, batch, stop))

    async def status(self) -> SerialStatus:
        """Return the status of each partition; see `SerialConsumer.status`."""
        return await in_thread(self._threads, self._status)
