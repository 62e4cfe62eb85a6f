"""The rows of collected messages: written, changed and read in a transaction of the store's, and forgotten when old.

Rows that a call names are an array of offsets in one source: one statement for any number of them, and no join, which
PostgreSQL could begin at the wrong end while it does not know how much is waiting.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import psycopg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.checks import checked_count, checked_seconds
from relatum.collecting._bulk import Entry, Result, Stored
from relatum.ids import MessageId
from relatum.outcomes import OutcomeStatus
from relatum.store import (
    BigIntegers,
    arrays,
    collected_messages,
    collector_members,
    collector_sources,
    collectors,
    copy_lines,
    copy_text,
    holds,
    interval,
    needs_escape,
    translated_errors,
)

_messages: Final = collected_messages.c
_sources: Final = collector_sources.c
_NOW: Final = sa.func.statement_timestamp()
"""The clock where a joined transaction may have begun long before; `now()` would be its beginning."""

_of_collector: Final = sa.bindparam("in_collector", type_=sa.Integer)
_of_member: Final = _messages.member_id == sa.bindparam("of_member", type_=sa.BigInteger)

_OFFSETS: Final = sa.bindparam("offsets", type_=BigIntegers())

# The member is compared in a way no index serves: by its own, all that it has not finished would be read.
_mine: Final = (
    _messages.source_id == sa.bindparam("source", type_=sa.Integer),
    _messages.stream_offset == sa.any_(_OFFSETS),
    _messages.member_id.is_not_distinct_from(sa.bindparam("of_member", type_=sa.BigInteger)),
)


def _found(offset: Any, at: Any) -> Any:
    """Offsets in one row, None for none, with their time: to give a row for each takes the client longer."""
    return sa.select(sa.func.array_agg(offset), sa.func.max(at))


def _changed(change: sa.Update, at: Any) -> Any:
    """An update that gives the offsets it has changed, and when it did."""
    done = change.returning(_messages.stream_offset, at.label("at")).cte("done")
    return _found(done.c.stream_offset, done.c.at)


def _its_own(name: str, kind: Any) -> Any:
    """The row's own item of an array that goes with the offsets: each of them is looked for among all."""
    items: Any = sa.sql.elements.Grouping(sa.bindparam(name, type_=sa.ARRAY(kind)))
    return items[sa.func.array_position(_OFFSETS, _messages.stream_offset)]


# Collecting and consuming

_NEW: Final = arrays(
    "new",
    source=sa.Integer,
    offset=sa.BigInteger,
    member=sa.BigInteger,
    size=sa.Integer,
    message_id=sa.Text,
    type=sa.Text,
)

ADD_MISSING: Final = (
    insert(collected_messages)
    .from_select(
        ["source_id", "stream_offset", "member_id", "size", "message_id", "type"],
        sa.select(*_NEW.c),
    )
    .on_conflict_do_nothing()
)

MINE_TO_CONSUME: Final = sa.select(_messages.source_id, _messages.stream_offset).where(
    *_mine, _messages.state == "collected", _messages.attempts == 0
)

FORWARD: Final = _changed(
    sa.update(collected_messages)
    .where(*_mine, _messages.state == "collected")
    .values(
        state="forwarded",
        attempts=_messages.attempts + 1,
        bulk_id=sa.bindparam("into", type_=sa.BigInteger),
        forwarded_at=_NOW,
        next_attempt_at=None,
    ),
    _messages.forwarded_at,
)

FORWARDED: Final = _found(_messages.stream_offset, _messages.forwarded_at).where(
    *_mine,
    _messages.state == "forwarded",
    _messages.bulk_id == sa.bindparam("into", type_=sa.BigInteger),
)

TEXTS: Final = sa.select(sa.bindparam("texts", type_=sa.ARRAY(sa.Text)))
"""Texts as they are: what the database cannot hold, it refuses."""

# What this member cannot go on with, and another can, is nobody's until that one takes it over.
_others: Final = collector_members.alias("others")
GIVE_BACK: Final = (
    sa.update(collected_messages)
    .where(
        *_mine,
        _messages.finished_at.is_(None),
        sa.exists().where(
            _others.c.collector_id == _of_collector,
            _others.c.member_id != sa.bindparam("of_member", type_=sa.BigInteger),
            holds(_others.c.lease_expires_at),
            _messages.type == sa.any_(_others.c.types),
        ),
    )
    .values(member_id=None, state="collected", bulk_id=None)
)

IS_MINE: Final = sa.select(_messages.stream_offset).where(*_mine, _messages.finished_at.is_(None)).limit(1)

_in_bulk: Final = (*_mine, _messages.bulk_id == sa.bindparam("of_bulk", type_=sa.BigInteger))
_is_forwarded: Final = (*_in_bulk, _messages.state == "forwarded")

# What nearly all messages come to; it needs no array but that of their offsets.
SUCCEED: Final = _changed(
    sa.update(collected_messages)
    .where(*_is_forwarded)
    .values(state="succeeded", reason=None, finished_at=_NOW, next_attempt_at=None),
    _NOW,
)

