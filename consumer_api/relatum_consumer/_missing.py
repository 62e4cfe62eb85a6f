"""Which messages of a stream were not followed in time: messages are read in order, and checked in batches."""

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
from relatum_consumer.lookups.answering import ANSWER_MESSAGES_MAX, again_if_replaced
from relatum_consumer.lookups.arguments import moment_of, span_of
from relatum_consumer.lookups.catalog import Catalog, PresentStream
from relatum_consumer.lookups.time_index import offsets_within

BATCH: Final = 1_000
"""Messages in one query of the index for what followed them: a statement of a few milliseconds."""

PIECE: Final = 2_048
"""Offsets read at once: one attach, and about ten milliseconds."""

PAGE_BLOCKS: Final = 2_048
"""Blocks of the time index read at once: a quarter of a million messages, half a megabyte of blocks."""

SPAN_S: Final = 86_400
"""Default seconds of due times to check: a day."""

_NOBODY: Final = -1


class _WaitingMessage(NamedTuple):
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


def defined(catalog: Catalog) -> tuple[Expectation, ...]:
    rows: list[Any] = catalog.servers.rows(DEFINED, {"vhost": catalog.vhost})
    return tuple(Expectation(*row) for row in rows)


def _expectation_named(catalog: Catalog, name: str | Expectation) -> Expectation:
    """Return the expectation of a name; an `Expectation` is returned as it is.

    Raises:
        NotFound: no expectation of that name is defined in this virtual host.
    """
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
    return again_if_replaced(catalog, lambda: _Check(catalog, expectation, limit).report(low, high))


