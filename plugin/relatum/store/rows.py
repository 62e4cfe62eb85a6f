"""Writes many rows by COPY, three times as fast as executemany, and arrays as text."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import psycopg
import sqlalchemy as sa

from relatum.common.ids import Position
from relatum.store.database import sql

_COLUMNS: Final = {
    "time_blocks": "(min_us, max_us, first_offset, last_offset, stream_id, width_class)",
    "receipts": "(message_id, stream_id, stream_offset)",
    "checkpoints": "(stream_id, last_offset, fingerprint, chunk_ms)",
}
_ESCAPES: Final = str.maketrans(
    {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\x08": "\\b", "\x0b": "\\v", "\x0c": "\\f"}
)


def copy_text(value: str) -> str:
    """Return a value in COPY's text format."""
    # A control character is not printable. Translating takes longer than this check.
    return value if value.isprintable() and "\\" not in value else value.translate(_ESCAPES)


def copy_number(value: int | None) -> str:
    """Return a number in COPY's text format."""
    return "\\N" if value is None else str(value)


def copy_lines(connection: sa.Connection, table: str, lines: Iterable[str]) -> None:
    """Write lines in COPY's text format, each with its newline, in the connection's transaction."""
    if data := "".join(lines).encode():
        copy_into(connection, f"relatum.{table} {_COLUMNS[table]}", data)


def copy_into(connection: sa.Connection, target: str, data: bytes) -> None:
    """COPY data into a table; `target` is the table with its columns."""
    driver: Any = connection.connection.driver_connection
    try:
        with driver.cursor() as cursor, cursor.copy(f"COPY {target} FROM STDIN") as copy:
            copy.write(data)
    except (psycopg.ProgrammingError, ValueError) as error:
        if not driver.closed:
            raise
        # A pooler adds an error to that of the server that ends the session. psycopg expects a single result.
        raise psycopg.OperationalError("the session ended during a COPY") from error


_COUNT_SKIPS: Final = sql("""
    INSERT INTO relatum.skips AS s (stream_id, key_id, reason, count)
    VALUES (:stream_id::integer, :key_id::smallint, :reason::text, :count::bigint)
    ON CONFLICT (stream_id, key_id, reason) DO UPDATE SET count = s.count + excluded.count""")


def count_skips(connection: sa.Connection, counts: Mapping[tuple[int, int, str], int]) -> None:
    """Add to the counters of values that were not recorded, by (stream id, key id, reason)."""
    # Sorted, so that transactions that count for the same streams do not deadlock.
    rows = [
        {"stream_id": stream_id, "key_id": key_id, "reason": reason, "count": count}
        for (stream_id, key_id, reason), count in sorted(counts.items())
    ]
    if rows:
        connection.execute(_COUNT_SKIPS, rows)


def known_by(last: Position | None) -> dict[str, int | None]:
    """Return the columns of the last known message, by which a stream is recognised later; None for no message."""
    offset, fingerprint, chunk_ms = (last.offset, last.fingerprint, last.chunk_ms) if last else (None, None, None)
    return {"last_offset": offset, "last_fingerprint": fingerprint, "last_chunk_ms": chunk_ms}


def integers_text(values: Iterable[int | None]) -> str:
    """Return an array of integers as PostgreSQL's text, five times as fast as psycopg converts a list."""
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def array_text(values: Iterable[str]) -> str:
    """Return an array of texts without NUL as PostgreSQL's text, ten times as fast as psycopg converts a list."""
    texts = list(values)
    # Joined by NUL, which no value contains, so that one call escapes all.
    escaped = "\0".join(texts).replace("\\", "\\\\").replace('"', '\\"')
    return '{"' + escaped.replace("\0", '","') + '"}' if texts else "{}"