SUCCEEDED: Final = _found(_messages.stream_offset, _messages.finished_at).where(
    *_in_bulk, _messages.state == "succeeded"
)

_result: Final = _its_own("states", sa.Text)
_to_retry: Final = _result == "collected"

FINISH: Final = _changed(
    sa.update(collected_messages)
    .where(*_is_forwarded)
    .values(
        state=_result,
        reason=_its_own("reasons", sa.Text),
        finished_at=sa.case((_to_retry, None), else_=_NOW),
        next_attempt_at=sa.case(
            (_to_retry, _NOW + interval(sa.func.coalesce(_its_own("retries_s", sa.Float), 0.0))), else_=None
        ),
    ),
    _NOW,
)

FINISHED: Final = _found(_messages.stream_offset, _messages.finished_at).where(*_in_bulk, _messages.state == _result)

# Forgetting

KEPT: Final = (
    sa.select(_sources.source_id, collectors.c.keep_s)
    .join(collectors, collectors.c.collector_id == _sources.collector_id)
    .where(
        collectors.c.keep_s.is_not(None),
        sa.or_(_of_collector.is_(None), collectors.c.collector_id == _of_collector),
    )
)

_row: Final[sa.ColumnElement[Any]] = sa.literal_column("ctid")
_is_forgotten: Final = (_messages.source_id == sa.bindparam("of_source")) & (
    _messages.finished_at < sa.func.now() - interval(sa.bindparam("older_s", type_=sa.Float))
)

# Oldest first, which is the index's order: no scan, however much is finished. Named by their places on disk.
FORGET: Final = sa.delete(collected_messages).where(
    _row
    == sa.any_(
        sa.func.array(
            sa.select(_row)
            .select_from(collected_messages)
            .where(_is_forgotten)
            .order_by(_messages.finished_at)
            .limit(sa.bindparam("most", type_=sa.Integer))
            .scalar_subquery()
        )
    ),
    _is_forgotten,
)

# Taking over

# Those of nobody were given back by a member that does not reach the broker, or stored by release 0.4.0.
_taken = (
    sa.select(_messages.source_id, _messages.stream_offset)
    .join(collector_sources, _sources.source_id == _messages.source_id)
    .where(
        sa.or_(
            _messages.member_id == sa.any_(sa.bindparam("lapsed", type_=sa.ARRAY(sa.BigInteger))),
            _messages.member_id.is_(None),
        ),
        _messages.finished_at.is_(None),
        _messages.type == sa.any_(sa.bindparam("of_types", type_=sa.ARRAY(sa.Text))),
        _sources.collector_id == _of_collector,
        _sources.replaced_at.is_(None),
    )
    .order_by(_messages.collected_at, _messages.source_id, _messages.stream_offset)
    .limit(sa.bindparam("most", type_=sa.Integer))
    # What a result is just being stored of is nobody's to take over.
    .with_for_update(of=collected_messages, skip_locked=True)
    .cte("taken")
)

TAKE_OVER: Final = (
    sa.update(collected_messages)
    .where(_messages.source_id == _taken.c.source_id, _messages.stream_offset == _taken.c.stream_offset)
    .values(
        member_id=sa.bindparam("by", type_=sa.BigInteger),
        state="collected",
        bulk_id=sa.bindparam("token", type_=sa.BigInteger),
    )
)

TAKEN_OVER: Final = (
    sa.select(
        _sources.stream,
        _messages.source_id,
        _messages.stream_offset,
        _messages.message_id,
        _messages.type,
        _messages.size,
        _messages.attempts,
        sa.func.greatest(0.0, sa.extract("epoch", _messages.next_attempt_at - sa.func.clock_timestamp())).label(
            "due_in_s"
        ),
        _messages.collected_at,
    )
    .join(collector_sources, _sources.source_id == _messages.source_id)
    .where(
        _of_member,
        _messages.finished_at.is_(None),
        _messages.state == "collected",
        _messages.bulk_id == sa.bindparam("token", type_=sa.BigInteger),
    )
    .order_by(_messages.collected_at, _messages.source_id, _messages.stream_offset)
)


def copy(connection: sa.Connection, member: int, entries: Sequence[Entry], sources: Mapping[str, int]) -> bool:
    """Write new rows; False, and none is written, where some are there."""
    message_ids = [entry.message_id for entry in entries]
    if needs_escape("".join(message_ids)):
        message_ids = [copy_text(message_id) for message_id in message_ids]
    types = {kind: copy_text(kind) for kind in {entry.type for entry in entries}}
    lines = [
        f"{sources[entry.place.stream]}\t{entry.place.offset}\t{member}\t{entry.bytes}\t{message_id}\t{types[entry.type]}\n"
        for entry, message_id in zip(entries, message_ids, strict=True)
    ]
    savepoint = connection.begin_nested()
    try:
        copy_lines(connection, "collected_messages", lines)
    except psycopg.errors.UniqueViolation:
        savepoint.rollback()
        return False
    savepoint.commit()
    return True


