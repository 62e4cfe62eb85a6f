"""Which messages of a stream were not followed in time: read as they lie, and asked of in batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.limits import INTEGER_MAX, TIME_US_MAX, TIME_US_MIN
from relatum.reading import Message, StreamBounds, UnreadableRecord
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.expectations import _expectation_limits as limits
from relatum_consumer.expectations._expectation import Expectation, ExpectationResult, Reason, UnmetExpectation
from relatum_consumer.expectations._known import Known, still
from relatum_consumer.lookups import Catalog, PresentStream, offsets_within

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NOBODY: Final = -1


def moment_of(time_us: int) -> datetime:
    """Microseconds since 1970 as a moment; before and behind the calendar, its ends."""
    return _EPOCH + timedelta(microseconds=max(TIME_US_MIN, min(time_us, TIME_US_MAX)))


@dataclass(frozen=True, slots=True)
class Part:
    """Which messages are looked at: times from `low` to `high`, both included, and offsets from `starts` to `stops`.

    A stream that is not among `starts` is looked at from its first message on, one not among `stops` to its end.
    """

    low: int
    high: int
    starts: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, int] = field(default_factory=dict)


class _Asked(NamedTuple):
    """A message that something is expected of."""

    id: MessageId
    stream_id: int
    value: str
    time_us: int
    due_us: int


class TooManyMessages(Exception):
    """More messages lie in a part than are to be looked at in one go."""


_IN_PARTS: Final = part_may_hold_values("r", ":key_id::smallint", *2 * ['given.value COLLATE "C"'])

UNFOLLOWED: Final = sql(
    f"""
    SELECT given.number, first.stream_id, first.stream_offset, first.time_us
    FROM unnest(
      :numbers::int[], :values::text[], :time_uss::bigint[], :due_uss::bigint[], :own_streams::int[],
      :own_offsets::bigint[]
    ) AS given (number, value, time_us, due_us, own_stream, own_offset)
    LEFT JOIN LATERAL (
      SELECT found.stream_id, found.stream_offset, found.time_us
      FROM unnest(:stream_ids::int[]) AS followed_in (stream_id)
      CROSS JOIN LATERAL (
        SELECT r.stream_id, r.stream_offset, r.time_us
        FROM relatum.relationships r
        WHERE r.key_id = :key_id::smallint AND r.value = given.value COLLATE "C"
          AND r.stream_id = followed_in.stream_id
          AND r.time_us >= given.time_us
            - CASE WHEN followed_in.stream_id = given.own_stream THEN 0 ELSE :grace_us::bigint END
          AND (r.stream_id <> given.own_stream OR r.stream_offset <> given.own_offset)
          AND {_IN_PARTS}
        ORDER BY r.time_us, r.stream_offset
        LIMIT 1
      ) AS found
      ORDER BY found.time_us, found.stream_id, found.stream_offset
      LIMIT 1
    ) AS first ON true
    WHERE first.time_us IS NULL OR first.time_us > given.due_us
    """
)
"""Of given messages those that no row of the key's value follows in time, and where the first row behind them is.

