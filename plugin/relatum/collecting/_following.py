"""The threads that follow streams: one member at a time reads a stream, from the position that all share."""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final

from relatum.collecting._agreeing import LastCollected, ReadAt, last_agreed
from relatum.collecting._feed import Feed
from relatum.collecting._intake import TypeOf, describe_followed
from relatum.collecting._ports import Followed
from relatum.collecting._shared import Shared, logger
from relatum.errors import Conflict, OffsetExpired, OffsetNotFound, RelatumError
from relatum.following import Attached, Event, Failed, Hole, Records, Replaced
from relatum.ids import MessageId
from relatum.reading import Message, RecordBatch, StreamBounds, StreamReader
from relatum.steps import run
from relatum.waiting import Pauses, ended

IDLE_S: Final = 0.25
"""How often a follower with nothing to read looks whether it should stop."""

AGAIN_S: Final = 0.05
"""Seconds until a stream is followed again where another member came between."""

STANDBY_S: Final = 1.0
"""How often a member asks whether a stream that another one follows became free."""

Initial = Callable[[StreamReader, str], int]
"""Where to begin with a stream that was never followed."""


def readable(found: Message | RelatumError) -> Message | None:
    """What lies at an offset; None for nothing.

    Raises:
        RelatumError: It cannot be said.
    """
    if isinstance(found, Message):
        return found
    if isinstance(found, OffsetExpired) or (isinstance(found, OffsetNotFound) and found.is_proven):
        return None
    raise found


