"""The rows of collected messages: written, changed and read in a transaction of the store's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg
import sqlalchemy as sa

from relatum.collecting import _collector_statements as statements
from relatum.collecting._ports import Entry, Stored
from relatum.ids import MessageId
from relatum.store import copy_lines, copy_text


def copy(connection: sa.Connection, member: int | None, entries: Sequence[Entry], sources: Mapping[str, int]) -> bool:
    """Write new rows; False, and none is written, where some are there."""
    owner = "\\N" if member is None else member
    lines = [
        f"{sources[entry.place.stream]}\t{entry.place.offset}\t{owner}\t{entry.bytes}"
        f"\t{copy_text(entry.message_id)}\t{copy_text(entry.type)}\n"
        for entry in entries
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
        add_missing(connection, member, entries, sources)
    wanted = by_source((entry.place for entry in entries), sources, of_member=member)
    return places_of(selected(connection, statements.mine_to_consume, wanted), sources)


def add_missing(
    connection: sa.Connection, member: int | None, entries: Sequence[Entry], sources: Mapping[str, int]
) -> None:
    """Write those rows that are not there."""
    new = {
        "sources": [sources[entry.place.stream] for entry in entries],
        "offsets": [entry.place.offset for entry in entries],
        "members": [member] * len(entries),
        "sizes": [entry.bytes for entry in entries],
        "message_ids": [entry.message_id for entry in entries],
        "types": [entry.type for entry in entries],
    }
    connection.execute(statements.add_missing, new)


def update(
    connection: sa.Connection,
    update: sa.Update,
    done: "sa.Select[Any]",
    wanted: Iterable[Mapping[str, Any]],
    sources: Mapping[str, int],
) -> Stored:
    """Change rows; where some are not as they should be before, those that are so afterwards count too."""
    rows: list[Any] = []
    for named in wanted:
        changed = connection.execute(update, named).all()
        rows += changed
        if len(changed) < len(named["offsets"]):
            rows += connection.execute(done, named)
    at = rows[0][2] if rows else connection.execute(sa.select(sa.func.statement_timestamp())).scalar_one()
    return Stored(places_of(rows, sources), at)


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
