"""The statistics of a member; the status of collectors, and their messages by state, for any process."""

from collections import Counter as Counts
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple

import sqlalchemy as sa

from relatum.collecting._collector_core import Result
from relatum.collecting._collector_members import FIND_COLLECTOR
from relatum.common.checks import checked_count, checked_name, checked_names, meant
from relatum.errors import InvalidInput, NotFound
from relatum.metrics import Counter, Distribution, Gauge, Histogram, Observed, PerLabel, reported
from relatum.outcomes import Outcome, OutcomeStatus
from relatum.reading import Broker, BrokerAddress, StreamBounds, StreamReader, bounds_or_error
from relatum.store.database import AnyDatabase, as_engine, sql, transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeStatistics:
    """The statistics of one type with an executor in this member.

    Attributes:
        collected: Messages stored for this member to consume.
        outcomes: Messages whose outcome became final here, by status: "succeeded", "failed", "dead".
        retries: Failed attempts that are retried.
        waiting_bulks: Closed bulks waiting for a worker.
        bulk_s: Seconds from taking a bulk to storing its results.
    """

    collected: Annotated[
        int, Counter("relatum_collector_collected_total", "Messages stored for this member to consume")
    ]
    outcomes: Annotated[
        Mapping[str, int],
        Counter("relatum_collector_outcomes_total", "Messages whose outcome became final in this member", by="status"),
    ]
    retries: Annotated[int, Counter("relatum_collector_retries_total", "Failed attempts that are retried")]
    waiting_bulks: Annotated[int, Gauge("relatum_collector_waiting_bulks", "Closed bulks that wait for a worker")]
    bulk_s: Annotated[
        Observed, Distribution("relatum_collector_bulk_seconds", "Time from taking a bulk to storing its results")
    ]


@reported("collector")
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorStatistics:
    """The counts of one member of a collector, and what it holds now.

    Attributes:
        types: Statistics by type, for types with an executor here.
        held_messages: Messages taken and not finished.
        held_bytes: Memory of the held messages in bytes, which counts towards `bytes_max`.
        passed_over: Messages of types without an executor here, and messages that cannot be read.
        refused: Messages refused or not stored: no room in time, the collector is closing, or storing failed.
    """

    types: Annotated[Mapping[str, TypeStatistics], PerLabel("type")]
    held_messages: Annotated[int, Gauge("relatum_collector_held_messages", "Messages taken and not finished")]
    held_bytes: Annotated[int, Gauge("relatum_collector_held_bytes", "Memory of the held messages")]
    passed_over: Annotated[
        int, Counter("relatum_collector_passed_over_total", "Messages unreadable or without executor")
    ]
    refused: Annotated[int, Counter("relatum_collector_refused_total", "Messages refused or not stored")]


class TypeCounts:
    """The counts of a type. For the collector's loop."""

    def __init__(self) -> None:
        self.collected = self.retries = 0
        self.outcomes: Counts[str] = Counts()
        self.bulk_s = Histogram()

    def settled(self, results: Sequence[Result], seconds: float) -> None:
        self.bulk_s.observe(seconds)
        found = Counts(result.status for result in results)
        self.retries += found.pop(OutcomeStatus.COLLECTED, 0)
        self.outcomes.update({status.value: count for status, count in found.items()})

    def statistics(self, waiting_bulks: int) -> TypeStatistics:
        return TypeStatistics(
            collected=self.collected,
            outcomes=dict(self.outcomes),
            retries=self.retries,
            waiting_bulks=waiting_bulks,
            bulk_s=self.bulk_s.observed(),
        )


# --- status -----------------------------------------------------------------------------------------------------------

ALL_COLLECTORS: Final = sql("SELECT collector_id, vhost, name, keep_s FROM relatum.collectors ORDER BY name, vhost")

MEMBERS: Final = sql("""
    SELECT member_id, holder, types, lease_expires_at >= clock_timestamp(), joined_at, lease_expires_at
    FROM relatum.collector_members WHERE collector_id = :in_collector::integer ORDER BY member_id""")

SOURCES: Final = sql("""
    SELECT stream, position, NULL::bigint, member.holder, moved_at, passed_over
    FROM relatum.collector_sources AS source LEFT JOIN relatum.collector_members AS member
        ON member.member_id = source.member_id AND member.lease_expires_at >= clock_timestamp()
    WHERE source.collector_id = :in_collector::integer AND replaced_at IS NULL ORDER BY stream""")

UNFINISHED: Final = sql("""
    SELECT state, type, count(*) AS count, min(collected_at) AS oldest
    FROM relatum.collected_messages JOIN relatum.collector_sources USING (source_id)
    WHERE collector_id = :in_collector::integer AND finished_at IS NULL GROUP BY state, type""")

