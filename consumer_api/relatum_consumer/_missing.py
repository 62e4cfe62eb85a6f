"""Finds the messages of a stream that no message followed in time: reads them in order, and checks them in batches."""

from collections import Counter
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

from relatum.common.checks import checked_count, meant
from relatum.common.ids import MessageId
from relatum.common.limits import TIME_US_MAX, TIME_US_MIN
from relatum.errors import InvalidInput
from relatum.reading import Message, StreamBounds, UnreadableRecord
from relatum.store.coverage import TIME
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer._known_spans import ALWAYS, known, still
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
from relatum_consumer.lookups.answering import ANSWER_MESSAGES_MAX, retry_if_replaced
from relatum_consumer.lookups.arguments import moment_of, span_of
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.time_index import offsets_between

BATCH: Final = 1_000
"""Messages checked by one index query, which takes a few milliseconds."""

PIECE: Final = 2_048
"""Offsets in one read: it attaches once, and takes about ten milliseconds."""

SPAN_S: Final = 86_400
"""Length of the default span of due times, in seconds: a day."""


class _WaitingMessage(NamedTuple):
    id: MessageId
    stream_id: int
    value: str
    time_us: int
    due_us: int


UNFOLLOWED: Final = sql(f"""
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
          AND {part_may_hold_values("r", ":key_id::smallint", *2 * ['given.value COLLATE "C"'])}
        ORDER BY r.time_us, r.stream_offset
        LIMIT 1
      ) AS found
      ORDER BY found.time_us, found.stream_id, found.stream_offset
      LIMIT 1
    ) AS first ON true
    WHERE first.time_us IS NULL OR first.time_us > given.due_us""")
"""Selects the given messages that no row with the key's value follows in time, each with the first row that follows.

Columns: the message's number; the row's stream id, offset and time, NULL without a row. The query probes the index
once for each message and following stream, in each part that may hold the value. A row follows unless it is earlier by
more than the grace for clocks. In the message's own stream there is no grace, or the message before it would follow.
The LIMIT makes PostgreSQL join message by message, by the index.
"""


def defined(catalog: Catalog) -> tuple[Expectation, ...]:
    rows: list[Any] = catalog.servers.rows(DEFINED, {"vhost": catalog.vhost})
    return tuple(Expectation(*row) for row in rows)


def _expectation_named(catalog: Catalog, name: str | Expectation) -> Expectation:
    """Return the expectation of a name, or raise `NotFound`; an `Expectation` is returned unchanged."""
    if isinstance(name, Expectation):
        return name
    if not isinstance(name, str):
        raise InvalidInput(f"an expectation's name must be text, not {type(name).__name__}")
    found = {each.name: each for each in defined(catalog)}
    if name not in found:
        raise not_defined(name, catalog.vhost, meant(name, found))
    return found[name]


def missing(
    catalog: Catalog, name: str | Expectation, since: datetime | None, until: datetime | None, limit: int
) -> MissingReport:
    checked_count("limit", limit, most=ANSWER_MESSAGES_MAX)
    low, high = span_of(since, until)
    expectation = _expectation_named(catalog, name)
    return retry_if_replaced(catalog, lambda: _Check(catalog, expectation, limit).report(low, high))


