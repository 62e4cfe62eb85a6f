"""The serial consumer, with asyncio."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

from relatum.checks import checked_callable
from relatum.contexts.serial.consuming._consumer import CLOSE_S, LOOK_S
from relatum.contexts.serial.consuming._serial_base import ConsumerBase
from relatum.contexts.serial.consuming._serial_batch import AsyncSerialBatch
from relatum.contexts.serial.consuming._serial_options import check_seconds
from relatum.contexts.serial.consuming._serial_state import log_defect
from relatum.contexts.serial.consuming._serial_status import SerialStatus
from relatum.contexts.serial.consuming._threads import in_thread
from relatum.errors import DatabaseUnavailable, PartitionLost
from relatum.reading import Message
from relatum.waiting import backoff


class AsyncSerialConsumer(ConsumerBase[AsyncSerialBatch]):
    """The asyncio twin of `SerialConsumer`: the same names, options and promises, in one event loop.

    Partitions are read, and PostgreSQL is asked, in threads. `on_gained` and `on_lost` are called in the loop. An async
    context manager: entering starts it, leaving closes it. A cancelled call takes no batch.

    Args: as for `SerialConsumer`.
    """

    # --- its life -------------------------------------------------------------------------------------------------

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

    def _tell_gained(self, stream: str) -> None:
        if self._on_gained is not None:
            self._loop.call_soon_threadsafe(self._on_gained, stream)

    def _tell_lost(self, stream: str) -> None:
        if self._on_lost is not None:
            self._loop.call_soon_threadsafe(self._on_lost, stream)

    async def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop reading and let other members have the partitions at once; see `SerialConsumer.close`."""
        check_seconds("timeout_s", timeout_s)
        if self._is_closed:
            return True
        self._is_closed = True
        return await asyncio.shield(asyncio.to_thread(self._member.close, timeout_s))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- messages -------------------------------------------------------------------------------------------------

    async def next_batch(self, timeout_s: float | None = None) -> AsyncSerialBatch | None:
        """The next batch of any partition; see `SerialConsumer.next_batch`."""
        self._check_running()
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        shared = self._member.shared
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
        """Batches as they come, each to be acknowledged; see `SerialConsumer.batches`."""
        while (batch := await self.next_batch(timeout_s)) is not None:
            yield batch

    async def messages(self, timeout_s: float | None = None) -> AsyncIterator[Message]:
        """Messages one by one, acknowledged batch by batch; see `SerialConsumer.messages`."""
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
        while not (self._member.shared.stopping.is_set() or (stop is not None and stop.is_set())):
            batch = await self.next_batch(LOOK_S)
            if batch is None:
                continue
            try:
                await handler(batch)
            except PartitionLost as error:
                log_defect(error, "batch not consumed here", level=logging.INFO)
                continue
            except BaseException:
                batch.give_back()
                raise
            if not batch.is_acknowledged:
                await self._acknowledge(batch)

    async def _acknowledge(self, batch: AsyncSerialBatch) -> None:
        pauses, outages = backoff(), self._member.shared.outages
        who = f"acknowledging a batch of {batch.partition!r}"
        while not self._member.shared.stopping.is_set():
            try:
                await batch.acknowledge()
            except PartitionLost as error:
                outages.forget(who)
                return log_defect(error, "batch not acknowledged", level=logging.INFO)
            except DatabaseUnavailable as error:
                outages.failed(who, error)
            else:
                return outages.over(who)
            await asyncio.sleep(next(pauses))

    async def status(self) -> SerialStatus:
        """How far the consumer is in each partition; see `SerialConsumer.status`."""
        return await asyncio.to_thread(self._status)