def added_before(
    connection: sa.Connection,
    member: int,
    entries: Sequence[Entry],
    sources: Mapping[str, int],
    *,
    insert: bool,
) -> frozenset[MessageId]:
    """Write those rows that are not there; gives the places that wait for this member to consume them."""
    if insert:
        new = {
            "sources": [sources[entry.place.stream] for entry in entries],
            "offsets": [entry.place.offset for entry in entries],
            "members": [member] * len(entries),
            "sizes": [entry.bytes for entry in entries],
            "message_ids": [entry.message_id for entry in entries],
            "types": [entry.type for entry in entries],
        }
        connection.execute(ADD_MISSING, new)
    wanted = by_source((entry.place for entry in entries), sources, of_member=member)
    return places_of(selected(connection, MINE_TO_CONSUME, wanted), sources)


Change = tuple[Any, Any, dict[str, Any]]
"""A statement that changes rows of one source, one that finds those which are so afterwards, and their parameters."""


def update(
    connection: sa.Connection, changes: Sequence[Change], places: Collection[MessageId], sources: Mapping[str, int]
) -> Stored:
    """Change rows; where some are not as they should be before, those that are so afterwards count too.

    `places`: Those that the changes name, all together.
    """
    streams, found, at = streams_of(sources), list[tuple[str, list[int]]](), None
    for change, done, named in changes:
        offsets, moment = connection.execute(change, named).one()
        if len(offsets or ()) < len(named["offsets"]):
            # Those that were changed just now are among them.
            offsets, moment = connection.execute(done, named).one()
        found.append((streams[named["source"]], offsets or []))
        at = at or moment
    if at is None:
        at = connection.execute(sa.select(sa.func.statement_timestamp())).scalar_one()
    if sum(len(offsets) for _, offsets in found) == len(places):
        return Stored(frozenset(places), at)
    return Stored(frozenset(MessageId(stream, offset) for stream, offsets in found for offset in offsets), at)


def ends(results: Sequence[Result], sources: Mapping[str, int], **mine: Any) -> list[Change]:
    """The changes that store what an attempt came to.

    `mine`: The parameters that say whose messages they must be.
    """
    others = {result.place: result for result in results if result.status is not OutcomeStatus.SUCCEEDED}
    rest = by_source((result.place for result in results if result.place not in others), sources, **mine)
    changes: list[Change] = [(SUCCEED, SUCCEEDED, named) for named in rest]
    streams = streams_of(sources)
    for named in by_source(others, sources, **mine):
        its_own = [others[MessageId(streams[named["source"]], offset)] for offset in named["offsets"]]
        named["states"] = [result.status.value for result in its_own]
        named["reasons"] = [result.reason for result in its_own]
        named["retries_s"] = [result.retry_in_s for result in its_own]
        changes.append((FINISH, FINISHED, named))
    return changes


def by_source(places: Iterable[MessageId], sources: Mapping[str, int], **named: Any) -> list[dict[str, Any]]:
    """The parameters that name these places, for one statement a source."""
    offsets: dict[str, list[int]] = {}
    for stream, offset in places:
        offsets.setdefault(stream, []).append(offset)
    return [{"source": sources[stream], "offsets": of_stream, **named} for stream, of_stream in offsets.items()]


def selected(connection: sa.Connection, query: "sa.Select[Any]", wanted: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The rows a query gives with each of these parameters."""
    return [row for named in wanted for row in connection.execute(query, named)]


def streams_of(sources: Mapping[str, int]) -> dict[int, str]:
    """The streams by their rows."""
    return {source: stream for stream, source in sources.items()}


def places_of(rows: Iterable[Any], sources: Mapping[str, int]) -> frozenset[MessageId]:
    """The places that rows name, by source and offset."""
    streams = streams_of(sources)
    return frozenset(MessageId(streams[row[0]], row[1]) for row in rows)


KEEP_S: Final = 7 * 86_400
"""Seconds a finished message is remembered by default: a producer that was down over a weekend still learns of it."""

BATCH_ROWS: Final = 10_000
"""Rows deleted in one transaction: a fraction of a second."""


def forget_finished(
    engine: sa.Engine,
    collector: int | None = None,
    *,
    batch_rows: int = BATCH_ROWS,
    seconds: float | None = 0.5,
) -> int:
    """Delete messages that were finished longer ago than their collector keeps them; gives how many.

    Args:
        engine: The database.
        collector: The id of one; None: all collectors.
        batch_rows: Rows deleted in one transaction at most.
        seconds: Seconds after which no further batch is begun; None: until none is left.
    """
    checked_count("batch_rows", batch_rows)
    if seconds is not None:
        checked_seconds("seconds", seconds)
    deadline = None if seconds is None else time.monotonic() + seconds
    with translated_errors(), engine.connect() as connection:
        sources = connection.execute(KEPT, {"in_collector": collector}).all()
    forgotten = 0
    for source in sources:
        bounds = {"of_source": source.source_id, "older_s": source.keep_s, "most": batch_rows}
        deleted = batch_rows
        while deleted == batch_rows and (deadline is None or time.monotonic() < deadline):
            with translated_errors(), engine.begin() as connection:
                deleted = connection.execute(FORGET, bounds).rowcount
            forgotten += deleted
    return forgotten