class _Check:
    """One check of an expectation. It counts all messages that were not followed in time, and holds the first ones."""

    def __init__(self, catalog: Catalog, expectation: Expectation, limit: int) -> None:
        self._catalog = catalog
        self._expectation = expectation
        self._limit = limit
        self._by = catalog.definition(expectation.by)
        catalog.check_names([expectation.of, expectation.follows])
        # In this order: a message that is due when `of` is queried is due when `follows` is queried, too.
        self._source = known(catalog, expectation.of, (TIME,))
        self._followers = known(catalog, expectation.follows, (self._by.key_id, TIME))
        self._batch: list[_WaitingMessage] = []
        self._found: dict[ExpectationResult, list[UnmetExpectation]] = {each: [] for each in ExpectationResult}
        self._counts: Counter[ExpectationResult | Reason | None] = Counter()
        self._checked = self._without_value = self._unreadable = 0
        self._may_have_lost = False
        """Whether retention may have dropped messages before they were checked."""

    def report(self, since: int | None, until: int | None) -> MissingReport:
        """Check the messages with times from `since` to before `until`."""
        source, end = self._source, self._source.queried_us if until is None else until
        begin = self._default_begin(end) if since is None else since
        self._check(begin, end - 1)
        source.evidence.check_present(self._catalog, [source.name], ())
        # A default span starts at the first retained message, so retention has dropped nothing of it.
        status = self._status(begin, end, may_have_lost=self._may_have_lost and since is not None)
        unrecorded: set[str] = set()
        if status is Status.NOT_RECORDED_YET:
            unrecorded = source.unrecorded_streams(self._catalog) | self._followers.unrecorded_streams(self._catalog)
        is_open = status in (Status.NOT_RECORDED_YET, Status.UNPROVEN)
        return MissingReport(
            expectation=self._expectation,
            status=status,
            since=moment_of(begin),
            until=moment_of(end),
            late=self._first(ExpectationResult.LATE),
            missing=self._first(ExpectationResult.MISSING),
            not_known=self._first(ExpectationResult.NOT_KNOWN),
            late_count=self._counts[ExpectationResult.LATE],
            missing_count=self._counts[ExpectationResult.MISSING],
            not_known_count=self._counts[ExpectationResult.NOT_KNOWN],
            not_due_count=self._counts[Reason.NOT_DUE],
            checked=self._checked,
            without_value=self._without_value,
            unreadable=self._unreadable,
            streams=tuple(sorted(source.firsts)),
            unrecorded_streams=tuple(sorted(unrecorded)),
            new_keys=self._followers.evidence.named_new_keys(self._catalog, [self._by.key_id]) if is_open else (),
        )

    def _default_begin(self, end: int) -> int:
        """Return the default start of a span: a day of due times before `end`, within the last known span."""
        expectation, spans = self._expectation, self._source.spans
        begin = end - expectation.within_us - SPAN_S * 1_000_000
        return max(begin, (spans[-1][0] if spans else ALWAYS) + expectation.grace_us + 1, TIME_US_MIN)

    def _status(self, begin: int, end: int, *, may_have_lost: bool) -> Status:
        if self._counts[ExpectationResult.LATE] or self._counts[ExpectationResult.MISSING]:
            return Status.FOUND
        source, grace_us = self._source, self._expectation.grace_us
        # Messages that are not due yet do not affect the status.
        due = min(end - 1, source.queried_us - self._expectation.within_us - grace_us - 1)
        is_known = due < begin or source.holds(begin - grace_us, due + grace_us)
        is_known = is_known and not (self._unreadable or may_have_lost)
        is_behind = bool(source.behind) and due + grace_us >= source.until
        if Reason.UNPROVEN in self._counts or not (is_known or is_behind):
            return Status.UNPROVEN
        if Reason.BEHIND in self._counts or not is_known:
            return Status.NOT_RECORDED_YET
        return Status.ABSENT

    def _check(self, low: int, high: int) -> None:
        """Check all messages with times from `low` to `high`, both included."""
        servers = self._catalog.servers
        for stream in self._source.evidence.recorded:
            consider = partial(self._consider, stream.stream_id, low, high)
            ranges = offsets_between(servers, stream, low, high, self._source.firsts[stream.name])
            for start, stop in ranges:
                for piece in range(start, stop, PIECE):
                    servers.scan(stream.name, piece, min(piece + PIECE, stop), consider)
                    if len(self._batch) >= BATCH:
                        self._check_batch()
            if ranges:
                # If retention has dropped the requested offset, the broker silently starts at the first retained one.
                bounds: StreamBounds = servers.bounds(stream.name)
                self._may_have_lost = self._may_have_lost or bounds.first is None or bounds.first > ranges[0][0]
        self._check_batch()

    def _consider(self, stream_id: int, low: int, high: int, message: Message) -> None:
        if isinstance(message.raw, UnreadableRecord):
            self._unreadable += 1
            return
        time_us = message.time_us
        if time_us is None or not low <= time_us <= high:
            return
        values = self._by.values_of(message)
        if not values:
            self._without_value += 1
            return
        self._checked += 1
        due_us = min(time_us + self._expectation.within_us, TIME_US_MAX)
        # A message with several values must be followed for each of them.
        self._batch += [_WaitingMessage(message.id, stream_id, value, time_us, due_us) for value in values]

    def _check_batch(self) -> None:
        """Check the batch against the index."""
        batch, self._batch = self._batch, []
        if not batch:
            return
        stream_ids = {stream.stream_id: stream.name for stream in self._followers.evidence.recorded}
        rows: list[Any] = self._catalog.servers.rows(
            UNFOLLOWED,
            {
                "numbers": list(range(len(batch))),
                "values": [each.value for each in batch],
                "time_uss": [each.time_us for each in batch],
                "due_uss": [each.due_us for each in batch],
                "own_streams": [each.stream_id for each in batch],
                "own_offsets": [each.id.offset for each in batch],
                "stream_ids": list(stream_ids),
                "key_id": self._by.key_id,
                "grace_us": self._expectation.grace_us,
            },
        )
        if rows:
            self._followers = still(self._catalog, self._followers, self._by)
        for number, stream_id, offset, time_us in sorted(rows):
            follower = None if stream_id is None else MessageId(stream_ids[stream_id], offset)
            self._add(self._unmet(batch[number], follower, None if time_us is None else moment_of(time_us)))

    def _unmet(
        self, message: _WaitingMessage, follower: MessageId | None, followed_at: datetime | None
    ) -> UnmetExpectation:
        reason: Reason | None = None
        grace_us = self._expectation.grace_us
        # Clocks differ by up to the grace. A follower may be written one grace after the due time, and its time may be
        # one grace before its message's. Messages before a known span may have times up to one grace after its start.
        known_us = message.due_us + grace_us
        if known_us >= self._followers.queried_us:
            finding, reason = ExpectationResult.NOT_KNOWN, Reason.NOT_DUE
        elif self._followers.holds(message.time_us - 2 * grace_us, known_us):
            finding = ExpectationResult.MISSING if follower is None else ExpectationResult.LATE
        else:
            is_behind = self._followers.behind and known_us >= self._followers.until
            finding, reason = ExpectationResult.NOT_KNOWN, Reason.BEHIND if is_behind else Reason.UNPROVEN
        moment, due = moment_of(message.time_us), moment_of(message.due_us)
        return UnmetExpectation(finding, message.id, message.value, moment, due, reason, follower, followed_at)

    def _add(self, unmet: UnmetExpectation) -> None:
        self._counts.update((unmet.finding, unmet.why))
        found = self._found[unmet.finding]
        found.append(unmet)
        if len(found) > 2 * self._limit:
            found[:] = self._first(unmet.finding)

    def _first(self, finding: ExpectationResult) -> tuple[UnmetExpectation, ...]:
        return tuple(sorted(self._found[finding], key=lambda each: (each.time, each.id))[: self._limit])
