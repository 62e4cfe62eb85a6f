"""Which messages of a stream were not followed in time: messages are read in order, and checked in batches."""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

from relatum.checks import checked_count, meant
from relatum.errors import InvalidInput
from relatum.ids import MessageId
from relatum.keys import KeyDefinition, moment
from relatum.limits import TIME_US_MAX, TIME_US_MIN
from relatum.reading import Message, StreamBounds, UnreadableRecord
from relatum.store.coverage import TIME
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer._known_spans import ALWAYS, Known, known, still
from relatum_consumer.expectations import (
    DEFINED,
    Expectation,
    ExpectationResult,
    MissingReport,
    Reason,
    UnmetExpectation,
    not_defined,
)
from relatum_consumer.lookups.answer import Status
from relatum_consumer.lookups.answering import ANSWER_MESSAGES_MAX, again_if_replaced
from relatum_consumer.lookups.arguments import span_of
from relatum_consumer.lookups.catalog import Catalog, PresentStream
from relatum_consumer.lookups.time_index import offsets_within

BATCH: Final = 1_000
"""Messages in one query of the index for what followed them: a statement of some milliseconds."""

PIECE: Final = 2_048
"""Offsets read at once: one attach, and about ten milliseconds."""

PAGE_BLOCKS: Final = 2_048
"""Blocks of the time index read at once: a quarter of a million messages, half a megabyte of blocks."""

SPAN_S: Final = 86_400
"""Default seconds of due times to check: a day."""

_NOBODY: Final = -1


def moment_of(time_us: int) -> datetime:
    """Return microseconds since 1970 as a moment, capped at the calendar's ends."""
    return moment(max(TIME_US_MIN, min(time_us, TIME_US_MAX)))


class _Asked(NamedTuple):
    """A message that must be followed."""

    id: MessageId
    stream_id: int
    value: str
    time_us: int
    due_us: int


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
"""Selects the given messages that no row of the key's value follows in time, and the first row after them.

Number, stream id, offset and time; NULL if no row follows. It probes the index once for each message and following
stream, in each part that may hold the value. The first row counts that is not earlier by more than the grace for
clocks. Within one stream there is no grace: the message before would follow. The LIMIT keeps PostgreSQL from another
kind of join.
"""


class Judge:
    """Checks messages of streams, and reports each that was not followed in time.

    Args:
        catalog: Keys and streams.
        expectation: The expectation.
        by: Its key.
        followed: What is known of the following streams.
        tell: Called with each message that was not followed in time.

    Attributes:
        checked: The number of messages with a value.
        without_value: The number of messages without one.
        unreadable: The number of batches that cannot be unpacked.
        has_lost: Whether retention may have dropped messages before they were checked.
    """

    def __init__(
        self,
        catalog: Catalog,
        expectation: Expectation,
        by: KeyDefinition,
        followed: Known,
        tell: Callable[[UnmetExpectation], None],
    ) -> None:
        self._catalog = catalog
        self._within_us = expectation.within_us
        self._grace_us = expectation.grace_us
        self._by = by
        self._followed = followed
        self._tell = tell
        self._batch: list[_Asked] = []
        self.checked = self.without_value = self.unreadable = 0
        self.has_lost = False

    def judge(self, of: Known, low: int, high: int) -> None:
        """Check all messages of times from `low` to `high`, both included."""
        for stream in of.recorded:
            begun = self._read(stream, of.firsts[stream.name], low, high)
            if begun is not None:
                # The broker silently moves a reader forward to the first retained offset.
                bounds: StreamBounds = self._catalog.servers.bounds(stream.name)
                self.has_lost = self.has_lost or bounds.first is None or bounds.first > begun
        self._settle()

    def _read(self, stream: PresentStream, first: int, low: int, high: int) -> int | None:
        """Check a stream's messages in a time span, and return the first offset read, if any."""
        at: int | None = first
        begun: int | None = None
        look, servers = partial(self._look, stream.stream_id, low, high), self._catalog.servers
        while at is not None:
            ranges, at = offsets_within(servers, stream, low, high, at, blocks_max=PAGE_BLOCKS)
            for start, stop in ranges:
                begun = start if begun is None else begun
                for piece in range(start, stop, PIECE):
                    servers.scan(stream.name, piece, min(piece + PIECE, stop), look)
                    if len(self._batch) >= BATCH:
                        self._settle()
        return begun

    def _look(self, stream_id: int, low: int, high: int, message: Message) -> None:
        if isinstance(message.raw, UnreadableRecord):
            self.unreadable += 1
            return
        time_us = message.time_us
        if time_us is None or not low <= time_us <= high:
            return
        values = self._by.values_of(message)
        if not values:
            self.without_value += 1
            return
        self.checked += 1
        due_us = min(time_us + self._within_us, TIME_US_MAX)
        # If there are several values, each must be followed.
        self._batch += [_Asked(message.id, stream_id, value, time_us, due_us) for value in values]

    def _settle(self) -> None:
        """Check the batch against the index."""
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
        # Everything written until `due_us` by the slowest clock must be known, and from where the search began: before
        # a span are the messages written before its first one, by a clock that may be ahead of the slowest.
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


def defined(catalog: Catalog) -> tuple[Expectation, ...]:
    """Return the expectations of the virtual host, ordered by name."""
    rows: list[Any] = catalog.servers.rows(DEFINED, {"vhost": catalog.vhost})
    return tuple(Expectation(*row) for row in rows)


