"""The partitions that a member reads: one follower and one thread for all, which opens each where it was left.

What is about one partition stops no other: one that cannot go on now, since its batches are not done with, since what
an adoption names is not to be seen yet, or since PostgreSQL is away, keeps what has come of it, and is looked at again.
"""

import contextlib
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Final

from relatum.contexts.placement._entries import Adoption
from relatum.contexts.serial._partition_log import PartitionLog
from relatum.contexts.serial.consuming._partition_following import Following
from relatum.contexts.serial.consuming._partition_pieces import Piece
from relatum.contexts.serial.consuming._serial_state import Shared, logger
from relatum.contexts.serial.consuming._serial_store import ConsumerStore, Opened
from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    OffsetExpired,
    OffsetNotFound,
    StreamNotFound,
    StreamUnavailable,
)
from relatum.following import Attached, Event, Failed, Follower, Hole, Records, Replaced
from relatum.reading import BrokerAddress, Message, StreamReader, ends_of_known
from relatum.waiting import backoff

REPEATED_S: Final = 120.0
"""Seconds before the message read last from which a stream that lost its end is delivered again."""

IDLE_S: Final = 10.0
"""Seconds in which a stream that has messages must give one."""

LOOK_S: Final = 0.1
"""Seconds between two looks for partitions that were gained, and for those that wait for something."""


class PartitionReading:
    """Reads all partitions that a member has."""

    def __init__(self, shared: Shared, store: ConsumerStore, address: BrokerAddress) -> None:
        self.shared = shared
        self.store = store
        self.follower = Follower(
            address, outages=shared.outages, name=f"consuming by {store.name!r}", who=_who, ready=shared.room.set
        )
        self._partitions: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._reads: dict[str, PartitionReader] = {}
        self._ended: list[PartitionReader] = []
        self.follower.open()
        self.thread = threading.Thread(target=self._run, name=f"relatum-{store.name}-reading", daemon=True)
        self.thread.start()

    def begin(self, partition_id: int, stream: str, header: str) -> "PartitionReader":
        """Read a partition."""
        reader = PartitionReader(self, partition_id=partition_id, stream=stream, header=header)
        with self._lock:
            self._reads[stream] = reader
        self.shared.room.set()
        return reader

    def follow(self, reader: "PartitionReader", opened: Opened) -> int:
        """Have a partition followed from where it was left, if it is read still; the following's number."""
        with self._lock:
            if self._reads.get(reader.stream) is not reader:
                return 0
            return self.follower.follow(reader.stream, opened.read_from, known=opened.known_by)

    def end(self, reader: "PartitionReader") -> None:
        """Read it no more."""
        with self._lock:
            self._ended.append(reader)
            if self._reads.get(reader.stream) is reader:
                del self._reads[reader.stream]
                self.follower.leave(reader.stream)
        self.shared.room.set()

    def is_partition(self, stream: str) -> bool:
        """Whether a stream is, or was, one of this super stream's partitions."""
        if stream not in self._partitions:
            self._partitions = self.store.partitions()
        return stream in self._partitions

    def _run(self) -> None:
        room, stopping = self.shared.room, self.shared.stopping
        while not stopping.is_set():
            room.wait(LOOK_S)
            room.clear()
            for event in self.follower.take(0.0):
                self._sort(event)
            with self._lock:
                ended, self._ended = self._ended, []
                reads = list(self._reads.values())
            for reader in ended:
                reader.release()
            for reader in reads:
                reader.go_on()
        self.follower.close()

    def _sort(self, event: Event) -> None:
        """Give an event to its partition."""
        if event.stream is not None:
            self.shared.admitted()
        elif isinstance(event, Failed) and isinstance(event.error, AccessRefused | ConfigurationError):
            # Told to those who wait for messages, too.
            self.shared.refused(event.error)
        reader = self._reads.get(event.stream or "")
        if reader is not None and reader.number == event.following:
            reader.events.append(event)
        else:
            self.follower.done(event)


def _who(stream: str) -> str:
    return f"reading of partition {stream!r}"


