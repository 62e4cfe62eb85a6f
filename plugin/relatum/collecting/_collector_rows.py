"""The rows of collected messages: written, changed and read in a transaction of the store's."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import psycopg
import sqlalchemy as sa

from relatum.collecting import _collector_statements as statements
from relatum.collecting._bulk import Entry, Result, Stored
from relatum.ids import MessageId
from relatum.outcomes import OutcomeStatus
from relatum.store import copy_lines, copy_text, needs_escape


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
        connection.execute(statements.add_missing, new)
    wanted = by_source((entry.place for entry in entries), sources, of_member=member)
    return places_of(selected(connection, statements.mine_to_consume, wanted), sources)


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
    changes: list[Change] = [(statements.succeed, statements.succeeded, named) for named in rest]
    streams = streams_of(sources)
    for named in by_source(others, sources, **mine):
        its_own = [others[MessageId(streams[named["source"]], offset)] for offset in named["offsets"]]
        named["states"] = [result.status.value for result in its_own]
        named["reasons"] = [result.reason for result in its_own]
        named["retries_s"] = [result.retry_in_s for result in its_own]
        changes.append((statements.finish, statements.finished, named))
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
