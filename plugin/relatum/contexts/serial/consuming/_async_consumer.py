"""The serial consumer for tasks: it waits in the event loop for what threads read."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Self

from relatum.checks import checked_callable, checked_seconds
from relatum.closing import AsyncClosing
from relatum.contexts.serial.consuming._consumer import CLOSE_S, LOOK_S, ConsumerBase
from relatum.contexts.serial.consuming._serial_batch import AsyncSerialBatch, consuming, in_thread
from relatum.contexts.serial.consuming._serial_state import log_defect
from relatum.contexts.serial.consuming._serial_status import SerialStatus
from relatum.errors import PartitionLost
from relatum.reading import Message
from relatum.waiting import backoff


class AsyncSerialConsumer(ConsumerBase, AsyncClosing):
    """The asyncio twin of `SerialConsumer`: the same names, options and promises, in one event loop.

    Partitions are read, and PostgreSQL is asked, in threads. An async context manager: entering starts it, leaving
    closes it. A cancelled call takes no batch.

    Args: as for `SerialConsumer`.
    """

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Join the members of this name and begin to read; see `SerialConsumer.start`.

        Cancelled, it waits until what it began is ended, and was not started.
        """
        self._check_startable()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._member.shared.listeners.append(self._notify)
        await in_thread(self._member.start, undo=partial(self._member.close, CLOSE_S))
        self._is_started = True

    def _notify(self) -> None:
        # Of a loop that was closed first, nobody waits any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    async def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop reading and let other members have the partitions at once; see `SerialConsumer.close`."""
        checked_seconds("timeout_s", timeout_s)
        if self._is_closed:
            return True
        self._is_closed = True
        return await asyncio.shield(asyncio.to_thread(self._member.close, timeout_s))

    async def next_batch(self, timeout_s: float | None = None) -> AsyncSerialBatch | None:
        """The next batch of any partition; see `SerialConsumer.next_batch`."""
        until, shared = self._until(timeout_s), self._member.shared
        while not shared.stopping.is_set():
            self._changed.clear()
            now = time.monotonic()
            taken = shared.take(now)
            if isinstance(taken, tuple):
                # Another task may wait for what else there is.
                self._changed.set()
                return AsyncSerialBatch(self._member, *taken)
            if until is not None and now >= until:
                return None
            waits = [at - now for at in (taken, until) if at is not None]
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(waits) if waits else None)
        return None

    async def batches(self, timeout_s: float | None = None) -> AsyncIterator[AsyncSerialBatch]:
        """Batches as they come, each to be acknowledged.

        A partition whose batch is not acknowledged hands out no further one; the others do.

        Args:
            timeout_s: Ends when no batch came for so many seconds; None goes on until the consumer is closed.
        """
        while (batch := await self.next_batch(timeout_s)) is not None:
            yield batch

    async def messages(self, timeout_s: float | None = None) -> AsyncIterator[Message]:
        """Messages one by one. A batch is acknowledged when the message behind its last one is asked for.

        So a message is delivered again where this process dies before it asks for the next ones. While PostgreSQL is
        away, it waits.

        Args:
            timeout_s: Ends when no batch came for so many seconds; None goes on until the consumer is closed.

        Raises:
            TlsRefused, AccessRefused, ConfigurationError: As `next_batch`.
        """
        async for batch in self.batches(timeout_s):
            try:
                for message in batch.messages:
                    yield message
            except GeneratorExit:
                # Whoever left off in the middle is handed all of it again.
                batch.give_back()
                raise
            await self._acknowledge(batch)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self.messages()

    async def run(
        self, handler: Callable[[AsyncSerialBatch], Awaitable[object]], stop: asyncio.Event | None = None
    ) -> None:
        """Hand batches to a coroutine function, one after the other; see `SerialConsumer.run`."""
        checked_callable("handler", handler)
        while not self._is_ending(stop):
            batch = await self.next_batch(LOOK_S)
            if batch is None:
                continue
            try:
                with consuming(self.super_stream, self.name, batch):
                    await handler(batch)
            except PartitionLost as error:
                # Its messages are another member's; this one goes on with what it has.
                log_defect(error, "batch not consumed here", level=logging.INFO)
                continue
            except BaseException:
                batch.give_back()
                raise
            if not batch.is_acknowledged:
                await self._acknowledge(batch, stop)

    async def _acknowledge(self, batch: AsyncSerialBatch, stop: asyncio.Event | None = None) -> None:
        """Acknowledge, waiting for PostgreSQL."""
        pauses, stopping = backoff(), self._member.shared.stopping
        while not stopping.is_set() and not await asyncio.shield(asyncio.to_thread(self._try_acknowledge, batch, stop)):
            until = time.monotonic() + next(pauses)
            while (left_s := until - time.monotonic()) > 0 and not stopping.is_set():
                if self._is_ending(stop):
                    return self._leave(batch)
                await asyncio.sleep(min(left_s, LOOK_S))

    async def status(self) -> SerialStatus:
        """How far the consumer is in each partition, whoever has it, and what it holds back.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer.
            BrokerUnavailable: The broker does not answer.
        """
        return await asyncio.to_thread(self._status)
