"""Follows a collector's streams: finds them, and runs a task that reads and stores the messages of each."""

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from relatum.collecting._bulk import Collected, TypeOf, describe_followed, id_of, id_of_place, type_of_property
from relatum.collecting._collector_core import Abandoned, Followed, Lot
from relatum.collecting._handlers import logger
from relatum.common.checks import checked_count
from relatum.common.ids import MessageId
from relatum.common.limits import INTEGER_MAX
from relatum.common.waiting import BACKOFF_S, Pauses, ended, within
from relatum.errors import ConfigurationError, Conflict, NotAStream, OffsetExpired, OffsetNotFound, StreamNotFound
from relatum.own_messages import DeadLetters
from relatum.reading import BrokerAddress, Message, Position, StreamReader, bounds_or_error, leaders_bounds, position_of
from relatum.reading.following import Attached, Event, Failed, Hole, Records, Replaced, StreamFollower, is_outage

if TYPE_CHECKING:
    from relatum.collecting._collector_loop import CollectorLoop

StartAt = Literal["first", "next"] | int
"""Where to begin in a new stream: its first message, the next message to be published, or an offset."""

STANDBY_S: Final = 1.0
"""Seconds between queries for streams that other members have released; one query for all streams."""

PARTITIONS_S: Final = 30.0
"""Seconds between searches for new partitions."""

CHECK_S: Final = 10.0
"""Seconds for which a start waits for its streams' leaders. On RabbitMQ 3.10, an empty stream takes one."""

TAKE_MESSAGES: Final = 500
"""A transaction with this number of messages takes no further chunk, and does not wait for more."""


class NamedStreams:
    """The named streams and super streams, where to begin in each, and the dead letters. Methods block."""

    def __init__(
        self, address: BrokerAddress | None, names: Sequence[str], start: StartAt, dead_letter_stream: str | None
    ) -> None:
        self.names = list(dict.fromkeys(names))
        self.start: StartAt = start
        self.address = address
        self.ends: dict[str, int | None] = {}  # of the streams that the last `checked` found; None: unknown
        self._plain_streams: set[str] = set()
        self._reader: StreamReader | None = None
        if start not in ("first", "next"):
            checked_count("start", start, least=0, most=INTEGER_MAX, otherwise=", 'first' or 'next'")
        if address is None and (names or dead_letter_stream):
            raise ConfigurationError("streams= and dead_letter_stream= need a broker: pass broker=")
        self.dead_letters = DeadLetters(address, dead_letter_stream) if address and dead_letter_stream else None
        self._refuse_dead_letters(self.names)

    def _refuse_dead_letters(self, names: list[str]) -> list[str]:
        if self.dead_letters is not None and self.dead_letters.stream in names:
            raise ConfigurationError(
                f"the dead-letter stream {self.dead_letters.stream!r} is also followed, so each dead letter would be "
                "collected again, forever: name another stream"
            )
        return names

    def open(self) -> None:
        """Create a new reader, which connects when it is first used."""
        self._reader = None if self.address is None else StreamReader(self.address)

    def reader(self) -> StreamReader:
        """Return the reader for bodies and for queries about streams; `close` closes it."""
        assert self._reader is not None, "nothing is read without a broker"
        return self._reader

    def close(self) -> None:
        for each in (self._reader, self.dead_letters):
            if each is not None:
                each.close()

    def find(self) -> list[str]:
        """Return the streams to follow: the named streams, and the partitions of the named super streams."""
        found = list[str]()
        for name in self.names:
            if name not in self._plain_streams and self.reader().routes("", name):
                # A plain stream's partitions are not queried, since the broker logs an error each time.
                self._plain_streams.add(name)
            found += ([] if name in self._plain_streams else self.reader().partitions(name)) or [name]
        return self._refuse_dead_letters(found)

    def checked(self) -> list[str]:
        """Like `find`, but refuse other queues, and note the ends. Missing and unreachable streams are valid."""
        if self.dead_letters is not None:
            with suppress(NotAStream):
                self.reader().bounds(self.dead_letters.stream)
        names, self.ends = list(dict.fromkeys(self.find())), {}
        with within(CHECK_S):
            for name in names if self.start == "next" else set(names) - self._plain_streams:
                found = bounds_or_error(self.reader(), name)
                if isinstance(found, NotAStream):
                    raise found
                if not isinstance(found, StreamNotFound):
                    self.ends[name] = None if isinstance(found, Exception) else found.end
        return names