_SHOWN: Final = """message.message_id, message.state, collector.name, message.type, source.stream,
        message.stream_offset, message.attempts, message.reason, message.collected_at, message.forwarded_at,
        message.finished_at, message.source_id"""
"""The columns of `Outcome`, in order, and the source."""

_TABLES: Final = """relatum.collector_sources AS source
        JOIN relatum.collectors AS collector ON collector.collector_id = source.collector_id"""

_MINE: Final = "source.collector_id = :in_collector::integer"

_KINDS: Final = "message.state = ANY (:states::text[])"

_PAGE: Final = f"""
    SELECT {_SHOWN} FROM {_TABLES} JOIN LATERAL (
        SELECT * FROM relatum.collected_messages AS message
        WHERE message.source_id = source.source_id AND {_KINDS} AND %s
            AND message.finished_at IS NOT NULL AND message.finished_at <= :at::timestamptz
            AND (message.finished_at, message.source_id, message.stream_offset)
                < (:at::timestamptz, :at_source::integer, :at_offset::bigint)
        ORDER BY message.finished_at DESC, message.stream_offset DESC LIMIT :limit::bigint) AS message ON true
    WHERE {_MINE}
    ORDER BY message.finished_at DESC, message.source_id DESC, message.stream_offset DESC LIMIT :limit::bigint
    """
"""Reads a page of each stream's finished messages by an index, and takes the latest of them."""

FINISHED_BEFORE: Final = sql(_PAGE % "true")

# Uses the index of messages with a reason, which excludes those that succeeded.
UNSUCCESSFUL_BEFORE: Final = sql(_PAGE % "message.reason IS NOT NULL")

# `OFFSET 0` keeps PostgreSQL from scanning the index of places, finished messages included.
UNFINISHED_AFTER: Final = sql(f"""
    SELECT * FROM (
        SELECT {_SHOWN}
        FROM {_TABLES} JOIN relatum.collected_messages AS message ON message.source_id = source.source_id
        WHERE {_MINE} AND {_KINDS} AND message.finished_at IS NULL AND (message.source_id, message.stream_offset)
            > (:at_source::integer, :at_offset::bigint)
        OFFSET 0) AS waiting
    ORDER BY source_id, stream_offset LIMIT :limit::bigint""")

PAGES: Final = sql("SELECT relpages FROM pg_class WHERE oid = 'relatum.collected_messages'::regclass")

COUNT_FINISHED: Final = sql(f"""
    SELECT state, count(*) FROM relatum.collected_messages AS message TABLESAMPLE SYSTEM (:share::real)
        JOIN relatum.collector_sources AS source ON source.source_id = message.source_id
    WHERE {_MINE} AND message.finished_at IS NOT NULL GROUP BY state""")

EXACT_PAGES_MAX: Final = 50_000
"""Finished messages are counted in a table of up to this many pages; a larger table is sampled."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member, its holder, types and lease. A dead member is listed until others take over its messages."""

    member: int
    holder: str
    types: list[str]
    is_alive: bool
    joined_at: datetime
    lease_expires_at: datetime


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """A stream that messages were collected from.

    `position`: The next offset to read; None if the stream was never followed and messages came from `collect`.
    `lag_offsets`: Offsets from `position` to the stream's end; None if that is unknown. `follower`: The holder of the
    member that follows the stream now. `passed_over`: The number of messages without an executor, or unreadable.
    """

    stream: str
    position: int | None
    lag_offsets: int | None
    follower: str | None
    moved_at: datetime | None
    passed_over: int


@dataclass(frozen=True, slots=True)
class CollectorStatus:
    """The status of one collector.

    `counts`: Messages by state; finished ones while they are kept (an estimate if there are many). `unattended`:
    Unfinished messages by type, for types without an executor in any live member. `oldest_unfinished_at`: When the
    oldest unfinished message was collected.
    """

    collector: str
    vhost: str
    keep_s: int | None
    counts: dict[str, int]
    oldest_unfinished_at: datetime | None
    members: list[MemberStatus] = field(default_factory=list)
    sources: list[SourceStatus] = field(default_factory=list)
    unattended: dict[str, int] = field(default_factory=dict)


