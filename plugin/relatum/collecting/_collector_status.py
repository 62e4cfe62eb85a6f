"""How collectors are doing: who runs, how far they have come, what waits, and what became of messages, page by page."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from relatum.checks import checked_count, checked_name, checked_names, meant, shown
from relatum.errors import InvalidInput, NotFound, StreamNotFound
from relatum.outcomes import Outcome, OutcomeStatus, outcome_columns
from relatum.reading import BrokerAddress, StreamReader
from relatum.store import (
    AnyDatabase,
    as_engine,
    collected_messages,
    collector_members,
    collector_sources,
    collectors,
    holds,
    translated_errors,
)

_messages: Final = collected_messages.c
_sources: Final = collector_sources.c
_members: Final = collector_members.c
_is_alive: Final = holds(_members.lease_expires_at)
_of_collector: Final = sa.bindparam("in_collector", type_=sa.Integer)

ALL_COLLECTORS: Final = sa.select(
    collectors.c.collector_id, collectors.c.vhost, collectors.c.name, collectors.c.keep_s
).order_by(collectors.c.name, collectors.c.vhost)

MEMBERS: Final = (
    sa.select(
        _members.member_id, _members.holder, _members.types, _is_alive, _members.joined_at, _members.lease_expires_at
    )
    .where(_members.collector_id == _of_collector)
    .order_by(_members.member_id)
)

SOURCES: Final = (
    sa.select(
        _sources.stream,
        _sources.position,
        _members.holder,
        _sources.moved_at,
        _sources.passed_over,
    )
    .join_from(
        collector_sources, collector_members, (_members.member_id == _sources.member_id) & _is_alive, isouter=True
    )
    .where(_sources.collector_id == _of_collector, _sources.replaced_at.is_(None))
    .order_by(_sources.stream)
)

UNFINISHED: Final = (
    sa.select(
        _messages.state,
        _messages.type,
        sa.func.count().label("count"),
        sa.func.min(_messages.collected_at).label("oldest"),
    )
    .join(collector_sources, _sources.source_id == _messages.source_id)
    .where(_sources.collector_id == _of_collector, _messages.finished_at.is_(None))
    .group_by(_messages.state, _messages.type)
)


_at: Final = sa.bindparam("at", type_=sa.DateTime(timezone=True))
_behind: Final = sa.tuple_(_messages.finished_at, _messages.source_id, _messages.stream_offset) < sa.tuple_(
    _at,
    sa.bindparam("at_source", type_=sa.Integer),
    sa.bindparam("at_offset", type_=sa.BigInteger),
)
_before: Final = (_messages.finished_at.is_not(None), _messages.finished_at <= _at, _behind)
_kinds: Final = sa.bindparam("states", type_=sa.ARRAY(sa.Text))
_limit: Final = sa.bindparam("limit", type_=sa.BigInteger)

# The latest of the moments up to which each stream's finished messages are looked through: so many of each, by index.
FLOOR: Final = sa.select(
    sa.func.max(
        sa.select(_messages.finished_at)
        .where(_messages.source_id == _sources.source_id, *_before)
        .order_by(_messages.finished_at.desc())
        .offset(sa.bindparam("looked", type_=sa.BigInteger))
        .limit(1)
        .scalar_subquery()
    )
).where(_sources.collector_id == _of_collector)

_shown: Final = (*outcome_columns, _messages.source_id)
_of_one: Final = (
    sa.select(*_shown)
    .join_from(collected_messages, collector_sources, _sources.source_id == _messages.source_id)
    .join(collectors, collectors.c.collector_id == _sources.collector_id)
    .where(_sources.collector_id == _of_collector, _messages.state == sa.any_(_kinds))
)

# The columns of `Outcome`, in its order, and the source.
FINISHED_BEFORE: Final = (
    _of_one.where(*_before, _messages.finished_at >= sa.bindparam("floor", type_=sa.DateTime(timezone=True)))
    .order_by(_messages.finished_at.desc(), _messages.source_id.desc(), _messages.stream_offset.desc())
    .limit(_limit)
)

# Stream by stream, each by the index of those that have a reason: nothing that succeeded is passed.
_last: Final = (
    sa.select(*(each for each in _shown if each.table is collected_messages))
    .where(_messages.source_id == _sources.source_id, *_before)
    .where(_messages.reason.is_not(None), _messages.state == sa.any_(_kinds))
    .order_by(_messages.finished_at.desc(), _messages.stream_offset.desc())
    .limit(_limit)
    .correlate(collector_sources)
    .lateral("last")
)
UNSUCCESSFUL_BEFORE: Final = (
    sa.select(*(_last.c[each.name] if each.table is collected_messages else each for each in _shown))
    .join_from(collector_sources, collectors, collectors.c.collector_id == _sources.collector_id)
    .join(_last, sa.true())
    .where(_sources.collector_id == _of_collector)
    .order_by(_last.c.finished_at.desc(), _last.c.source_id.desc(), _last.c.stream_offset.desc())
    .limit(_limit)
)

# By itself: to walk along the index of places would pass all that is finished.
_waiting: Final = (
    _of_one.where(
        _messages.finished_at.is_(None),
        sa.tuple_(_messages.source_id, _messages.stream_offset)
        > sa.tuple_(sa.bindparam("at_source", type_=sa.Integer), sa.bindparam("at_offset", type_=sa.BigInteger)),
    )
    .offset(0)
    .subquery("waiting")
)
UNFINISHED_AFTER: Final = sa.select(_waiting).order_by(_waiting.c.source_id, _waiting.c.stream_offset).limit(_limit)


def finished_in(table: Any) -> "sa.Select[Any]":
    """Finished messages of a collector by state, in the table or in a sample of it."""
    return (
        sa.select(table.c.state, sa.func.count())
        .join(collector_sources, _sources.source_id == table.c.source_id)
        .where(_sources.collector_id == _of_collector, table.c.finished_at.is_not(None))
        .group_by(table.c.state)
    )


EXACT_PAGES_MAX: Final = 50_000
"""Pages of the table up to which finished messages are counted; a larger one is sampled."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One running collector, or one that died with something left: who it is, its executors, and its lease."""

    member: int
    holder: str
    types: list[str]
    is_alive: bool
    joined_at: datetime
    lease_expires_at: datetime


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """One stream messages were collected from.

    `position` is the next offset to be read, None where the stream is not followed but messages of it were handed in.
    `lag_offsets` counts from there to the stream's end; None without a broker to ask. `follower` is who follows the
    stream now. `passed_over` counts messages of types without an executor.
    """

    stream: str
    position: int | None
    lag_offsets: int | None
    follower: str | None
    moved_at: datetime | None
    passed_over: int