def expectation_named(catalog: Catalog, name: str | Expectation) -> Expectation:
    """Return the expectation of a name; an `Expectation` is returned as it is.

    Raises:
        NotFound: no expectation of that name is defined in this virtual host.
    """
    if isinstance(name, Expectation):
        return name
    if not isinstance(name, str):
        raise InvalidInput(f"an expectation is named by text, not by {type(name).__name__}")
    found = {each.name: each for each in defined(catalog)}
    if name not in found:
        raise not_defined(name, catalog.vhost, meant(name, found))
    return found[name]


def streams_of(catalog: Catalog, expectation: Expectation, key_id: int) -> tuple[Known, Known]:
    """Return what is known of the messages to be followed, and of the following ones."""
    catalog.check_names([expectation.of, expectation.follows])
    of = known(catalog, expectation.of, (TIME,))
    # In this order, because a message may be followed a moment later.
    return of, known(catalog, expectation.follows, (key_id, TIME))


def missing(
    catalog: Catalog, name: str | Expectation, since: datetime | None, until: datetime | None, limit: int
) -> MissingReport:
    """Report the messages that did not meet an expectation."""
    checked_count("limit", limit, most=ANSWER_MESSAGES_MAX)
    low, high = span_of(since, until)
    expectation = expectation_named(catalog, name)
    return again_if_replaced(catalog, partial(_missing, catalog, expectation, low, high, limit))


def _missing(
    catalog: Catalog, expectation: Expectation, since: int | None, until: int | None, limit: int
) -> MissingReport:
    by = catalog.definition(expectation.by)
    of, followed = streams_of(catalog, expectation, by.key_id)
    end = of.asked_us if until is None else until
    begin = _begin(expectation, of, end) if since is None else since
    found = _Findings(limit)
    judge = Judge(catalog, expectation, by, followed, found.take)
    judge.judge(of, begin, end - 1)
    # Messages that are not due change nothing, nor does what is known of them.
    grace = expectation.grace_us
    due = min(end - 1, of.asked_us - expectation.within_us - grace - 1)
    is_known = due < begin or of.holds(begin - grace, due + grace)
    # A default span starts with what is retained, so nothing in it is lost.
    has_lost = judge.has_lost and since is not None
    is_behind = bool(of.behind) and due + grace >= of.until
    status = found.status(is_known=is_known and not judge.unreadable and not has_lost, is_behind=is_behind)
    unrecorded_streams: set[str] = set()
    is_open = status in (Status.NOT_RECORDED_YET, Status.UNPROVEN)
    new_keys = followed.evidence.named_new_keys(catalog, [by.key_id]) if is_open else ()
    if status is Status.NOT_RECORDED_YET:
        for each in (of, followed):
            unrecorded_streams.update(each.unrecorded_streams(catalog))
    return MissingReport(
        expectation=expectation,
        status=status,
        since=moment_of(begin),
        until=moment_of(end),
        late=found.of(ExpectationResult.LATE),
        missing=found.of(ExpectationResult.MISSING),
        not_known=found.of(ExpectationResult.NOT_KNOWN),
        late_count=found.counts[ExpectationResult.LATE],
        missing_count=found.counts[ExpectationResult.MISSING],
        not_known_count=found.counts[ExpectationResult.NOT_KNOWN],
        checked=judge.checked,
        without_value=judge.without_value,
        unreadable=judge.unreadable,
        streams=tuple(sorted(of.firsts)),
        unrecorded_streams=tuple(sorted(unrecorded_streams)),
        new_keys=new_keys,
    )


def _begin(expectation: Expectation, of: Known, end: int) -> int:
    """Return the default start of a span: due a day ago, or where the known span starts."""
    begin = end - expectation.within_us - SPAN_S * 1_000_000
    first = of.spans[-1][0] if of.spans else ALWAYS
    return max(begin, first + expectation.grace_us + 1, TIME_US_MIN)


class _Findings:
    """The findings: all are counted, and the first ones kept, up to the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[ExpectationResult, list[UnmetExpectation]] = {finding: [] for finding in ExpectationResult}
        self._reasons: set[Reason] = set()
        self.counts = dict.fromkeys(ExpectationResult, 0)

    def take(self, unmet: UnmetExpectation) -> None:
        self.counts[unmet.finding] += 1
        if unmet.why is not None:
            self._reasons.add(unmet.why)
        held = self._held[unmet.finding]
        held.append(unmet)
        if len(held) > 2 * self._limit:
            held[:] = self._first(held)

    def of(self, finding: ExpectationResult) -> tuple[UnmetExpectation, ...]:
        return tuple(self._first(self._held[finding]))

    def _first(self, held: Sequence[UnmetExpectation]) -> list[UnmetExpectation]:
        return sorted(held, key=lambda each: (each.time, each.id))[: self._limit]

    def status(self, *, is_known: bool, is_behind: bool) -> Status:
        """Return the status of the report."""
        if self.counts[ExpectationResult.LATE] or self.counts[ExpectationResult.MISSING]:
            return Status.FOUND
        if Reason.UNPROVEN in self._reasons or not (is_known or is_behind):
            return Status.UNPROVEN
        if Reason.BEHIND in self._reasons or not is_known:
            return Status.NOT_RECORDED_YET
        return Status.ABSENT
