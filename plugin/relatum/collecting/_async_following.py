"""The tasks that follow streams: one member at a time reads a stream, from the position that all share."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from relatum.collecting._agreeing import LastCollected, ReadAt, last_agreed
from relatum.collecting._async_shared import AsyncShared
from relatum.collecting._collector_state import logger
from relatum.collecting._following import AGAIN_S, IDLE_S, STANDBY_S, is_another, readable
from relatum.collecting._intake import TypeOf, describe_followed
from relatum.collecting._ports import Followed
from relatum.errors import Conflict
from relatum.ids import MessageId
from relatum.reading import AsyncStreamReader, RecordBatch, StreamBounds, async_agreement
from relatum.steps import async_run
from relatum.waiting import Pauses, ended

OpenAsyncReader = Callable[[], Awaitable[AsyncStreamReader]]


class AsyncFollower:
    """Follows one stream, in a task of its own, until the collector stops.

    Args:
        shared: What the collector's tasks share.
        stream: The stream.
        open_reader: Opens a reader.
        type_of: Tells messages' types.
        initial: Where to begin with it, if it was never followed.
    """

    def __init__(
        self,
        shared: AsyncShared,
        stream: str,
        *,
        open_reader: OpenAsyncReader,
        type_of: TypeOf,
        initial: Callable[[StreamBounds], int],
    ) -> None:
        self._shared = shared
        self._stream = stream
        self._who = shared.who(f"following stream {stream!r}")
        self._open_reader = open_reader
        self._type_of = type_of
        self._initial = initial
        self._was_followed = False
        self.task = asyncio.create_task(self._run(), name=f"relatum-{stream}")

    async def _run(self) -> None:
        pauses, stopping, pause_s = Pauses(), self._shared.stopping, AGAIN_S
        while not stopping.is_set():
            try:
                await self._session()
                pauses, pause_s = Pauses(), AGAIN_S
            except Conflict as error:
                # Another member came between: nothing is wrong.
                logger.info("%s begins anew: %s", self._who, ended(error))
                pause_s = pauses.after(error)
            except Exception as error:  # noqa: BLE001 - whatever it was, the stream is followed again
                self._shared.outages.failed(self._who, error)
                pause_s = pauses.after(error)
            await self._stops_within(pause_s)

    async def _stops_within(self, limit_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._shared.stopping.wait(), limit_s)
        return self._shared.stopping.is_set()

    async def _session(self) -> None:
        """Follow as soon as no other member does, until something ends it."""
        shared, member = self._shared, self._shared.member
        async with await self._open_reader() as reader:
            initial = self._initial(await reader.bounds(self._stream))
            follow = partial(shared.store.follow, member, self._stream, initial)
            while (followed := await shared.in_thread(follow)) is None:
                shared.outages.over(self._who)
                if await self._stops_within(STANDBY_S) or shared.member != member:
                    return
            self._say_where(followed)
            try:
                known = await self._known_again(reader, followed)
                shared.outages.over(self._who)
                await self._follow(reader, known)
            finally:
                await self._leave(member)

    def _warn(self, text: str, *values: object, **fields: object) -> None:
        extra = {"stream": self._stream, **fields}
        logger.warning(f"collector %r: {text}", self._shared.store.name, *values, extra=extra)

    def _say_where(self, followed: Followed) -> None:
        """Say, once, that what was given as `start` does not count."""
        if not followed.is_new and not self._was_followed:
            text = "collector %r: going on with stream %r at %d, where it was; start is for streams it never followed"
            logger.info(text, self._shared.store.name, self._stream, followed.next_offset)
        self._was_followed = True

    async def _known_again(self, reader: AsyncStreamReader, followed: Followed) -> Followed:
        """As `Follower._known_again`."""
        shared, known_by = self._shared, followed.known_by
        if known_by is None or not is_another(self._stream, await async_agreement(reader, self._stream, known_by)):
            return followed
        self._warn("stream %r was deleted and declared again: what it has now is collected", self._stream)
        # Places mean something else from now on: what lay there before is consumed first.
        while shared.core.holds_of(self._stream) and not shared.stopping.is_set():
            await shared.changed.wait(IDLE_S)
        bounds = await reader.bounds(self._stream)
        agreed = await self._last_agreed(reader, bounds)
        if agreed is None:
            anew = partial(shared.store.begin_anew, shared.member, self._stream, bounds.first or 0)
            return await shared.in_thread(anew)
        self._warn("stream %r has lost its end: gone on with behind offset %d", self._stream, agreed, agreed=agreed)
        return await shared.in_thread(partial(shared.store.cut_back, shared.member, self._stream, agreed))

    async def _last_agreed(self, reader: AsyncStreamReader, bounds: StreamBounds) -> int | None:
        """As `Follower._last_agreed`."""

        async def perform(request: LastCollected | ReadAt) -> Any:
            if isinstance(request, LastCollected):
                last_collected = partial(self._shared.store.last_collected, self._stream, request.until)
                return await self._shared.in_thread(last_collected)
            (read,) = await reader.read_all([MessageId(self._stream, request.offset)])
            return readable(read)

        return await async_run(last_agreed(bounds), perform)

    async def _follow(self, reader: AsyncStreamReader, followed: Followed) -> None:
        shared, member = self._shared, self._shared.member
        shared.intake.follow(self._stream, followed)
        logger.info(
            "collector %r: following stream %r from %d on", shared.store.name, self._stream, followed.next_offset
        )
        expected = followed.next_offset
        read = reader.batches(self._stream, followed.next_offset, follow=True, idle_s=IDLE_S)
        async with aclosing(read) as batches:
            async for batch in batches:
                if shared.stopping.is_set() or shared.member != member:
                    return
                if batch is not None:
                    await self._look_for_hole(reader, expected, batch.first_offset)
                    expected = batch.last_offset + 1
                    if not await self._take(batch):
                        break
                elif not shared.intake.is_followed(self._stream):
                    break
        shared.intake.raise_ended(self._stream)

    async def _look_for_hole(self, reader: AsyncStreamReader, expected: int, found: int) -> None:
        """Say where retention was faster; streams have gaps in good health, too, so the stream is asked."""
        if found <= expected:
            return
        first = (await reader.bounds(self._stream)).first
        if first is not None and first > expected:
            text = "retention dropped offsets %d to %d of stream %r before they were collected"
            self._warn(text, expected, found - 1, self._stream, **{"from": expected, "to": found})

    async def _take(self, batch: RecordBatch) -> bool:
        """Hand a batch over, waiting for room; False where that has to end."""
        shared = self._shared
        messages = [describe_followed(message, self._type_of) for message in batch.each_message()]
        while messages:
            if shared.stopping.is_set() or not shared.intake.is_followed(self._stream):
                return False
            taken = shared.intake.take(self._stream, messages, time.monotonic())
            if taken:
                shared.changed.notify()
            messages = messages[taken:]
            if messages:
                await shared.changed.wait(IDLE_S)
        return True

    async def _leave(self, member: int) -> None:
        """Let another member follow, once what was gathered is stored."""
        shared = self._shared
        while not shared.intake.is_stored(self._stream) and not shared.is_abandoned:
            await shared.changed.wait(IDLE_S)
        shared.intake.unfollow(self._stream)
        if not shared.is_abandoned:
            await shared.in_thread(partial(shared.store.unfollow, member, self._stream))