Number, stream id, offset and time; NULL where no row follows. One probe of the index for each message and stream that
is followed in, in each part that may hold the value; the first row that is not earlier by more than clocks may differ
counts. Within one stream nothing is allowed for clocks: a message would be followed by the one before it. That
PostgreSQL joins the two in no other way is by the limit.
"""


class Judge:
    """Looks at messages of streams, and tells of each that was not followed in time.

    Args:
        catalog: Keys and streams.
        expectation: What is expected.
        by: Its key.
        followed: What is known of what follows.
        tell: Is told each message that was not followed in time.
        messages_max: Messages at most; None for all there are.

    Attributes:
        checked: Messages with a value.
        without_value: Messages without one.
        unreadable: Batches that cannot be unpacked.
        has_lost: Whether retention may have taken messages that were to be looked at.
    """

    def __init__(
        self,
        catalog: Catalog,
        expectation: Expectation,
        by: KeyDefinition,
        followed: Known,
        tell: Callable[[UnmetExpectation], None],
        *,
        messages_max: int | None = None,
    ) -> None:
        self._catalog = catalog
        self._within_us = expectation.within_us
        self._grace_us = expectation.grace_us
        self._by = by
        self._followed = followed
        self._tell = tell
        self._messages_max = messages_max
        self._batch: list[_Asked] = []
        self.checked = self.without_value = self.unreadable = 0
        self.has_lost = False

    def judge(self, of: Known, part: Part) -> None:
        """Look at all messages of a part.

        Raises:
            TooManyMessages: there are more than so many; some were told of.
        """
        for stream in of.recorded:
            begun = self._read(stream, part, max(of.firsts[stream.name], part.starts.get(stream.name, 0)))
            if begun is not None:
                # The broker moves a reader forward, without a word, where retention is at work.
                bounds: StreamBounds = self._catalog.servers.bounds(stream.name)
                self.has_lost = self.has_lost or bounds.first is None or bounds.first > begun
        self._settle()

    def _read(self, stream: PresentStream, part: Part, start: int) -> int | None:
        """Look at a stream's messages from an offset on; the first offset that was read, if any."""
        at: int | None = start
        begun: int | None = None
        stop = part.stops.get(stream.name, INTEGER_MAX)
        look, servers = partial(self._look, stream.stream_id, part), self._catalog.servers
        while at is not None:
            ranges, at = offsets_within(servers, stream, part.low, part.high, at, blocks_max=limits.PAGE_BLOCKS)
            for low, high in ranges:
                for piece in range(low, min(high, stop), limits.PIECE):
                    begun = low if begun is None else begun
                    servers.scan(stream.name, piece, min(piece + limits.PIECE, high, stop), look)
                    if len(self._batch) >= limits.BATCH:
                        self._settle()
        return begun

    def _look(self, stream_id: int, part: Part, message: Message) -> None:
        if isinstance(message.raw, UnreadableRecord):
            self.unreadable += 1
            return
        time_us = message.time_us
        if time_us is None or not part.low <= time_us <= part.high:
            return
        values = self._by.values_of(message)
        if not values:
            self.without_value += 1
            return
        self.checked += 1
        if self._messages_max is not None and self.checked > self._messages_max:
            raise TooManyMessages
        due_us = min(time_us + self._within_us, TIME_US_MAX)
        # Of several values, each is to be followed.
        self._batch += [_Asked(message.id, stream_id, value, time_us, due_us) for value in values]

    def _settle(self) -> None:
        """Ask what followed the messages at hand."""
        batch, self._batch = self._batch, []
        if not batch:
            return
        stream_ids = {stream.stream_id: stream.name for stream in self._followed.recorded}
        rows: list[Any] = self._catalog.servers.rows(
            UNFOLLOWED,
            {
                "numbers": list(range(len(batch))),
                "values": [each.value for each in batch],
                "time_uss": [each.time_us for each in batch],
                "due_uss": [each.due_us for each in batch],
                "own_streams": [each.stream_id for each in batch],
                "own_offsets": [each.id.offset for each in batch],
                "stream_ids": list(stream_ids) or [_NOBODY],
                "key_id": self._by.key_id,
                "grace_us": self._grace_us,
            },
        )
        if rows:
            self._followed = still(self._catalog, self._followed, self._by)
        for number, stream_id, offset, time_us in sorted(rows):
            came = None if stream_id is None else (MessageId(stream_ids[stream_id], offset), time_us)
            self._tell(self._found(batch[number], came))

    def _found(self, asked: _Asked, came: tuple[MessageId, int] | None) -> UnmetExpectation:
        why: Reason | None = None
        # What was written until `due_us` by the clock that is the most behind, and from where the search began: in
        # front of a span lies what was written before its first message, by a clock that may be ahead of that one's.
        known_us = asked.due_us + self._grace_us
        if known_us >= self._followed.asked_us:
            finding, why = ExpectationResult.NOT_KNOWN, Reason.NOT_DUE
        elif self._followed.holds(asked.time_us - 2 * self._grace_us, known_us):
            finding = ExpectationResult.MISSING if came is None else ExpectationResult.LATE
        else:
            is_behind = self._followed.behind and known_us >= self._followed.until
            finding, why = ExpectationResult.NOT_KNOWN, Reason.BEHIND if is_behind else Reason.UNPROVEN
        return UnmetExpectation(
            finding,
            asked.id,
            asked.value,
            moment_of(asked.time_us),
            moment_of(asked.due_us),
            why,
            None if came is None else came[0],
            None if came is None else moment_of(came[1]),
        )
