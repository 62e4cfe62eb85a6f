"""Rows that name a place in a stream, and are few or short-lived: receipts, and what consumers know of groups."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import sqlalchemy as sa

from relatum.errors import NotFound, OffsetExpired
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX, INTEGER_MIN
from relatum.membership import GROUP_KEY, value_bounds
from relatum.reading import Message, StreamReader
from relatum.recording._compare import DIFFERENCES_MAX, Difference
from relatum.recording._extract import Extractor
from relatum.store import (
    Range,
    StreamRow,
    at_one_moment,
    checkpoints,
    coverage,
    coverage_of,
    group_scans,
    group_states,
    key_definitions,
    keys,
    may_hold_offsets,
    merged,
    missing,
    receipts,
    relationships,
    time_blocks,
    translated_errors,
)

PLACES_BATCH: Final = 1_000
"""Rows compared at a time."""

_NO_KEYS: Final = Extractor([])


def rows_behind(engine: sa.Engine, stream_id: int, end: int) -> Iterator[Difference]:
    """Rows behind the coverage's end and behind what was compared, or before offset 0, can only be wrong.

    A recorder may have moved the coverage since: rows and end are of one statement.
    """
    covered = sa.select(sa.func.coalesce(sa.func.max(coverage.c.to_offset), 0)).where(coverage.c.stream_id == stream_id)
    stop = sa.func.greatest(covered.scalar_subquery(), end)
    held = may_hold_offsets(stream_id, INTEGER_MIN, -1) | may_hold_offsets(stream_id, stop, INTEGER_MAX)
    for table, place in _BEHIND:
        outside = (place < 0) | (place >= stop)
        behind = [table.c.stream_id == stream_id, outside, held if table is relationships else sa.true()]
        columns = [relationships.c[name] for name in ("key_id", "value", "time_us")] if table is relationships else []
        query = sa.select(place, *columns).where(*behind).order_by(place).limit(DIFFERENCES_MAX)
        with translated_errors(), engine.connect() as connection:
            rows = connection.execute(query).all()
            names = {definition.key_id: definition.name for definition in key_definitions(connection)}
        for offset, *more in rows:
            if not more:
                yield Difference(_KINDS[table.name], offset, table=table.name)
            else:
                key_id, value, time_us = more
                yield Difference("unsound", offset, names.get(key_id, f"#{key_id}"), value, time_us)


_BEHIND: Final[tuple[tuple[sa.Table, Any], ...]] = (
    (relationships, relationships.c.stream_offset),
    (time_blocks, time_blocks.c.first_offset),
    (checkpoints, checkpoints.c.last_offset),
)
_KINDS: Final = {"time_blocks": "time_wrong", "checkpoints": "checkpoint_wrong"}


def delete_behind(connection: sa.Connection, stream_id: int, end: int) -> None:
    """Delete what `rows_behind` finds. The caller holds the stream's locks, so nothing moves that end."""
    for table, place in _BEHIND:
        connection.execute(sa.delete(table).where(table.c.stream_id == stream_id, (place < 0) | (place >= end)))


def compare_places(engine: sa.Engine, reader: StreamReader, stream: StreamRow) -> Iterator[Difference]:
    """Where receipts, scans and groups tell of what is not there."""
    for rows in _receipt_batches(engine, stream.stream_id):
        for difference, _ in wrong_receipts(reader, stream.name, rows):
            yield difference
    yield from compare_scans(engine, reader, stream)
    yield from compare_groups(engine, reader, stream)


# --- receipts -----------------------------------------------------------------------------------------------------

_PLACE: Final = sa.literal_column("ctid").cast(sa.Text)


def _receipt_batches(engine: sa.Engine, stream_id: int) -> Iterator[Sequence[Any]]:
    """A stream's receipts with their places in the table, by offset, some at a time."""
    after: tuple[int, str] = (-(2**63), "")
    place = sa.tuple_(receipts.c.stream_offset, _PLACE)
    while True:
        query = sa.select(receipts.c.stream_offset, _PLACE, receipts.c.message_id)
        query = query.where(receipts.c.stream_id == stream_id, place > sa.tuple_(*after))
        with translated_errors(), engine.connect() as connection:
            rows = connection.execute(query.order_by(receipts.c.stream_offset, _PLACE).limit(PLACES_BATCH)).all()
        if not rows:
            return
        yield rows
        after = (rows[-1][0], rows[-1][1])


