"""The tasks that follow streams: one member at a time reads a stream, from the position that all share."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from relatum.collecting._agreeing import LastCollected, ReadAt, last_agreed
from relatum.collecting._async_shared import AsyncShared
from relatum.collecting._collector_state import logger
from relatum.collecting._feed import AsyncFeed
from relatum.collecting._following import AGAIN_S, IDLE_S, STANDBY_S, readable
from relatum.collecting._intake import TypeOf, describe_followed
from relatum.collecting._ports import Followed
from relatum.errors import Conflict
from relatum.following import Attached, Event, Failed, Hole, Records, Replaced
from relatum.ids import MessageId
from relatum.reading import AsyncStreamReader, RecordBatch, StreamBounds
from relatum.steps import async_run
from relatum.waiting import Pauses, ended

OpenAsyncReader = Callable[[], Awaitable[AsyncStreamReader]]


class AsyncCollectedStream:
    """Follows one stream, in a task of its own, until the collector stops.

    Args:
        shared: What the collector's tasks share.
        stream: The stream.
        feed: Where streams are read.
        open_reader: Opens a reader, for questions.
        type_of: Tells messages' types.
        initial: Where to begin with it, if it was never followed.
    """

    def __init__(
        self,
        shared: AsyncShared,
        stream: str,
        *,
        feed: AsyncFeed,
        open_reader: OpenAsyncReader,
        type_of: TypeOf,
        initial: Callable[[StreamBounds], int],
    ) -> None:
        self._shared = shared
        self._stream = stream
        self._who = shared.who(f"following stream {stream!r}")
        self._feed = feed
        self._open_reader = open_reader
        self._type_of = type_of
        self._initial = initial
        self._was_followed = self._is_attached = False
        self.task = asyncio.create_task(self._run(), name=f"relatum-{stream}")

    async def _run(self) -> None:
        pauses, stopping, pause_s = Pauses(), self._shared.stopping, AGAIN_S
        while not stopping.is_set():
            try:
                self._is_attached = False
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
            with self._feed.following(self._stream, followed.next_offset, followed.known_by) as events:
                await self._follow(events, followed)
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

    async def _find_again(self) -> None:
        """As `CollectedStream._find_again`."""
        self._warn("stream %r was deleted and declared again: what it has now is collected", self._stream)
        shared = self._shared
        # Places mean something else from now on: what lay there before is consumed first.
        while shared.core.holds_of(self._stream) and not shared.stopping.is_set():
            await shared.changed.wait(IDLE_S)
        async with await self._open_reader() as reader:
            bounds = await reader.bounds(self._stream)
            agreed = await self._last_agreed(reader, bounds)
        if agreed is None:
            anew = partial(shared.store.begin_anew, shared.member, self._stream, bounds.first or 0)
            await shared.in_thread(anew)
            return
        self._warn("stream %r has lost its end: gone on with behind offset %d", self._stream, agreed, agreed=agreed)
        await shared.in_thread(partial(shared.store.cut_back, shared.member, self._stream, agreed))

    async def _last_agreed(self, reader: AsyncStreamReader, bounds: StreamBounds) -> int | None:
        """As `CollectedStream._last_agreed`."""

        async def perform(request: LastCollected | ReadAt) -> Any:
            if isinstance(request, LastCollected):
                last_collected = partial(self._shared.store.last_collected, self._stream, request.until)
                return await self._shared.in_thread(last_collected)
            (read,) = await reader.read_all([MessageId(self._stream, request.offset)])
            return readable(read)

        return await async_run(last_agreed(bounds), perform)

    async def _follow(self, events: "asyncio.Queue[Event]", followed: Followed) -> None:
        """Go through what comes, until the stream is another member's, or cannot be read now."""
        shared, member = self._shared, self._shared.member
        while not shared.stopping.is_set() and shared.member == member:
            try:
                event = await asyncio.wait_for(events.get(), IDLE_S)
            except TimeoutError:
                if shared.intake.is_followed(self._stream) or not self._is_attached:
                    continue
                break
            try:
                if not await self._handle(event, followed):
                    break
            finally:
                self._feed.follower.done(event)
        else:
            return
        shared.intake.raise_ended(self._stream)

    async def _handle(self, event: Event, followed: Followed) -> bool:
        """As `CollectedStream._handle`."""
        if isinstance(event, Records):
            return await self._take(event.batch)
        if isinstance(event, Attached):
            # Once: a connection may be replaced meanwhile.
            if not self._is_attached:
                self._begin(followed)
        elif isinstance(event, Replaced):
            await self._find_again()
            return False
        elif isinstance(event, Hole):
            text = "retention dropped offsets %d to %d of stream %r before they were collected"
            places = {"from": event.from_offset, "to": event.to_offset}
            self._warn(text, event.from_offset, event.to_offset - 1, self._stream, **places)
        elif isinstance(event, Failed):
            raise event.error
        return True

    def _begin(self, followed: Followed) -> None:
        """The stream is the one that was collected: take what comes."""
        shared = self._shared
        self._is_attached = True
        shared.outages.over(self._who)
        shared.intake.follow(self._stream, followed)
        logger.info(
            "collector %r: following stream %r from %d on", shared.store.name, self._stream, followed.next_offset
        )

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
