"""What has been recorded since the last look, of the streams that somebody looks at."""

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from relatum.errors import RelatumError, StreamNotFound
from relatum.following import CaughtUp, Event, Failed, Follower, FollowerOptions, Hole, Records, Replaced
from relatum.reading import BrokerAddress, Message, RecordBatch
from relatum.recording import RecordedEnd, recorded_ends
from relatum.store import Database
from relatum_consumer.web._live._filter import Filter

LOOKED_MAX: Final = 1_000
"""Messages that are looked at in one round; of more the newest, and one of each stream at least."""

BYTES_MAX: Final = 32 << 20
"""Bytes that are read and held, of all streams together."""

WINDOW_BYTES: Final = 8 << 20
"""Bytes of one stream that are read from one round to the next: 40 MiB a second."""

TAKEN_MAX: Final = 16 << 20
"""Bytes taken in one round, about."""

ENDS_S: Final = 1.0
"""Seconds between two looks at how far streams are recorded, where nothing waits for it: new ones are found so."""

BEHIND_S: Final = 5.0
"""Seconds that something waits to be recorded, or to be read, until it is said."""

GATHER_S: Final = 0.05
"""Seconds that the follower lets little chunks gather."""

_FOLLOWING: Final = FollowerOptions(bytes_max=BYTES_MAX, window_bytes=WINDOW_BYTES, gather_s=GATHER_S)


@dataclass(slots=True)
class _Followed:
    """A stream that is followed.

    Attributes:
        end: How far it is recorded.
        following: The number of its following; 0 where it was found to be another one, or is parked.
        pending: What was read; the recorder may not have come so far.
        begin: How much of the first of them was given.
        given_at: When something was given last, or nothing waited.
        due: How far it was recorded at a moment, and that moment: what lies before is to be given soon after.
        is_late: Whether it was not.
        is_parked: Whether nothing of it is read until its recorder gets on: what waits takes the room of others.
        error: Why it cannot be read now; "" where it was deleted.
    """

    end: RecordedEnd
    following: int = 0
    pending: deque[Records] = field(default_factory=deque)
    begin: int = 0
    given_at: float = 0.0
    due: tuple[int, float] = (0, 0.0)
    is_late: bool = False
    is_parked: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Came:
    """What one round brought.

    Attributes:
        messages: Recorded messages, in the order in which they arrived at the broker.
        passed: How many more there were of each stream, which were not looked at.
        super_streams: Of each stream that is followed, its super stream.
        away: What broker or database say, where they do not answer.
        failed: Streams that cannot be read now, and why; deleted ones, whose rows are still there, say "".
        waiting: Streams of which something waits to be recorded.
        late: Streams of which something recorded waits to be read.
    """

    messages: list[Message]
    passed: Counter[str]
    super_streams: dict[str, str | None]
    away: str
    failed: dict[str, str]
    waiting: list[str]
    late: list[str]

    def state_for(self, by: Filter) -> tuple[str, str]:
        """How it stands for who wants this: `live`, `behind`, `partly` or `away`; and the same for a person."""
        if self.away:
            return "away", self.away
        failed = {name: words for name, words in self.failed.items() if by.has_stream(name, self.super_streams[name])}
        said = {name: words for name, words in failed.items() if words}
        if said:
            return "partly", f"cannot be read now: {_listed(said)}: {next(iter(said.values()))}"
        if failed and by.streams:
            return "partly", f"deleted: {_listed(failed)}"
        for names, words in ((self.waiting, "published, and not recorded"), (self.late, "recorded, and not read")):
            wanted = [name for name in names if by.has_stream(name, self.super_streams[name])]
            if wanted:
                return "behind", f"{words} yet: messages of {_listed(wanted)}"
        return "live", ""