def wrong_receipts(reader: StreamReader, stream: str, rows: Sequence[Any]) -> Iterator[tuple[Difference, str]]:
    """Receipts whose message has no such name, or that are there twice; with their places in the table."""
    seen: set[tuple[int, str]] = set()
    read = reader.read_all(MessageId(stream, row[0]) for row in rows)
    found = dict(zip((row[1] for row in rows), read, strict=True))
    for offset, place, message_id in rows:
        result = found[place]
        if isinstance(result, OffsetExpired):
            continue
        name = None if isinstance(result, NotFound) else receipt_of(result)
        if name != message_id:
            yield Difference("receipt_wrong", offset, value=message_id, table="receipts"), place
        elif (offset, message_id) in seen:
            yield Difference("receipt_duplicate", offset, value=message_id, table="receipts"), place
        seen.add((offset, message_id))


def receipt_of(message: Any) -> str | None:
    """The name by which a message's publisher waits for it."""
    return _NO_KEYS.from_message(message).receipt if isinstance(message, Message) else None


def mend_receipts(engine: sa.Engine, reader: StreamReader, stream: StreamRow) -> Iterator[Difference]:
    """Delete wrong receipts. Whoever waits for one that is not there finds its message by reading."""
    for rows in _receipt_batches(engine, stream.stream_id):
        wrong = list(wrong_receipts(reader, stream.name, rows))
        with translated_errors(), engine.begin() as connection:
            for difference, place in wrong:
                # Asked again of the row itself: its place may be another's by now.
                columns = receipts.c
                same = (columns.stream_offset == difference.offset, columns.message_id == difference.value)
                connection.execute(sa.delete(receipts).where(sa.literal(place) == _PLACE, *same))
        yield from (difference for difference, _ in wrong)


# --- groups -------------------------------------------------------------------------------------------------------


def compare_scans(engine: sa.Engine, reader: StreamReader, stream: StreamRow) -> Iterator[Difference]:
    """Where consumers of groups count offsets as scanned twice, or offsets that are not recorded."""
    with at_one_moment(engine) as connection:
        scans = _scans(connection, stream.stream_id)
        known = merged((row.from_offset, row.to_offset) for row in coverage_of(connection, [stream.stream_id]))
    first = reader.bounds(stream.name).first if scans else None
    for scan, _ in wrong_scans(scans, known, first or 0):
        yield Difference("scan_wrong", scan.from_offset, table="group_scans", to_offset=scan.to_offset)


def _scans(connection: sa.Connection, stream_id: int) -> list[Any]:
    scanned = group_scans.c
    query = sa.select(scanned.consumer_id, scanned.from_offset, scanned.to_offset).where(scanned.stream_id == stream_id)
    return list(connection.execute(query.order_by(scanned.consumer_id, scanned.from_offset)).all())


def wrong_scans(scans: Sequence[Any], known: Sequence[Range], first: int) -> Iterator[tuple[Any, list[Range]]]:
    """Scans that are wrong, each with the parts of it that are right. What retention took may be scanned."""
    reach: dict[int, int] = {}
    for scan in scans:
        start = max(scan.from_offset, reach.get(scan.consumer_id, scan.from_offset))
        gaps = missing((max(start, first), scan.to_offset), known)
        if start > scan.from_offset or gaps:
            yield scan, missing((start, scan.to_offset), gaps)
        reach[scan.consumer_id] = max(scan.to_offset, reach.get(scan.consumer_id, 0))


def mend_scans(connection: sa.Connection, stream_id: int, first: int) -> None:
    """Forget what was scanned wrongly: it is scanned again, which changes nothing of what is known of its groups.

    The caller holds the stream's locks.
    """
    connection.execute(sa.text("LOCK TABLE relatum.group_scans IN SHARE ROW EXCLUSIVE MODE"))
    known = merged((row.from_offset, row.to_offset) for row in coverage_of(connection, [stream_id]))
    parts: list[dict[str, int]] = []
    for scan, right in wrong_scans(_scans(connection, stream_id), known, first):
        parts += _replaced_scan(connection, stream_id, scan, right)
    if parts:
        connection.execute(sa.insert(group_scans), parts)