@dataclass(frozen=True, slots=True)
class CollectorStatus:
    """One collector.

    `counts` has messages by state, finished ones as long as they are kept (an estimate where there are many);
    `unattended` those of types no running member has an executor of; `oldest_unfinished_at` when the message that has
    waited longest was collected.
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
    database: AnyDatabase, names: Collection[str] | None = None, *, broker: BrokerAddress | None = None
) -> list[CollectorStatus]:
    """The status of collectors, by name.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        names: Collectors; None: all.
        broker: Where the streams are, to know how far behind the positions are; None: that is left open.

    Raises:
        NotFound: there is no collector of a name.
    """
    if names is not None:
        names = checked_names("names", names)
    if broker is not None and not isinstance(broker, BrokerAddress):
        raise InvalidInput(f"broker= takes a BrokerAddress, not {shown(broker)}")
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        rows = connection.execute(ALL_COLLECTORS).all()
        known = {row.name for row in rows}
        found = [_status_of(connection, row) for row in rows if names is None or row.name in names]
        for name in names or ():
            if name not in known:
                hint = meant(name, known)
                raise NotFound(f"there is no collector {name!r}{hint}: its first member makes it")
    return found if broker is None else _with_lags(found, broker)


def _status_of(connection: sa.Connection, row: Any) -> CollectorStatus:
    named = {"in_collector": row.collector_id}
    members = [MemberStatus(*member) for member in connection.execute(MEMBERS, named)]
    sources = [
        SourceStatus(each.stream, each.position, None, each.holder, each.moved_at, each.passed_over)
        for each in connection.execute(SOURCES, named)
    ]
    unfinished = connection.execute(UNFINISHED, named).all()
    counts = dict.fromkeys(("collected", "forwarded", "succeeded", "failed", "dead"), 0)
    counts |= _finished(connection, row.collector_id)
    attended = {each for member in members if member.is_alive for each in member.types}
    unattended: dict[str, int] = {}
    for state, of_type, count, _ in unfinished:
        counts[state] += count
        if of_type not in attended:
            unattended[of_type] = unattended.get(of_type, 0) + count
    oldest = min((each.oldest for each in unfinished), default=None)
    return CollectorStatus(row.name, row.vhost, row.keep_s, counts, oldest, members, sources, unattended)


def _finished(connection: sa.Connection, collector_id: int) -> dict[str, int]:
    """Finished messages by state: counted in a small table, sampled in a large one."""
    pages = sa.text("SELECT relpages FROM pg_class WHERE oid = 'relatum.collected_messages'::regclass")
    share = min(100.0, 100.0 * EXACT_PAGES_MAX / max(1, connection.execute(pages).scalar_one()))
    table: Any = collected_messages if share == 100.0 else sa.tablesample(collected_messages, sa.func.system(share))
    counts = connection.execute(finished_in(table), {"in_collector": collector_id})
    return {state: round(count * 100.0 / share) for state, count in counts}


def _with_lags(found: list[CollectorStatus], broker: BrokerAddress) -> list[CollectorStatus]:
    with StreamReader.open(broker) as reader:
        return [_with_lag(status, reader) if status.vhost == broker.vhost else status for status in found]


def _with_lag(status: CollectorStatus, reader: StreamReader) -> CollectorStatus:
    return replace(status, sources=[replace(source, lag_offsets=_lag(source, reader)) for source in status.sources])


def _lag(source: SourceStatus, reader: StreamReader) -> int | None:
    """Offsets from the position to the stream's end; None where it is not followed, or not there."""
    if source.position is None:
        return None
    try:
        return reader.bounds(source.stream).lag(source.position)
    except StreamNotFound:
        return None


