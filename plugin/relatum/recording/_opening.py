"""Where recording of each stream goes on, and by what the stream is known: for any number of them at once.

A stream is the one that was recorded where the message at its last recorded position is as it was: the follower reads
that message first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from relatum.keys import KeyDefinition
from relatum.reading import Position
from relatum.recording._statistics import LATELY_S
from relatum.store.catalog import StreamRow, key_definitions
from relatum.store.coverage import CoverageRow, NewTail, close_tails, coverage_of, last_position, open_tails
from relatum.store.database import sql
from relatum.store.tables import streams, time_blocks
from relatum.store.translation import translated_errors

_MOST: Final = 1000
"""Holes looked at of one stream, the newest."""

_LATE_HOLES: Final = sql("""
    SELECT stream_id, extract(epoch FROM now() - at), to_offset - from_offset FROM relatum.events
    WHERE stream_id = ANY (:stream_ids::integer[]) AND kind = 'hole' AND to_offset IS NOT NULL
        AND at > now() - make_interval(secs => :lately_s::double precision)
    ORDER BY event_id DESC""")


def late_holes(connection: sa.Connection, stream_ids: Iterable[int]) -> dict[int, list[tuple[float, int]]]:
    """The holes noticed within `LATELY_S`, by stream: how many seconds ago, and how many offsets each has."""
    rows = connection.execute(_LATE_HOLES, {"stream_ids": sorted(stream_ids), "lately_s": LATELY_S})
    found: dict[int, list[tuple[float, int]]] = {}
    for stream_id, age, offsets in rows:
        of_stream = found.setdefault(stream_id, [])
        if len(of_stream) < _MOST:
            of_stream.append((float(age), int(offsets)))
    return found


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream ready to be recorded from `tail.to_offset` on."""

    stream: StreamRow
    tail: CoverageRow
    definitions: tuple[KeyDefinition, ...]
    high_us: int | None
    known: Position | None
    holes: list[tuple[float, int]]


def open_streams(engine: sa.Engine, rows: Sequence[StreamRow]) -> list[Opened]:
    """Find where recording goes on: by the tails that are there, or new ones where other keys are in force."""
    by_id = {row.stream_id: row for row in rows}
    ids = sorted(by_id)
    with translated_errors(), engine.begin() as connection:
        ranges: dict[int, list[CoverageRow]] = {stream_id: [] for stream_id in ids}
        for row in coverage_of(connection, ids):
            ranges[row.stream_id].append(row)
        # Of all ranges: a stream that was only back-filled has nothing in its tail to be known by.
        known = {stream_id: last_position(of_stream) for stream_id, of_stream in ranges.items()}
        definitions = tuple(key_definitions(connection))
        key_ids = tuple(sorted(key.key_id for key in definitions))
        tails = {row.stream_id: row for of_stream in ranges.values() for row in of_stream if row.is_tail}
        with_time = {row.stream_id: row.record_time for row in rows}
        kept = {
            stream_id: tail
            for stream_id, tail in tails.items()
            if (tail.key_ids, tail.with_time, tail.over_amqp) == (key_ids, with_time[stream_id], False)
        }
        closed = close_tails(connection, [tail for stream_id, tail in tails.items() if stream_id not in kept])
        new = [
            NewTail(stream_id, tails[stream_id].to_offset, with_time[stream_id], tails[stream_id].position)
            for stream_id in sorted(closed)
        ]
        new += [NewTail(stream_id, 0, with_time[stream_id]) for stream_id in ids if stream_id not in tails]
        kept |= {row.stream_id: row for row in open_tails(connection, new, key_ids)}
        connection.execute(
            sa.update(streams)
            .where(_among(streams.c.stream_id, kept), streams.c.state != "recording")
            .values(state="recording")
        )
        times = _latest_times(connection, kept)
        holes = late_holes(connection, kept)
    return [
        Opened(by_id[stream_id], tail, definitions, times.get(stream_id), known[stream_id], holes.get(stream_id, []))
        for stream_id, tail in kept.items()
    ]


def _among(column: "sa.Column[int]", stream_ids: Iterable[int]) -> sa.ColumnElement[bool]:
    return column == sa.any_(sa.literal(sorted(stream_ids), sa.ARRAY(sa.Integer)))


def _latest_times(connection: sa.Connection, stream_ids: Iterable[int]) -> dict[int, int]:
    """The greatest time of the last few blocks of each. How small the index is depends on it, not what it finds."""
    latest = (
        sa.select(time_blocks.c.max_us)
        .where(time_blocks.c.stream_id == streams.c.stream_id)
        .order_by(time_blocks.c.first_offset.desc())
        .limit(8)
        .lateral("latest")
    )
    query = sa.select(streams.c.stream_id, sa.func.max(latest.c.max_us)).join(latest, sa.true())
    query = query.where(_among(streams.c.stream_id, stream_ids)).group_by(streams.c.stream_id)
    return {row[0]: row[1] for row in connection.execute(query)}