def _replaced_scan(
    connection: sa.Connection, stream_id: int, scan: Any, right: Sequence[Range]
) -> list[dict[str, int]]:
    """Delete a scan; gives the rows that are to stand for the parts of it that are right."""
    mine = {"consumer_id": scan.consumer_id, "stream_id": stream_id}
    same = {**mine, "from_offset": scan.from_offset}
    connection.execute(sa.delete(group_scans).where(*(group_scans.c[name] == value for name, value in same.items())))
    return [{**mine, "from_offset": low, "to_offset": high} for low, high in right if low < high]


def scan_again(connection: sa.Connection, stream_id: int, offsets: Range) -> None:
    """Let consumers of groups scan offsets again whose rows were mended. The caller holds the stream's locks."""
    start, end = offsets
    connection.execute(sa.text("LOCK TABLE relatum.group_scans IN SHARE ROW EXCLUSIVE MODE"))
    scanned = group_scans.c
    over = (scanned.stream_id == stream_id) & (scanned.from_offset < end) & (scanned.to_offset > start)
    parts: list[dict[str, int]] = []
    for scan in connection.execute(sa.select(group_scans).where(over)).all():
        around = [(scan.from_offset, start), (end, scan.to_offset)]
        parts += _replaced_scan(connection, stream_id, scan, around)
    if parts:
        connection.execute(sa.insert(group_scans), parts)


def compare_groups(engine: sa.Engine, reader: StreamReader, stream: StreamRow) -> Iterator[Difference]:
    """Groups that are said to begin where no message of theirs is."""
    with translated_errors(), engine.connect() as connection:
        if _group_key_id(connection) is None or not connection.execute(_groups_of(stream.stream_id).limit(1)).first():
            return
    first = reader.bounds(stream.name).first or 0
    with translated_errors(), engine.connect() as connection:
        rows = connection.execute(_wrong_groups(connection, stream.stream_id, first).limit(DIFFERENCES_MAX)).all()
    for _, group_id, offset in rows:
        yield Difference("group_wrong", offset, GROUP_KEY.name, group_id, table="group_states")


def _groups_of(stream_id: int) -> sa.Select[Any]:
    states = group_states.c
    return sa.select(states.consumer_id, states.group_id, states.first_offset).where(states.stream_id == stream_id)


def _group_key_id(connection: sa.Connection) -> int | None:
    query = sa.select(keys.c.key_id).where(keys.c.name == GROUP_KEY.name, keys.c.removed_at.is_(None))
    found: int | None = connection.execute(query).scalar_one_or_none()
    return found


def _wrong_groups(connection: sa.Connection, stream_id: int, first: int) -> sa.Select[Any]:
    states, low, high = group_states.c, *value_bounds("")
    of_group = (
        relationships.c.key_id == (_group_key_id(connection) or 0),
        relationships.c.value >= (states.group_id + low).collate("C"),
        relationships.c.value < (states.group_id + high).collate("C"),
        relationships.c.stream_id == stream_id,
    )
    named = sa.exists().where(*of_group)
    begins = sa.exists().where(*of_group, relationships.c.stream_offset == states.first_offset)
    return _groups_of(stream_id).where(states.first_offset >= first, named, ~begins)


def mend_groups(connection: sa.Connection, stream_id: int, first: int) -> None:
    """Let groups begin where the table says that their first message lies. The caller holds the stream's locks.

    Groups of which the table names no message stay: what was acknowledged of them is known nowhere else.
    """
    if (key_id := _group_key_id(connection)) is None:
        return
    for consumer_id, group_id, _ in connection.execute(_wrong_groups(connection, stream_id, first)).all():
        low, high = value_bounds(group_id)
        sequence = sa.func.split_part(relationships.c.value, "|", 2).cast(sa.BigInteger)
        rows = relationships.c
        of_group = (rows.key_id == key_id) & (rows.value >= low) & (rows.value < high) & (rows.stream_id == stream_id)
        earliest = sa.select(rows.stream_offset).where(of_group).order_by(sequence, rows.stream_offset).limit(1)
        offset = connection.execute(earliest).scalar_one_or_none()
        if offset is not None:
            states = group_states.c
            same = (states.consumer_id == consumer_id) & (states.group_id == group_id)
            connection.execute(sa.update(group_states).where(same).values(first_offset=offset))
