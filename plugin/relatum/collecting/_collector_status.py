"""How collectors are doing: who runs, how far they have come, and what waits."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from relatum.checks import checked_names, meant, shown
from relatum.collecting import _collector_status_statements as statements
from relatum.errors import InvalidInput, NotFound, StreamNotFound
from relatum.reading import BrokerAddress, StreamReader
from relatum.store import AnyDatabase, as_engine, collected_messages, translated_errors

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
        rows = connection.execute(statements.all_collectors).all()
        known = {row.name for row in rows}
        found = [_status_of(connection, row) for row in rows if names is None or row.name in names]
        for name in names or ():
            if name not in known:
                hint = meant(name, known)
                raise NotFound(f"there is no collector {name!r}{hint}: its first member makes it")
    return found if broker is None else _with_lags(found, broker)


def _status_of(connection: sa.Connection, row: Any) -> CollectorStatus:
    named = {"in_collector": row.collector_id}
    members = [MemberStatus(*member) for member in connection.execute(statements.members, named)]
    sources = [
        SourceStatus(each.stream, each.position, None, each.holder, each.moved_at, each.passed_over)
        for each in connection.execute(statements.sources, named)
    ]
    unfinished = connection.execute(statements.unfinished, named).all()
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
    counts = connection.execute(statements.finished_in(table), {"in_collector": collector_id})
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