class CollectedStream:
    """Follows one stream, in a thread of its own, until the collector stops.

    Args:
        shared: What the collector's threads share.
        stream: The stream.
        feed: Where streams are read.
        open_reader: Opens a reader, for questions.
        type_of: Tells messages' types.
        initial: Where to begin with it.
    """

    def __init__(
        self,
        shared: Shared,
        stream: str,
        *,
        feed: Feed,
        open_reader: Callable[[], StreamReader],
        type_of: TypeOf,
        initial: Initial,
    ) -> None:
        self._shared = shared
        self._stream = stream
        self._who = shared.who(f"following stream {stream!r}")
        self._feed = feed
        self._open_reader = open_reader
        self._was_followed = self._is_attached = False
        self._type_of = type_of
        self._initial = initial
        self.thread = threading.Thread(target=self._run, name=f"relatum-{stream}", daemon=True)

    def _run(self) -> None:
        pauses, stopping, pause_s = Pauses(), self._shared.stopping, AGAIN_S
        while not stopping.is_set():
            try:
                self._is_attached = False
                self._session()
                pauses, pause_s = Pauses(), AGAIN_S
            except Conflict as error:
                # Another member came between: nothing is wrong.
                logger.info("%s begins anew: %s", self._who, ended(error))
                pause_s = pauses.after(error)
            except Exception as error:  # noqa: BLE001 - whatever it was, the stream is followed again
                self._shared.outages.failed(self._who, error)
                pause_s = pauses.after(error)
            stopping.wait(pause_s)

    def _session(self) -> None:
        """Follow as soon as no other member does, until something ends it."""
        shared, member = self._shared, self._shared.member
        with self._open_reader() as reader:
            initial = self._initial(reader, self._stream)
        while (followed := shared.store.follow(member, self._stream, initial)) is None:
            shared.outages.over(self._who)
            if shared.stopping.wait(STANDBY_S) or shared.member != member:
                return
        self._say_where(followed)
        try:
            with self._feed.following(self._stream, followed.next_offset, followed.known_by) as events:
                self._follow(events, followed)
        finally:
            self._leave(member)

    def _warn(self, text: str, *values: object, **fields: object) -> None:
        extra = {"stream": self._stream, **fields}
        logger.warning(f"collector %r: {text}", self._shared.store.name, *values, extra=extra)

    def _say_where(self, followed: Followed) -> None:
        """Say, once, that what was given as `start` does not count."""
        if not followed.is_new and not self._was_followed:
            text = "collector %r: going on with stream %r at %d, where it was; start is for streams it never followed"
            logger.info(text, self._shared.store.name, self._stream, followed.next_offset)
        self._was_followed = True

    def _find_again(self) -> None:
        """The stream is not what was collected of it: go on behind the last message that is as it was."""
        self._warn("stream %r was deleted and declared again: what it has now is collected", self._stream)
        shared = self._shared
        with shared.changed:
            # Places mean something else from now on: what lay there before is consumed first.
            while shared.core.holds_of(self._stream) and not shared.stopping.is_set():
                shared.changed.wait(IDLE_S)
        with self._open_reader() as reader:
            bounds = reader.bounds(self._stream)
            agreed = self._last_agreed(reader, bounds)
        if agreed is None:
            shared.store.begin_anew(shared.member, self._stream, bounds.first or 0)
            return
        self._warn("stream %r has lost its end: gone on with behind offset %d", self._stream, agreed, agreed=agreed)
        shared.store.cut_back(shared.member, self._stream, agreed)

    def _last_agreed(self, reader: StreamReader, bounds: StreamBounds) -> int | None:
        """Where to go on behind: the last message that is as it was collected; None where none is."""

        def perform(request: LastCollected | ReadAt) -> Any:
            if isinstance(request, LastCollected):
                return self._shared.store.last_collected(self._stream, request.until)
            (read,) = reader.read_all([MessageId(self._stream, request.offset)])
            return readable(read)

        return run(last_agreed(bounds), perform)

    def _follow(self, events: "SimpleQueue[Event]", followed: Followed) -> None:
        """Go through what comes, until the stream is another member's, or cannot be read now."""
        shared, member = self._shared, self._shared.member
        while not shared.stopping.is_set() and shared.member == member:
            try:
                event = events.get(timeout=IDLE_S)
            except Empty:
                if shared.intake.is_followed(self._stream) or not self._is_attached:
                    continue
                break
            try:
                if not self._handle(event, followed):
                    break
            finally:
                self._feed.follower.done(event)
        else:
            return
        with shared.changed:
            shared.intake.raise_ended(self._stream)

    def _handle(self, event: Event, followed: Followed) -> bool:
        """Do what an event asks for; False where following has to begin anew.

        Raises:
            Exception: The stream cannot be read now. Another member may, meanwhile.
        """
        if isinstance(event, Records):
            return self._take(event.batch)
        if isinstance(event, Attached):
            # Once: a connection may be replaced meanwhile.
            if not self._is_attached:
                self._begin(followed)
        elif isinstance(event, Replaced):
            self._find_again()
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
        with shared.changed:
            shared.intake.follow(self._stream, followed)
        logger.info(
            "collector %r: following stream %r from %d on", shared.store.name, self._stream, followed.next_offset
        )

    def _take(self, batch: RecordBatch) -> bool:
        """Hand a batch over, waiting for room; False where that has to end."""
        shared = self._shared
        messages = [describe_followed(message, self._type_of) for message in batch.each_message()]
        with shared.changed:
            while messages:
                if shared.stopping.is_set() or not shared.intake.is_followed(self._stream):
                    return False
                taken = shared.intake.take(self._stream, messages, time.monotonic())
                if taken:
                    shared.changed.notify_all()
                messages = messages[taken:]
                if messages:
                    shared.changed.wait(IDLE_S)
        return True

    def _leave(self, member: int) -> None:
        """Let another member follow, once what was gathered is stored."""
        shared = self._shared
        with shared.changed:
            while not shared.intake.is_stored(self._stream) and not shared.abandoned.is_set():
                shared.changed.wait(IDLE_S)
            shared.intake.unfollow(self._stream)
        if not shared.abandoned.is_set():
            # Else the member has left, and with it what it followed.
            shared.store.unfollow(member, self._stream)