class Following:
    """Follows a collector's streams with one follower. For the collector's loop.

    Each stream has a task: a stream that waits for room, a server or another member blocks no other.
    """

    def __init__(self, shared: "CollectorLoop", address: BrokerAddress, type_of: TypeOf) -> None:
        self.shared = shared
        self.type_of = type_of
        self.follower = StreamFollower(shared.loop, address, self._on_event)
        self.streams: dict[str, CollectedStream] = {}
        self.is_cut_off = False  # whether the broker is unreachable from here, or refuses the login
        self._pauses, self._probe_at = Pauses(), 0.0

    def open(self, names: Iterable[str]) -> None:
        repeat, label, outages = self.shared.loop.repeat, self.shared.label, self.shared.outages
        repeat(self._find_released, label("looking for released streams"), outages)
        repeat(self._find_partitions, label("looking for partitions"), outages)
        self.add(names)

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.streams and not self.shared.core.is_stopping:
                stream = self.streams[name] = CollectedStream(self, name)
                stream.task.add_done_callback(lambda _: self.shared.notify())

    def wake(self) -> None:
        for stream in self.streams.values():
            stream.wake_event.set()

    def _on_event(self, event: Event) -> None:
        """Pass a follower's event to its stream, or to all streams if it names none."""
        error = event.error if isinstance(event, Failed) else None
        if event.stream is None or isinstance(event, Attached) or (error and not self.follower.connections.is_away):
            self._note_reach(error if event.stream is None else None)
        for stream in self.streams.values() if event.stream is None else [self.streams[event.stream]]:
            stream.on_event(event)

    def _note_reach(self, error: Exception | None) -> None:
        """Note whether the broker is out of reach, which streams that other members follow do not show."""
        self.is_cut_off, part = error is not None, self.shared.label("reaching the broker")
        if error is not None:
            self.shared.outages.failed(part, error)
        else:
            self.shared.outages.over(part)
            self._pauses = Pauses()

    async def _find_released(self) -> float:
        """Wake the streams that no other member follows any more."""
        shared = self.shared
        if any(stream.is_standing_by for stream in self.streams.values()) and not shared.core.is_stopping:
            if self.is_cut_off and time.monotonic() >= self._probe_at:
                error = await self.follower.missing_error(next(iter(self.streams)))
                if is_outage(error):
                    self._probe_at = time.monotonic() + self._pauses.after(error)
                else:
                    self._note_reach(None)
            held = await shared.loop.ask(shared.store.held, shared.member)
            for stream in self.streams.values():
                if stream.name not in held:
                    stream.is_standing_by = False
                    stream.wake_event.set()
        return STANDBY_S

    async def _find_partitions(self) -> float:
        self.add(await self.shared.loop.ask(self.shared.streams.find))
        return PARTITIONS_S


