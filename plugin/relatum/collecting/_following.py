"""The streams that a collector follows: a task for each, and what is asked of the store and of leaders for them."""

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from relatum.collecting._bulk import Collected, TypeOf, describe_followed, type_of_property
from relatum.collecting._collector_core import Abandoned, Followed, Lot
from relatum.collecting._handlers import logger
from relatum.collecting._named_streams import NamedStreams, last_agreed
from relatum.errors import Conflict
from relatum.following import Attached, Event, Failed, Hole, Reach, Records, Replaced, StreamFollower
from relatum.reading import BrokerAddress, RecordBatch, ends_of_known
from relatum.waiting import Pauses, ended

if TYPE_CHECKING:
    from relatum.collecting._collector_loop import CollectorLoop

STANDBY_S: Final = 1.0
"""How often a member asks which of the streams that others followed became free: once for all of them."""

AGAIN_S: Final = 0.05
"""Seconds until a stream is followed again where another member came between."""

PARTITIONS_S: Final = 30.0
"""How often super streams are asked for new partitions."""

TAKE_MESSAGES: Final = 500
"""Messages that are taken in together, where so many have come: small chunks are taken in by the dozen."""

CUT_OFF_LOOK_S: Final = 1.0
"""Seconds between two looks whether the broker is reached again, before which no stream is followed."""


class Following:
    """Follows a collector's streams, over one follower. All but its making is for the collector's loop.

    A stream that waits, for room, for an answer, for another member, is waited for by nobody else.
    """

    def __init__(self, shared: "CollectorLoop", address: BrokerAddress, type_of: TypeOf, named: NamedStreams) -> None:
        self.shared = shared
        self.type_of = type_of
        self.follower = StreamFollower(shared.loop, address, self._told)
        self.reach = Reach(self.follower, shared.outages, lambda: next(iter(self.streams)))
        self._named = named
        self.streams: dict[str, CollectedStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, names: Iterable[str]) -> None:
        """Begin with these streams."""
        repeat, who, outages = self.shared.loop.repeat, self.shared.who, self.shared.outages
        repeat(self._look_for_free, who("looking for streams that became free"), outages)
        repeat(self._look_for_new, who("looking for partitions"), outages)
        self.add(names)

    def add(self, names: Iterable[str]) -> None:
        """Follow these streams, too."""
        for name in names:
            if name not in self.streams and not self.shared.is_stopping:
                stream = self.streams[name] = CollectedStream(self, name)
                task = self.shared.loop.spawn(stream.run())
                self._tasks.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self.shared.stir()

    @property
    def is_following(self) -> bool:
        """Whether any stream is not yet left to others."""
        return bool(self._tasks)

    def wake(self) -> None:
        """Have all streams look whether they are still this member's to read."""
        for stream in self.streams.values():
            stream.wake()

    async def close(self) -> None:
        """Read nothing more."""
        self.reach.close()
        await self.follower.close()

    def _told(self, event: Event) -> None:
        """Give an event of the follower to the stream it is about: to all streams, where it names none."""
        for stream in self.streams.values() if event.stream is None else [self.streams[event.stream]]:
            stream.came(event)

    async def _look_for_free(self) -> float:
        """Have those asked for again that nobody else follows."""
        shared = self.shared
        if any(stream.is_standing_by for stream in self.streams.values()) and not shared.is_stopping:
            held = await shared.loop.ask(shared.store.held, shared.member)
            for stream in self.streams.values():
                if stream.name not in held:
                    stream.is_standing_by = False
                    stream.wake()
        return STANDBY_S

    async def _look_for_new(self) -> float:
        """Follow new partitions, too."""
        self.add(await self.shared.loop.ask(self._look))
        return PARTITIONS_S

    # --- what is asked, in threads ------------------------------------------------------------------------------------

    def _look(self) -> list[str]:
        return self._named.find()

    def begin(self, stream: str, member: int, initial: int | None) -> tuple[int, Followed | None]:
        """Follow a stream, if no other member does: where to begin if it is new, and the store's `follow`."""
        if initial is None:
            initial = self._named.initial(self.follower.reader().bounds(stream))
        return initial, self.shared.store.follow(member, stream, initial)

    def find_again(self, stream: str, member: int) -> None:
        """Go on behind the last message that is as it was collected; from the stream's beginning where none is."""
        store, reader = self.shared.store, self.follower.reader()
        bounds = ends_of_known(reader, stream)
        agreed = last_agreed(reader, stream, bounds, partial(store.last_collected, stream))
        if agreed is None:
            store.begin_anew(member, stream, bounds.first or 0)
            return
        text, extra = "collector %r: stream %r has lost its end: gone on with behind offset %d", {"stream": stream}
        logger.warning(text, store.name, stream, agreed, extra={**extra, "agreed": agreed})
        store.cut_back(member, stream, agreed)


