"""The growing table: rows in parts, compared with one table with one index, as it was before parts."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import psycopg
import sqlalchemy as sa

from benchmarks import _grown as asked
from benchmarks._context import Context
from benchmarks._grown import GROUP, GROWN_ID, HOSTS, HOT_MESSAGES, MILLION, REAL_MESSAGES, Grown
from benchmarks._recorder import catch_up
from benchmarks._results import Row
from relatum.store.catalog import ensure_stream
from relatum.store.database import make_engine
from relatum.store.parts import PART_BYTES, advance_parts, close_parts, copy_rows

BATCH_ROWS: Final = 50_000
"""Rows in a transaction: a recorder that catches up writes 40,000 to 60,000."""
TENDED_S: Final = 1.0

WHOLE_S: Final = 900.0
"""Seconds after which filling the single table, which becomes slower and slower, stops. 100,000,000 rows in parts, at
200,000 a second, and everything else take 15 minutes."""
PARTS_S: Final = 1_500.0
"""The same limit for the table in parts."""

SHOWN_ROWS: Final = 10 * MILLION
"""Rows after which their rate is a row of its own, which an interrupted run keeps."""

BYTES_A_ROW: Final = 68
"""Bytes without the index. A run of few rows has smaller parts, so that some are closed."""

RATE_AIM: Final = 0.8

COLUMNS: Final = "(key_id, value, stream_id, time_us, stream_offset)"


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about growth, each as soon as it is measured, so that an interrupted run keeps them."""
    before = yield from _without_parts(context)
    yield Row(
        GROUP,
        f"one table, one index: rows a second at {before.rows:,} rows",
        f"{before.last:,.0f} rows/s",
        f"{before.rates[0]:,.0f} rows/s in the first million",
        before.last / before.rates[0],
        "reported",
        note="" if before.rows == context.rows else f"stopped after {WHOLE_S:,.0f} s",
        figures={"rows_per_s": before.rates, "bytes": before.bytes},
    )
    with _recorded(context) as small, _recorded(context) as large:
        for batch in range(MILLION // BATCH_ROWS):
            _write(small, lines(GROWN_ID, batch))
        yield from _with_parts(context, small, large, before)


@contextmanager
def _recorded(context: Context) -> Iterator[sa.Engine]:
    """Open a database with the recorded streams for lookups."""
    database = context.new_database()
    for messages in (REAL_MESSAGES, HOT_MESSAGES):
        catch_up(context.broker_url, context.stream_url, database, context.orders(messages), messages)
    engine = make_engine(database)
    try:
        with engine.begin() as connection:
            assert ensure_stream(connection, "/", context.orders(HOT_MESSAGES)).stream_id == GROWN_ID
        yield engine
    finally:
        engine.dispose()
        context.drop_database(database)


def _write(engine: sa.Engine, data: list[str]) -> None:
    with engine.begin() as connection:
        copy_rows(connection, data)


def lines(stream_id: int, batch: int) -> list[str]:
    """Return a batch of rows: a unique id, scattered among the ids of real messages, and one of fifty hosts.

    Their times and offsets are after those of the stream's messages.
    """
    first = HOT_MESSAGES + batch * BATCH_ROWS // 2
    return [
        f"1\to{offset * 2_654_435_761 % (1 << 28):07x}\t{stream_id}\t{4_000_000_000_000_000 + offset * 10}\t{offset}\n"
        f"2\thost-{offset % HOSTS}\t{stream_id}\t{4_000_000_000_000_000 + offset * 10}\t{offset}\n"
        for offset in range(first, first + BATCH_ROWS // 2)
    ]


def _filled(
    context: Context, what: str, grown: Grown, limit_s: float, write: Callable[[list[str]], None], rows: int
) -> Iterator[Row]:
    """Write rows by the million, until there are `rows` of them or the time is over."""
    until = time.monotonic() + limit_s
    for million in range(len(grown.rates), rows // MILLION):
        seconds = 0.0
        for batch in range(million * MILLION // BATCH_ROWS, (million + 1) * MILLION // BATCH_ROWS):
            data = lines(GROWN_ID, batch)
            begun = time.perf_counter()
            write(data)
            seconds += time.perf_counter() - begun
        grown.rates.append(MILLION / seconds)
        context.say(f"{what}, {million + 1} million rows: {grown.rates[-1]:,.0f} rows/s")
        if grown.rows % SHOWN_ROWS == 0:
            taken = [1 / rate for rate in grown.rates[-SHOWN_ROWS // MILLION :]]
            rate = len(taken) / sum(taken)
            figures = {"rows_per_s": rate}
            yield Row(GROUP, f"{what}: to {grown.rows:,} rows", f"{rate:,.0f} rows/s", aim="reported", figures=figures)
        if time.monotonic() > until:
            context.say(f"stopped after {limit_s:,.0f} s")
            break


def _without_parts(context: Context) -> Generator[Row, None, Grown]:
    """Fill a single table with one index."""
    context.say(f"{context.rows:,} rows into one table")
    database = context.new_database()
    with psycopg.connect(database) as connection:
        connection.execute("CREATE TABLE relatum.whole (LIKE relatum.relationships_1 INCLUDING ALL)")
        connection.execute("ALTER TABLE relatum.whole DROP COLUMN part")
        connection.commit()

        def write(data: list[str]) -> None:
            with connection.cursor().copy(f"COPY relatum.whole {COLUMNS} FROM STDIN".encode()) as copy:
                copy.write("".join(data).encode())
            connection.commit()

        grown = Grown()
        yield from _filled(context, "one table", grown, WHOLE_S, write, context.rows)
        query = "SELECT pg_relation_size('relatum.whole') + pg_indexes_size('relatum.whole')"
        (size,) = connection.execute(query).fetchone() or (0,)
    context.drop_database(database)
    grown.bytes = size / grown.rows
    return grown


def _with_parts(context: Context, small: sa.Engine, engine: sa.Engine, before: Grown) -> Iterator[Row]:
    context.say(f"{context.rows:,} rows in parts")
    part_bytes = min(PART_BYTES, context.rows * BYTES_A_ROW // 4)
    grown = Grown()
    with _tended(engine, part_bytes):
        yield from _filled(context, "in parts", grown, PARTS_S, partial(_write, engine), context.rows)
    yield Row(
        GROUP,
        f"rows a second at {grown.rows:,} rows",
        f"{grown.last:,.0f} rows/s",
        f"{grown.rates[0]:,.0f} in the first million; {before.last:,.0f} at {before.rows:,} in one table",
        grown.last / grown.rates[0],
        f"≥ {RATE_AIM:g} × the first million",
        grown.last / grown.rates[0] >= RATE_AIM,
        note="" if grown.rows == context.rows else f"stopped after {PARTS_S:,.0f} s",
        figures={"rows_per_s": grown.rates, "whole_rows_per_s": before.rates},
    )
    context.say("closing full parts")
    close_parts(engine, advance_parts(engine, part_bytes))
    yield asked.related(context, small, engine, grown)
    yield asked.sizes(engine, before)
    yield from asked.bounded(context, small, engine, grown)
    if not context.is_quick:
        yield asked.settled(context, engine)
    yield asked.dropped(engine, grown)


@contextmanager
def _tended(engine: sa.Engine, part_bytes: int) -> Iterator[None]:
    """Turn and close parts during the block, as recorders do."""
    stop = threading.Event()

    def tend() -> None:
        while not stop.wait(TENDED_S):
            close_parts(engine, advance_parts(engine, part_bytes))

    thread = threading.Thread(target=tend)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