class PartitionReader:
    """One partition that a member has. All but `stop` is for the thread that reads.

    Attributes:
        number: Its following's number; 0 before it is looked up where it was left.
        events: What has come, and was not gone through.
        has_ended: Whether the partition turned out to be another member's, or gone.
    """

    def __init__(self, reading: PartitionReading, *, partition_id: int, stream: str, header: str) -> None:
        self.partition_id = partition_id
        self.stream = stream
        self.following: Following | None = None
        self.has_ended = False
        self.number = 0
        self.events: deque[Event] = deque()
        self._reading = reading
        self._shared = reading.shared
        self._store = reading.store
        self._header = header
        self._opened: Opened | None = None
        self._is_over = False
        self._who = _who(stream)
        self._pauses = backoff()
        self._again_at = 0.0

    def stop(self) -> None:
        """End, and read nothing more."""
        self._is_over = True
        self._reading.end(self)
        if self.following is not None:
            self._shared.drop(self.following)
        self._shared.outages.forget(self._who)

    def release(self) -> None:
        """Be done with what has come: it is not gone through any more."""
        self._reading.follower.done(*self.events)
        self.events.clear()

    def go_on(self) -> None:
        """Go through what has come, as far as that goes now."""
        if self._is_over or time.monotonic() < self._again_at:
            return
        try:
            if self.following is not None and self.following.is_over:
                self._forget()
            if self._opened is None:
                self._look_up()
            while self.events and not self._is_over and self._handle(self.events[0]):
                if self.events:
                    self._reading.follower.done(self.events.popleft())
                self._pauses = backoff()
            if self._opened is None and not self._is_over:
                self._look_up()
        except Exception as error:  # noqa: BLE001 - whatever it was, it is tried again
            self._shared.outages.failed(self._who, error)
            self._again_at = time.monotonic() + next(self._pauses)

    def _look_up(self) -> None:
        """Find where the partition was left, and have it followed from there."""
        opened = self._store.open(self.partition_id)
        if opened is None:
            self._end()
            return
        self._opened = opened
        self.number = self._reading.follow(self, opened)

    def _end(self) -> None:
        self.stop()
        self.has_ended = True

    def _forget(self) -> None:
        """Forget what is not stored: the partition is opened anew."""
        if self.following is not None:
            self._shared.drop(self.following)
        self.release()
        self.following = self._opened = None

    def _handle(self, event: Event) -> bool:
        """Do what an event asks for; False where it has to wait."""
        if isinstance(event, Records):
            return self._put(event)
        if isinstance(event, Attached):
            self._open()
        elif isinstance(event, Hole):
            self._pass_hole(event)
        elif isinstance(event, Replaced):
            self._find_again()
        elif isinstance(event, Failed) and isinstance(event.error, StreamNotFound):
            self._drain()
        return True

    def _drain(self) -> None:
        """End with a partition whose stream is gone, and was left by all contexts."""
        if self._store.drain(self.partition_id):
            logger.info("partition %r drained: its stream is gone", self.stream, extra={"stream": self.stream})
            self._end()

    def _open(self) -> None:
        """The stream is the one that is known: hand out what is read of it. After a break it is open already."""
        opened = self._opened
        assert opened is not None, "it is followed from there"
        if self.following is not None:
            return
        following = Following(
            self.partition_id,
            self.stream,
            log=PartitionLog(
                self._store.floors(self.partition_id, opened.read_from),
                open_holds=opened.holds,
                position=opened.position,
            ),
            position=opened.position,
            version=opened.version,
            read_from=opened.read_from,
            header=self._header,
            options=self._shared.options,
            begun_at={move_id: time.monotonic() - open_s for move_id, open_s in opened.since.items()},
        )
        extra = {"stream": self.stream, "position": following.position, "from": following.next_offset}
        logger.info("partition %r opened", self.stream, extra=extra)
        self.following = following
        self._shared.add(following)

    def _find_again(self) -> None:
        """The stream is not what was read of it: go on where it agrees with what is stored."""
        is_stored = self.following is None
        if is_stored:
            self._go_back(self._reading.follower.reader())
        # Else what was read and is not stored yet may be all that is not there any more.
        self._forget()

    def _go_back(self, reader: StreamReader) -> None:
        """Go on two minutes before the message read last, if the stream has such messages; else from its beginning."""
        assert self._opened is not None
        assert self._opened.known_by is not None, "only a stream that is known can be another one"
        bounds = ends_of_known(reader, self.stream)
        first = bounds.first or 0
        last_ms = self._opened.known_by.chunk_ms
        at = None if last_ms is None or bounds.last is None else self._first_of_last_minutes(reader, last_ms)
        if at is None:
            logger.warning("stream %r replaced", self.stream, extra={"stream": self.stream})
            self._store.begin_anew(self.partition_id, first)
            return
        at = min(at, self._opened.position)
        extra = {"stream": self.stream, "from": at}
        logger.warning("stream %r lost its end: read again from %d", self.stream, at, extra=extra)
        self._store.go_back(self.partition_id, at, bounds.end)

    def _first_of_last_minutes(self, reader: StreamReader, last_ms: int) -> int | None:
        """The first offset written in the two minutes before a moment; None where the stream has none of them.

        What was written after the end was lost comes later in the stream, and its time is later, too, or by less than
        these minutes earlier (clocks of nodes differ): so none of it lies before that offset. Should all of these
        minutes be lost, it is none, and nothing is skipped.
        """
        since = datetime.fromtimestamp(max(0.0, last_ms / 1_000 - REPEATED_S), UTC)
        found = reader.batches(self.stream, since, follow=False, idle_s=IDLE_S)
        with contextlib.closing(found) as batches:
            batch = next(batches, None)
        if batch is None or batch.chunk_ms is None or batch.chunk_ms > last_ms:
            return None
        return batch.first_offset

    def _pass_hole(self, hole: Hole) -> None:
        """Retention has dropped what was to be read; what is stored of it still counts."""
        opened, following = self._opened, self.following
        assert opened is not None, "it is followed from there"
        assert following is not None, "it was attached"
        if following.has_read:
            # Opened anew behind what is stored, it is met by the same hole.
            self._forget()
            return
        # What fences and markers said that are dropped counts for what is behind them.
        first, lost_controls = hole.to_offset, self._store.lost_controls
        controls = lost_controls(self.partition_id, hole.from_offset, first)

        def replay(now: float) -> None:
            for offset, control in controls:
                following.replay(offset, control, now)
            following.lost_to(first, now)

        self._shared.put(following, replay)
        if opened.position < first and opened.position > 0:
            extra = {"stream": self.stream, "from": opened.position, "to": first}
            lost = (opened.position, first - 1, self.stream)
            logger.warning("retention dropped offsets %d to %d of %r before they were consumed", *lost, extra=extra)

    def _put(self, event: Records) -> bool:
        following = self.following
        assert following is not None, "it was attached"
        if not following.has_room:
            return False
        piece = Piece.of(event.batch, self._read_adopted, self._is_partition)
        self._shared.put(following, lambda now: following.put(piece, now))
        self._shared.outages.over(self._who)
        return True

    def _is_partition(self, stream: str) -> bool:
        if self._reading.is_partition(stream):
            return True
        extra = {"stream": self.stream, "named": stream}
        logger.warning("a control message in %r that names %r is passed over", self.stream, stream, extra=extra)
        return False

    def _read_adopted(self, adoption: Adoption) -> Message | None:
        """The message an adoption names; None where retention has dropped it, or its partition is gone.

        It was confirmed before it was adopted. So where it is not to be seen, a replica is behind, and is waited for;
        it is given up only where its stream's leader says that there is none: the stream was declared again since.
        """
        try:
            return self._reading.follower.reader().read(adoption.stream, adoption.offset)
        except (OffsetExpired, StreamNotFound):
            pass
        except OffsetNotFound as error:
            if not error.is_proven:
                raise StreamUnavailable(
                    f"An adopted message is not to be seen yet: {error}", stream=self.stream
                ) from error
        extra = {"stream": adoption.stream, "offset": adoption.offset}
        logger.warning(
            "an adopted message, %r at %d, is not there any more", adoption.stream, adoption.offset, extra=extra
        )
        return None