LOOKED: Final = 20_000
"""Finished messages of each stream that are looked through for a page of such as succeeded: some 30 ms."""

_LONG_AGO: Final = datetime(1, 1, 1, tzinfo=UTC)


class CollectedAt(NamedTuple):
    """Where a page ended: when its last message was finished (None: it is not), of which stream, at which offset."""

    finished_at: datetime | None
    source: int
    offset: int


@dataclass(frozen=True, slots=True)
class CollectedPage:
    """A part of a collector's messages.

    Attributes:
        outcomes: What became of each: finished ones the latest first, others by stream and offset.
        next: Where the next page begins; None where all were looked at.
        looked_to: Up to when, going back, messages were looked through for those that succeeded; None for all, or for
            others.
    """

    outcomes: tuple[Outcome, ...]
    next: CollectedAt | None
    looked_to: datetime | None = None


def collected(
    database: AnyDatabase,
    collector: str,
    states: Collection[OutcomeStatus],
    *,
    vhost: str = "/",
    after: CollectedAt | None = None,
    limit: int = 100,
) -> CollectedPage:
    """The messages of a collector that are in some states: either final ones, or others.

    Finished messages are found by when they were finished. Where those that succeeded are meant, 20,000 of each stream
    are looked through at most: a page may hold fewer than there are, or none, and still have a next one.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        collector: Its name.
        states: The states: all of them final, or none.
        vhost: Its virtual host.
        after: `next` of the page before; None (default): the first page.
        limit: Messages at most, from 1 to 1,000.

    Raises:
        NotFound: there is no such collector.
        InvalidInput: an argument is wrong.
    """
    checked_name("collector", collector)
    checked_count("limit", limit, most=1_000)
    if OutcomeStatus.UNKNOWN in states or len({each.is_final for each in states}) != 1:
        raise InvalidInput("states= takes final states, or such as are not; not both, and not unknown")
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        one = ALL_COLLECTORS.where(collectors.c.name == collector, collectors.c.vhost == vhost)
        found = connection.execute(one).scalar_one_or_none()
        if found is None:
            raise NotFound(f"there is no collector {collector!r}: its first member makes it")
        wanted = {"in_collector": found, "states": [each.value for each in states], "limit": limit + 1}
        if all(each.is_final for each in states):
            return _page_of_finished(connection, wanted, after, limit)
        at = after or CollectedAt(None, 0, 0)
        waiting = connection.execute(UNFINISHED_AFTER, wanted | {"at_source": at.source, "at_offset": at.offset}).all()
        following = None if len(waiting) <= limit else _end_at(waiting[limit - 1])
        return CollectedPage(tuple(map(_outcome, waiting[:limit])), following)


def _page_of_finished(
    connection: sa.Connection, wanted: dict[str, Any], after: CollectedAt | None, limit: int
) -> CollectedPage:
    if after is None or after.finished_at is None:
        # A moment of the database's own clock, before which all that is finished lies.
        now = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
        after = CollectedAt(now, 0, 0)
    wanted = wanted | {"at": after.finished_at, "at_source": after.source, "at_offset": after.offset}
    floor = None
    if OutcomeStatus.SUCCEEDED.value in wanted["states"]:
        floor = connection.execute(FLOOR, wanted | {"looked": LOOKED}).scalar_one()
        rows = connection.execute(FINISHED_BEFORE, wanted | {"floor": floor or _LONG_AGO}).all()
    else:
        rows = connection.execute(UNSUCCESSFUL_BEFORE, wanted).all()
    following = None
    if len(rows) > limit:
        following = _end_at(rows[limit - 1])
    elif floor is not None:
        following = CollectedAt(floor, 0, 0)
    return CollectedPage(tuple(map(_outcome, rows[:limit])), following, floor)


def _end_at(row: Any) -> CollectedAt:
    return CollectedAt(row.finished_at, row.source_id, row.stream_offset)


def _outcome(row: Any) -> Outcome:
    message_id, state, *facts = row[:-1]
    return Outcome(message_id, OutcomeStatus(state), *facts)