class _Check:
    """One check of an expectation: reads the messages of a span, and finds those that were not followed in time.

    All findings are counted; the first `limit` of each kind are kept.
    """

    def __init__(self, catalog: Catalog, expectation: Expectation, limit: int) -> None:
        self._catalog = catalog
        self._expectation = expectation
        self._limit = limit
        self._by = catalog.definition(expectation.by)
        catalog.check_names([expectation.of, expectation.follows])
        # In this order, because a message may be followed a moment later.
        self._of = known(catalog, expectation.of, (TIME,))
        self._followed = known(catalog, expectation.follows, (self._by.key_id, TIME))
        self._batch: list[_WaitingMessage] = []
        self._found: dict[ExpectationResult, list[UnmetExpectation]] = {each: [] for each in ExpectationResult}
        self._counts = dict.fromkeys(ExpectationResult, 0)
        self._reasons: Counter[Reason] = Counter()
        self._checked = self._without_value = self._unreadable = 0
        self._has_lost = False
        """Whether retention may have dropped messages before they were checked."""

    def report(self, since: int | None, until: int | None) -> MissingReport:
        """Check the messages of times from `since` to before `until`."""
        of, end = self._of, self._of.asked_us if until is None else until
        begin = self._default_begin(end) if since is None else since
        self._check(begin, end - 1)
        # A default span starts with what is retained, so nothing in it is lost.
        status = self._status(begin, end, has_lost=self._has_lost and since is not None)
        unrecorded: set[str] = set()
        if status is Status.NOT_RECORDED_YET:
            unrecorded = of.unrecorded_streams(self._catalog) | self._followed.unrecorded_streams(self._catalog)
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
            not_due_count=self._reasons[Reason.NOT_DUE],
            checked=self._checked,
            without_value=self._without_value,
            unreadable=self._unreadable,
            streams=tuple(sorted(of.firsts)),
            unrecorded_streams=tuple(sorted(unrecorded)),
            new_keys=self._followed.evidence.named_new_keys(self._catalog, [self._by.key_id]) if is_open else (),
        )

    def _default_begin(self, end: int) -> int:
        """Return the default start of a span: messages due a day ago, or the start of the known span."""
        expectation, spans = self._expectation, self._of.spans
        begin = end - expectation.within_us - SPAN_S * 1_000_000
        return max(begin, (spans[-1][0] if spans else ALWAYS) + expectation.grace_us + 1, TIME_US_MIN)

    def _status(self, begin: int, end: int, *, has_lost: bool) -> Status:
        if self._counts[ExpectationResult.LATE] or self._counts[ExpectationResult.MISSING]:
            return Status.FOUND
        of, grace_us = self._of, self._expectation.grace_us
        # Messages that are not due change nothing, nor does what is known of them.
        due = min(end - 1, of.asked_us - self._expectation.within_us - grace_us - 1)
        is_known = due < begin or of.holds(begin - grace_us, due + grace_us)
        is_known = is_known and not (self._unreadable or has_lost)
        is_behind = bool(of.behind) and due + grace_us >= of.until
        if Reason.UNPROVEN in self._reasons or not (is_known or is_behind):
            return Status.UNPROVEN
        if Reason.BEHIND in self._reasons or not is_known:
            return Status.NOT_RECORDED_YET
        return Status.ABSENT

    # --- reading ------------------------------------------------------------------------------------------

    def _check(self, low: int, high: int) -> None:
        """Check all messages of times from `low` to `high`, both included."""
        for stream in self._of.evidence.recorded:
            begun = self._read(stream, self._of.firsts[stream.name], low, high)
            if begun is not None:
                # The broker silently moves a reader forward to the first retained offset.
                bounds: StreamBounds = self._catalog.servers.bounds(stream.name)
                self._has_lost = self._has_lost or bounds.first is None or bounds.first > begun
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
        # If there are several values, each must be followed.
        self._batch += [_WaitingMessage(message.id, stream_id, value, time_us, due_us) for value in values]

    # --- judging ------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Check the batch against the index."""
        batch, self._batch = self._batch, []
        if not batch:
            return
        stream_ids = {stream.stream_id: stream.name for stream in self._followed.evidence.recorded}
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
                "grace_us": self._expectation.grace_us,
            },
        )
        if rows:
            self._followed = still(self._catalog, self._followed, self._by)
        for number, stream_id, offset, time_us in sorted(rows):
            came = None if stream_id is None else MessageId(stream_ids[stream_id], offset)
            self._keep(self._unmet(batch[number], came, None if time_us is None else moment_of(time_us)))

    def _unmet(self, asked: _WaitingMessage, came: MessageId | None, came_at: datetime | None) -> UnmetExpectation:
        why: Reason | None = None
        grace_us = self._expectation.grace_us
        # Everything written until `due_us` by the slowest clock must be known, and from where the search began: before
        # a span are the messages written before its first one, by a clock that may be ahead of the slowest.
        known_us = asked.due_us + grace_us
        if known_us >= self._followed.asked_us:
            finding, why = ExpectationResult.NOT_KNOWN, Reason.NOT_DUE
        elif self._followed.holds(asked.time_us - 2 * grace_us, known_us):
            finding = ExpectationResult.MISSING if came is None else ExpectationResult.LATE
        else:
            is_behind = self._followed.behind and known_us >= self._followed.until
            finding, why = ExpectationResult.NOT_KNOWN, Reason.BEHIND if is_behind else Reason.UNPROVEN
        moment, due = moment_of(asked.time_us), moment_of(asked.due_us)
        return UnmetExpectation(finding, asked.id, asked.value, moment, due, why, came, came_at)

    def _keep(self, unmet: UnmetExpectation) -> None:
        self._counts[unmet.finding] += 1
        if unmet.why is not None:
            self._reasons[unmet.why] += 1
        found = self._found[unmet.finding]
        found.append(unmet)
        if len(found) > 2 * self._limit:
            found[:] = self._first(unmet.finding)

    def _first(self, finding: ExpectationResult) -> tuple[UnmetExpectation, ...]:
        return tuple(sorted(self._found[finding], key=lambda each: (each.time, each.id))[: self._limit])