class Intake:
    """Follows streams, and gives what is recorded of them. For one thread at a time.

    Args:
        address: The broker.
        database: PostgreSQL.
    """

    def __init__(self, address: BrokerAddress, database: Database) -> None:
        self._vhost = address.vhost
        self._postgresql = database
        self._follower = Follower(address, options=_FOLLOWING).open()
        self._followed: dict[str, _Followed] = {}
        self._names: frozenset[str] = frozenset()
        self._ends_at = 0.0
        self._database = self._broker = ""

    def close(self) -> None:
        """Follow nothing any more."""
        self._follower.close()

    def come(self, names: frozenset[str]) -> Came:
        """What has been recorded since the last round, of the named streams and super streams; of all where none is."""
        now = time.monotonic()
        is_waited_for = not self._database and any(each.pending for each in self._followed.values())
        if is_waited_for or now >= self._ends_at or names != self._names:
            self._ask(names, now)
        self._take()
        came = {name: list(self._recorded(each, now)) for name, each in self._followed.items()}
        totals = {name: sum(end - begin for _, begin, end in slices) for name, slices in came.items()}
        share = min(1.0, LOOKED_MAX / max(1, sum(totals.values())))
        messages: list[Message] = []
        passed: Counter[str] = Counter()
        for name, slices in came.items():
            # Of each stream the newest, one at least: by it one sees how far the stream is.
            passed[name] = over = totals[name] - math.ceil(share * totals[name])
            for batch, begin, end in slices:
                first = min(end, begin + over)
                over -= first - begin
                messages += _messages(batch, first, end)
        supers = {name: each.end.super_stream for name, each in self._followed.items()}
        messages.sort(key=lambda message: message.chunk_ms or 0)
        failed = {name: each.error for name, each in self._followed.items() if each.error is not None}
        waiting = [name for name, each in self._followed.items() if now - each.given_at > BEHIND_S]
        for name in waiting:
            self._park(name, self._followed[name])
        late = [name for name, each in self._followed.items() if each.is_late]
        return Came(messages, passed, supers, self._database or self._broker, failed, waiting, late)

    # --- how far it is recorded -----------------------------------------------------------------------------

    def _ask(self, names: frozenset[str], now: float) -> None:
        self._names, self._ends_at = names, now + ENDS_S
        try:
            ends = {end.stream: end for end in recorded_ends(self._postgresql, self._vhost, names)}
        except RelatumError as error:
            self._database = str(error)
            return
        self._database = ""
        for name in self._followed.keys() - ends.keys():
            self._leave(name)
        for name, end in ends.items():
            followed = self._followed.get(name)
            if followed is None or _is_other(followed, end):
                self._leave(name)
                number = self._follower.follow(name, end.next_offset, known=end.position)
                self._followed[name] = _Followed(end, number, given_at=now)
                continue
            if followed.is_parked and end != followed.end:
                followed.following = self._follower.follow(name, followed.end.next_offset, known=followed.end.position)
                followed.is_parked = False
            followed.end = end

    def _leave(self, name: str) -> None:
        followed = self._followed.pop(name, None)
        if followed is not None:
            self._follower.leave(name)
            self._follower.done(*followed.pending)

    def _park(self, name: str, followed: _Followed) -> None:
        if followed.is_parked:
            return
        self._follower.leave(name)
        self._follower.done(*followed.pending)
        followed.pending.clear()
        followed.begin, followed.following, followed.is_parked = 0, 0, True

    # --- what was read --------------------------------------------------------------------------------------

    def _take(self) -> None:
        bytes_ = 0
        while bytes_ < TAKEN_MAX:
            events = self._follower.take(0.0)
            if not events:
                break
            for event in events:
                self._sort(event)
                if isinstance(event, Records):
                    bytes_ += sum(map(len, event.batch.records))

    def _sort(self, event: Event) -> None:
        if isinstance(event, Failed) and event.stream is None:
            self._broker = str(event.error)
            return
        self._broker = "" if not isinstance(event, Failed) else self._broker
        followed = self._followed.get(event.stream or "")
        if followed is None or followed.following != event.following:
            self._follower.done(event)
        elif isinstance(event, Records):
            followed.pending.append(event)
        elif isinstance(event, Failed):
            followed.error = "" if isinstance(event.error, StreamNotFound) else str(event.error)
        elif isinstance(event, Replaced):
            # Its recorder finds that, too, and says what it is now.
            followed.following, followed.error = 0, "it is not the stream that was recorded"
            self._follower.done(*followed.pending)
            followed.pending.clear()
        elif not isinstance(event, Hole | CaughtUp):
            followed.error = None

    def _recorded(self, followed: _Followed, now: float) -> Iterator[tuple[RecordBatch, int, int]]:
        """What of the stream's records is recorded: a batch, and from where to where in it."""
        if followed.is_parked:
            return
        while followed.pending:
            event = followed.pending[0]
            end = bisect_left(event.batch.offsets, followed.end.next_offset)
            if end > followed.begin:
                followed.given_at = now
                _note_given(followed, event.batch.offsets[end - 1] + 1, now)
                yield event.batch, followed.begin, end
            followed.begin = end
            if end < len(event.batch):
                return
            self._follower.done(followed.pending.popleft())
            followed.begin = 0
        followed.given_at = now


def _is_other(followed: _Followed, end: RecordedEnd) -> bool:
    """Whether the stream was declared anew, or its end was lost, and its recorder has seen that."""
    if followed.end.stream_id != end.stream_id or end.next_offset < followed.end.next_offset:
        return True
    return not (followed.following or followed.is_parked) and end != followed.end


def _note_given(followed: _Followed, next_offset: int, now: float) -> None:
    """Judge whether what is given keeps up with what is recorded."""
    due, since = followed.due
    followed.is_late = next_offset < due and now - since > BEHIND_S
    if next_offset >= due:
        followed.due = followed.end.next_offset, now


def _listed(names: Iterable[str]) -> str:
    """The first of some names, and how many more."""
    first, *others = sorted(names)
    return f"{first} and {len(others):,} more" if others else first


def _messages(batch: RecordBatch, begin: int, end: int) -> Iterable[Message]:
    stream, chunk_ms = batch.stream, batch.chunk_ms
    pairs = zip(batch.offsets[begin:end], batch.records[begin:end], strict=True)
    return (Message.from_record(stream, offset, record, chunk_ms) for offset, record in pairs)