class CollectedStream:
    """One stream, for as long as the collector runs: another member's, or followed here.

    Attributes:
        name: The stream's.
        is_standing_by: Whether another member follows it, as far as is known.
        is_attached: Whether it is read here, and is the one that was collected.
    """

    def __init__(self, following: Following, name: str) -> None:
        self.name = name
        self.is_standing_by = self.is_attached = False
        self._following = following
        self._shared = following.shared
        self._follower = following.follower
        self._who = self._shared.who(f"following stream {name!r}")
        self._pauses = Pauses()
        self._woken = asyncio.Event()
        self._events: deque[Event] = deque()
        self._next_offset = 0
        self._is_read = self._was_followed = False

    # --- what it is told ----------------------------------------------------------------------------------------------

    def came(self, event: Event) -> None:
        """Take an event of the follower's; it is given back by `done` when nothing of it is needed any more."""
        if self._is_read:
            self._events.append(event)
            self._woken.set()

    def wake(self) -> None:
        """Look what has changed."""
        self._woken.set()

    # --- what it does -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow it until the collector stops, again after whatever ended that."""
        while not self._shared.is_stopping:
            try:
                pause_s = await self._follow()
            except Abandoned:
                return
            except Exception as error:  # noqa: BLE001 - whatever it was, the stream is followed again
                pause_s = self._pause_after(error)
            await self._rest(pause_s)

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._shared.is_stopping:
                    await self._wait()

    async def _follow(self) -> float:
        """Follow it once, as soon as no other member does; gives the seconds until it is tried again."""
        shared, initial = self._shared, None
        while True:
            if shared.is_stopping or shared.is_cut_off:
                return CUT_OFF_LOOK_S
            member = shared.member
            initial, followed = await shared.loop.ask(self._following.begin, self.name, member, initial)
            if followed is not None:
                break
            shared.outages.over(self._who)
            self.is_standing_by = True
            while self.is_standing_by and not shared.is_stopping:
                await self._wait()
        try:
            if await self._read(member, followed):
                await self._find_again(member)
        finally:
            # It is left to others before that is said; a member that was abandoned leaves all that it followed.
            if not shared.abandoned.is_set():
                await shared.loop.ask(shared.store.unfollow, member, self.name)
        self._pauses = Pauses()
        return AGAIN_S

    async def _wait(self) -> None:
        await self._woken.wait()
        self._woken.clear()

    def _is_over(self, member: int) -> bool:
        """Whether it is not this member's to read any more."""
        shared = self._shared
        return shared.is_stopping or shared.is_cut_off or shared.member != member

    async def _read(self, member: int, followed: Followed) -> bool:
        """Take what comes; whether it ended as the stream is another one now."""
        if not followed.is_new and not self._was_followed:
            # What was given as `start` does not count: said once.
            text = "collector %r: going on with stream %r at %d, where it was; start is for streams it never followed"
            logger.info(text, self._shared.store.name, self.name, followed.next_offset)
        self._is_read = self._was_followed = True
        self._next_offset = followed.next_offset
        self._follower.follow(self.name, followed.next_offset, known=followed.known_by)
        try:
            while not self._is_over(member):
                if not self._events:
                    await self._wait()
                    continue
                if isinstance(self._events[0], Records):
                    await self._take(member)
                    continue
                event = self._events.popleft()
                if isinstance(event, Attached) and not self.is_attached:
                    # Once: a connection may be replaced meanwhile.
                    self._attached()
                elif isinstance(event, Replaced):
                    self._warn("stream %r was deleted and declared again: what it has now is collected", self.name)
                    return True
                elif isinstance(event, Hole):
                    text = "retention dropped offsets %d to %d of stream %r before they were collected"
                    places = {"from": event.from_offset, "to": event.to_offset}
                    self._warn(text, event.from_offset, event.to_offset - 1, self.name, **places)
                elif isinstance(event, Failed):
                    # Another member may read it, meanwhile.
                    raise event.error
            return False
        finally:
            self._is_read = self.is_attached = False
            self._follower.leave(self.name)
            self._follower.done(*self._events)
            self._events.clear()

    def _attached(self) -> None:
        """It is the one that was collected: take what comes."""
        self.is_attached = True
        self._shared.outages.over(self._who)
        text = "collector %r: following stream %r from %d on"
        logger.info(text, self._shared.store.name, self.name, self._next_offset)

    async def _take(self, member: int) -> None:
        """Store what has come, as there is room; the position moves with it."""
        shared, events, messages = self._shared, list[Records](), list[Collected]()
        try:
            await self._describe(events, messages)
            await shared.gather(len(messages))
            await self._describe(events, messages)
            while messages and not self._is_over(member):
                lot = Lot(self.name, self._next_offset)
                del messages[: lot.take(shared.core, messages)]
                if not messages:
                    # More may come while these are stored.
                    self._follower.done(*events)
                if lot.last is None:
                    await shared.changed()
                    continue
                await shared.store_lot(lot)
                self._next_offset = lot.last.offset + 1
                self._pauses = Pauses()
        finally:
            self._follower.done(*events)

    async def _describe(self, events: list[Records], messages: list[Collected]) -> None:
        """Take the records that have come, as many as are stored together."""
        type_of = self._following.type_of
        while len(messages) < TAKE_MESSAGES and self._events and isinstance(event := self._events[0], Records):
            self._events.popleft()
            events.append(event)
            if type_of is type_of_property:
                messages += _described(event.batch, type_of)
            else:
                # A function of the application's may take its time.
                messages += await self._shared.loop.ask(_described, event.batch, type_of)

    async def _find_again(self, member: int) -> None:
        """Places mean something else from now on: what lay there before is consumed first."""
        shared = self._shared
        while shared.core.holds_of(self.name):
            if self._is_over(member):
                return
            await shared.changed()
        await shared.loop.ask(self._following.find_again, self.name, member)

    def _pause_after(self, error: Exception) -> float:
        """Say what ended it; gives the seconds until it is tried again."""
        if isinstance(error, Conflict):
            # Another member came between: nothing is wrong.
            logger.info("%s begins anew: %s", self._who, ended(error))
        else:
            self._shared.outages.failed(self._who, error)
        return self._pauses.after(error)

    def _warn(self, text: str, *values: object, **fields: object) -> None:
        extra = {"stream": self.name, **fields}
        logger.warning(f"collector %r: {text}", self._shared.store.name, *values, extra=extra)


def _described(batch: RecordBatch, type_of: TypeOf) -> list[Collected]:
    return [describe_followed(each, type_of) for each in batch.each_message()]