def collector_status(
    database: AnyDatabase, names: Collection[str] | None = None, *, broker: str | Broker | None = None
) -> list[CollectorStatus]:
    """Return the status of collectors, ordered by name.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        names: Names of collectors. None (default): all collectors.
        broker: The broker's URL or a `Broker`, to compute `lag_offsets`. None (default): `lag_offsets` stays None.

    Raises:
        NotFound: There is no collector with one of the names.
    """
    if names is not None:
        names = checked_names("names", names)
    address = None if broker is None else BrokerAddress.of(broker)
    with as_engine(database) as engine, transaction(engine) as connection:
        rows = connection.execute(ALL_COLLECTORS).all()
        known = {row.name for row in rows}
        for name in names or ():
            if name not in known:
                raise NotFound(f"there is no collector {name!r}{meant(name, known)}: start a member, which creates it")
        found = [_status_of(connection, row) for row in rows if names is None or row.name in names]
    if address is not None:
        with StreamReader.open(address) as reader:
            for status in found:
                for n, source in enumerate(status.sources if status.vhost == address.vhost else ()):
                    if source.position is not None:
                        bounds = bounds_or_error(reader, source.stream)
                        lag = bounds.lag(source.position) if isinstance(bounds, StreamBounds) else None
                        status.sources[n] = replace(source, lag_offsets=lag)
    return found


def _status_of(connection: sa.Connection, row: Any) -> CollectorStatus:
    named = {"in_collector": row.collector_id}
    members = [MemberStatus(*member) for member in connection.execute(MEMBERS, named)]
    sources = [SourceStatus(*source) for source in connection.execute(SOURCES, named)]
    unfinished = connection.execute(UNFINISHED, named).all()
    counts = dict.fromkeys(("collected", "forwarded", "succeeded", "failed", "dead"), 0)
    # Counted in a small table, estimated from a sample of a large one.
    share = min(100.0, 100.0 * EXACT_PAGES_MAX / max(1, connection.execute(PAGES).scalar_one()))
    for state, count in connection.execute(COUNT_FINISHED, named | {"share": share}):
        counts[state] = round(count * 100.0 / share)
    attended = {each for member in members if member.is_alive for each in member.types}
    unattended: dict[str, int] = {}
    for state, of_type, count, _ in unfinished:
        counts[state] += count
        if of_type not in attended:
            unattended[of_type] = unattended.get(of_type, 0) + count
    oldest = min((each.oldest for each in unfinished), default=None)
    return CollectorStatus(row.name, row.vhost, row.keep_s, counts, oldest, members, sources, unattended)


class CollectedAt(NamedTuple):
    """The end of a page: its last message's finish time (None: unfinished), stream id and offset."""

    finished_at: datetime | None
    source: int
    offset: int


@dataclass(frozen=True, slots=True)
class CollectedPage:
    """A page of a collector's messages.

    Attributes:
        outcomes: The outcomes: finished ones latest first, others by stream and offset.
        next: The value of `after` for the next page; None if there is none.
    """

    outcomes: tuple[Outcome, ...]
    next: CollectedAt | None


def collected(
    database: AnyDatabase,
    collector: str,
    states: Collection[OutcomeStatus],
    *,
    vhost: str = "/",
    after: CollectedAt | None = None,
    limit: int = 100,
) -> CollectedPage:
    """Return one page of a collector's messages in the given states.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        collector: The collector's name.
        states: The states to list: either only final states, or only unfinished ones.
        vhost: The collector's virtual host. Default: "/".
        after: `next` of the previous page. None (default): the first page.
        limit: Maximum number of messages, from 1 to 1,000. Default: 100.

    Raises:
        NotFound: There is no such collector.
        InvalidInput: An argument is invalid.
    """
    checked_name("collector", collector)
    checked_count("limit", limit, most=1_000)
    if OutcomeStatus.UNKNOWN in states or len({each.is_final for each in states}) != 1:
        raise InvalidInput("states= takes only final states or only unfinished ones, and never unknown")
    with as_engine(database) as engine, transaction(engine) as connection:
        found = connection.execute(FIND_COLLECTOR, {"named": collector, "of_vhost": vhost}).scalar_one_or_none()
        if found is None:
            raise NotFound(f"there is no collector {collector!r}: start a member, which creates it")
        wanted = {"in_collector": found, "states": [each.value for each in states], "limit": limit + 1}
        query = FINISHED_BEFORE if OutcomeStatus.SUCCEEDED in states else UNSUCCESSFUL_BEFORE
        if not all(each.is_final for each in states):
            query = UNFINISHED_AFTER
        after = after or CollectedAt(None, 0, 0)
        at = {"at": after.finished_at or "infinity", "at_source": after.source, "at_offset": after.offset}
        rows = connection.execute(query, wanted | at).all()
    last = rows[limit - 1] if len(rows) > limit else None
    following = None if last is None else CollectedAt(last.finished_at, last.source_id, last.stream_offset)
    outcomes = (Outcome(message_id, OutcomeStatus(state), *facts) for message_id, state, *facts, _ in rows[:limit])
    return CollectedPage(tuple(outcomes), following)