class CollectedStream:
    """One stream of the collector while it runs. This or another member follows it."""

    def __init__(self, following: Following, name: str) -> None:
        self.name = name
        self.is_standing_by = False  # whether another member follows the stream, as far as this one knows
        self.is_attached = False  # whether this member reads the stream, recognised as the one collected before
        self._following = following
        self._shared = following.shared
        self._follower = following.follower
        self._label = self._shared.label(f"following stream {name!r}")
        self._pauses = Pauses()
        self.wake_event = asyncio.Event()
        self._events: deque[Event] = deque()
        self._initial: tuple[int, Position | None] | None = None
        self._next_offset = 0
        self._is_read = self._was_followed = False
        self.task = self._shared.loop.spawn(self._run())

    def on_event(self, event: Event) -> None:
        if self._is_read:
            self._events.append(event)
            self.wake_event.set()

    async def _run(self) -> None:
        """Follow the stream until the collector stops; resume after any error."""
        while not self._shared.core.is_stopping:
            try:
                pause_s = await self._follow()
            except Abandoned:
                return
            except Conflict as error:
                # Another member follows the stream, which is normal.
                logger.info("%s starts again: %s", self._label, ended(error))
                pause_s = self._pauses.after(error)
            except Exception as error:  # noqa: BLE001 - logged, and followed again
                self._shared.outages.failed(self._label, error)
                pause_s = self._pauses.after(error)
            # Another member may follow the stream during the pause.
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    while not self._shared.core.is_stopping:
                        await self._wait()

    async def _follow(self) -> float:
        """Follow the stream, or wait until no other member does; return the seconds before the next attempt."""
        shared, member = self._shared, self._shared.member
        followed = await shared.loop.ask(self._begin, member)
        if followed is None:
            shared.outages.over(self._label)
            self.is_standing_by = True
            while self.is_standing_by and not shared.core.is_stopping:
                await self._wait()
            return 0.0
        try:
            await self._release_lost(member)
            if await self._read(member, followed):
                # Messages of the old stream are consumed first.
                while shared.core.held_of(self.name) and not self._is_over(member):
                    await shared.changed()
                if not self._is_over(member):
                    await shared.loop.ask(self._set_back, member)
        finally:
            # Release the stream before the error is reported. An abandoned member releases all streams when it leaves.
            if not shared.abandoned.is_set():
                await shared.loop.ask(shared.store.unfollow, member, self.name)
        self._pauses = Pauses()
        return BACKOFF_S[0]

    async def _release_lost(self, member: int) -> None:
        """Before reading, release messages of the stream that this member holds but no longer owns.

        Another member may have started over after the stream was declared again: new messages reuse held offsets.
        """
        shared, core = self._shared, self._shared.core
        while not self._is_over(member) and (held := core.held_of(self.name)):
            lost = set(held) - await shared.loop.ask(shared.store.unfinished, member, held)
            if not lost:
                return
            core.lose(lost)
            shared.notify()
            if not lost.isdisjoint(core.held):
                await shared.changed()

    async def _wait(self) -> None:
        await self.wake_event.wait()
        self.wake_event.clear()

    def _is_over(self, member: int) -> bool:
        return self._shared.core.is_stopping or self._shared.member != member

    async def _read(self, member: int, followed: Followed) -> bool:
        """Read and store messages; return whether reading ended because the stream was replaced."""
        if not followed.is_new and not self._was_followed:
            # `start` has no effect here: log this once.
            text = "collector %r: resuming stream %r at offset %d; start= is only for streams it never followed"
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
                    await self._store_records(member)
                    continue
                event = self._events.popleft()
                if isinstance(event, Attached) and not self.is_attached:
                    # Only the first time: connections may be replaced during the reading.
                    self.is_attached = True
                    self._shared.outages.over(self._label)
                    text = "collector %r: following stream %r from offset %d"
                    logger.info(text, self._shared.store.name, self.name, self._next_offset)
                elif isinstance(event, Replaced):
                    self._warn("stream %r was deleted and declared again: collecting its new messages", self.name)
                    return True
                elif isinstance(event, Hole):
                    text = "retention dropped offsets %d to %d of stream %r before they were collected"
                    places = {"from": event.from_offset, "to": event.to_offset}
                    self._warn(text, event.from_offset, event.to_offset - 1, self.name, **places)
                elif isinstance(event, Failed):
                    # Another member may be able to read the stream.
                    raise event.error
            return False
        finally:
            self._is_read = self.is_attached = False
            self._follower.leave(self.name)
            self._follower.done(*self._events)
            self._events.clear()

    async def _store_records(self, member: int) -> None:
        """Store the records that have arrived, as far as there is room, and advance the position."""
        shared, events, messages = self._shared, deque[Records](), list[Collected]()
        try:
            while True:
                await self._describe(events, messages)
                await shared.gather(len(messages))
                # Also when some messages had no room: exactly those that fit are stored.
                await self._describe(events, messages)
                if not messages or self._is_over(member):
                    return
                lot = Lot()
                del messages[: lot.take(shared.core, messages, self._next_offset)]
                while events and (not messages or events[0].batch.last_offset < messages[0].place.offset):
                    # More records can arrive while these are stored.
                    self._follower.done(events.popleft())
                if lot.advance is None:
                    await shared.changed()
                    continue
                await shared.store_lot(lot)
                self._next_offset = lot.advance.to_offset
                self._pauses = Pauses()
        finally:
            self._follower.done(*events)

    async def _describe(self, events: deque[Records], messages: list[Collected]) -> None:
        """Turn queued records into messages, as many as fit into one transaction."""
        type_of = self._following.type_of
        while len(messages) < TAKE_MESSAGES and self._events and isinstance(event := self._events[0], Records):
            self._events.popleft()
            events.append(event)
            describe = partial(describe_followed, event.batch.each_message(), type_of)
            # The application's function may be slow.
            messages += describe() if type_of is type_of_property else await self._shared.loop.ask(describe)

    def _warn(self, text: str, *values: object, **fields: object) -> None:
        logger.warning(f"collector %r: {text}", self._shared.store.name, *values, extra={"stream": self.name, **fields})

    def _begin(self, member: int) -> Followed | None:
        """Follow the stream unless another member does."""
        store, reader, start = self._shared.store, self._follower.reader, self._shared.streams.start
        if self._initial is None:
            bounds = reader.bounds(self.name)
            # Another node may have dropped messages that the leader retains.
            first = start if isinstance(start, int) else (bounds.first if bounds.is_proven else None) or 0
            if start == "next":
                # All messages of a stream that was missing at the start are new. An earlier end: it was declared again.
                end = self._shared.streams.ends.get(self.name, first)
                first = bounds.end if end is None or (bounds.is_sure and bounds.end < end) else end
            before = reader.read_all([MessageId(self.name, first - 1)])[0] if bounds.holds(first - 1) else None
            known = position_of(before) if isinstance(before, Message) else None
            self._initial = first, known
        return store.follow(member, self.name, *self._initial)

    def _set_back(self, member: int) -> None:
        """Set the position after the last unchanged message; if there is none, to the stream's beginning.

        Uses a binary search: unchanged messages are a prefix. Only messages with a `message_id` can be recognised.
        """
        name, store, reader = self.name, self._shared.store, self._follower.reader
        bounds, unchanged = leaders_bounds(reader, name), list[Message]()
        offsets = range(bounds.first or 0, bounds.end)

        def is_changed(offset: int) -> bool:
            row = store.last_collected(name, offset)
            if row is None or row[0] not in offsets:
                return False
            place = MessageId(name, row[0])
            (found,) = reader.read_all([place])
            if isinstance(found, Message):
                if not id_of(place, found.properties.message_id) == row[1] != id_of_place(place):
                    return True
                unchanged.append(found)
                return False
            if isinstance(found, OffsetExpired) or (isinstance(found, OffsetNotFound) and found.is_proven):
                return True
            raise found

        # The search visits unchanged messages in ascending order, and ends at the last one.
        bisect_left(offsets, True, key=is_changed)
        if not unchanged:
            store.rewind(member, name, offsets.start, is_new=True)
            return
        last = unchanged[-1].offset
        self._warn("stream %r has lost its end: continuing after offset %d", name, last, agreed=last)
        store.rewind(member, name, last + 1, is_new=False, known=position_of(unchanged[-1]))
