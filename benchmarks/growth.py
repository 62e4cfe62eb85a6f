"""The table as it grows: rows in parts beside rows in one table with one index, as it was before parts."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import psycopg
import sqlalchemy as sa

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._recorder import catch_up
from benchmarks._results import Row
from benchmarks._timing import median, milliseconds
from relatum.reading import StreamReader
from relatum.recording import status, verify
from relatum.store import (
    PART_BYTES,
    close_parts,
    copy_rows,
    drop_parts,
    ensure_stream,
    make_engine,
    retain_from,
    turn_parts,
)
from relatum_consumer import Relations, Status
from relatum_consumer.lookups import _lookup_statements as statements

GROUP: Final = "growth"

BATCH_ROWS: Final = 20_000
MILLION: Final = 1_000_000
HOSTS: Final = 50
STREAM: Final = "grown"
GROWN_ID: Final = 2
"""The stream's id: behind the one that is recorded."""
TENDED_S: Final = 1.0

WHOLE_S: Final = 1_200.0
"""Seconds after which the one table, which gets slower and slower, is left where it is."""
PARTS_S: Final = 1_800.0
"""The same of the table in parts."""

REAL_MESSAGES: Final = 20_000
"""Messages that are in a stream, and whose rows are the first: those that look-ups are asked for."""

SHOWN_ROWS: Final = 10 * MILLION
"""Rows after which their rate is a figure of its own, which is kept where the run is stopped."""

BYTES_A_ROW: Final = 68
"""Without the index: a run of few rows has smaller parts, so that some are closed."""
ASKED: Final = 500

RATE_AIM: Final = 0.8
RELATED_AIM: Final = 1.3
BYTES_AIM: Final = 115.0
DROP_AIM_S: Final = 1.0
LAST: Final = 3
"""Millions of rows at the end whose rate is compared: a part is closed in some of them."""

COLUMNS: Final = "(key_id, value, stream_id, time_us, stream_offset)"


@dataclass(slots=True)
class Grown:
    """Rows a second of each million, and bytes of a row, index included."""

    rates: list[float] = field(default_factory=list)
    bytes: float = 0.0

    @property
    def rows(self) -> int:
        """How many were written."""
        return len(self.rates) * MILLION

    @property
    def last(self) -> float:
        """Rows a second at the end."""
        return median(self.rates[-LAST:])


def measure(context: Context) -> Iterator[Row]:
    """The rows about growth. What was measured is kept where it is stopped."""
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
    """A database in which the stream is recorded that look-ups read."""
    stream, database = context.orders(REAL_MESSAGES), context.new_database()
    catch_up(context.broker_url, context.stream_url, database, stream, REAL_MESSAGES)
    engine = make_engine(database)
    try:
        with engine.begin() as connection:
            assert ensure_stream(connection, "/", STREAM).stream_id == GROWN_ID
        yield engine
    finally:
        engine.dispose()
        context.drop_database(database)


def _write(engine: sa.Engine, data: list[str]) -> None:
    with engine.begin() as connection:
        copy_rows(connection, data)


def lines(stream_id: int, batch: int) -> list[str]:
    """A batch of rows: an id that no other message has, scattered among those of real ones, and one of fifty hosts."""
    first = batch * BATCH_ROWS // 2
    return [
        f"1\to{offset * 2_654_435_761 % (1 << 28):07x}\t{stream_id}\t{1_700_000_000_000_000 + offset * 10}\t{offset}\n"
        f"2\thost{offset % HOSTS:04d}\t{stream_id}\t{1_700_000_000_000_000 + offset * 10}\t{offset}\n"
        for offset in range(first, first + BATCH_ROWS // 2)
    ]


def _filled(
    context: Context, what: str, grown: Grown, limit_s: float, write: Callable[[list[str]], None], rows: int
) -> Iterator[Row]:
    """Write rows, a million after the other, until there are so many or the time is over."""
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
    """One table with one index."""
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
    context.say("closing what is full")
    close_parts(engine, turn_parts(engine, part_bytes))
    yield _related(context, small, engine, grown)
    yield _bytes(engine, before)
    yield from _bounded(context, engine)
    yield _dropped(engine, grown)


@contextmanager
def _tended(engine: sa.Engine, part_bytes: int) -> Iterator[None]:
    """Parts are looked after meanwhile, as recorders do."""
    stop = threading.Event()

    def tend() -> None:
        while not stop.wait(TENDED_S):
            close_parts(engine, turn_parts(engine, part_bytes))

    thread = threading.Thread(target=tend)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _related(context: Context, small: sa.Engine, large: sa.Engine, grown: Grown) -> Row:
    """A look-up by a value that one message has, which is read, in turns. All parts have such values."""
    context.say("looking up")
    numbers = range(0, REAL_MESSAGES, REAL_MESSAGES // ASKED)
    name = context.stream(
        "growth-questions", lambda name: streams.write_one_by_one(context.broker_url, name, numbers), len(numbers)
    )
    real = context.orders(REAL_MESSAGES)
    with StreamReader.open(context.address) as reader:
        questions = list(reader.iterate(name))
    taken: tuple[list[float], list[float]] = ([], [])
    with (
        Relations(context.address, _url(small)) as few,
        Relations(context.address, _url(large)) as many,
    ):
        for number, message in zip(numbers, questions, strict=True):
            for relations, seconds in zip((few, many), taken, strict=True):
                begun = time.perf_counter()
                answer = relations.related(message, to=real, by="order_id")
                seconds.append(time.perf_counter() - begun)
                assert answer.status is Status.FOUND
                assert [each.offset for each in answer] == [number]
    at_first, at_last = (median(seconds[ASKED // 10 :]) for seconds in taken)
    return Row(
        GROUP,
        f"`related` at {grown.rows:,} rows",
        milliseconds(at_last),
        f"{milliseconds(at_first)} at 1,000,000",
        at_last / at_first,
        f"≤ {RELATED_AIM:g}",
        at_last / at_first <= RELATED_AIM,
        figures={"small_s": at_first, "large_s": at_last},
    )


def _url(engine: sa.Engine) -> str:
    return engine.url.set(drivername="postgresql").render_as_string(hide_password=False)


def _bytes(engine: sa.Engine, before: Grown) -> Row:
    query = sa.text(
        "SELECT sum(rows), sum(pg_relation_size(of_part)), sum(pg_indexes_size(of_part)), count(*) "
        "FROM (SELECT part, sum(row_count) AS rows FROM relatum.part_streams GROUP BY 1) closed, "
        "LATERAL to_regclass('relatum.relationships_' || part) AS of_part"
    )
    with engine.connect() as connection:
        rows, heap, index, parts = connection.execute(query).one()
    size = float((heap + index) / rows)
    return Row(
        GROUP,
        f"bytes a row, index included, in {parts} closed parts",
        f"{size:.1f} (rows {float(heap / rows):.1f})",
        f"{before.bytes:.1f} in one table",
        size / before.bytes,
        f"≤ {BYTES_AIM:g}",
        size <= BYTES_AIM,
        figures={"bytes": size, "whole_bytes": before.bytes, "parts": parts},
    )


def _bounded(context: Context, engine: sa.Engine) -> Iterator[Row]:
    """What must not grow with the table."""
    real = context.orders(REAL_MESSAGES)
    text = statements.probe("newest", keys=1, names=1, bounded=False, floored=False)
    given = {"vhost": "/", "key_id_0": 2, "name_0": STREAM, "limit": 101, "value_0": "host0007"}

    def hot() -> None:
        with engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            assert len(driver.execute(text, given).fetchall()) == 101

    asked: Sequence[tuple[str, Callable[[], object]]] = (
        ("probe for a hot value's newest 100", hot),
        ("`status` of a stream", lambda: status(context.address, engine, [real])),
        ("`verify --sample` of a stream, a window", lambda: verify(context.address, engine, [real], sample=0.01)),
    )
    for what, ask in asked:
        taken: list[float] = []
        for _ in range(5):
            begun = time.perf_counter()
            ask()
            taken.append(time.perf_counter() - begun)
        yield Row(GROUP, what, milliseconds(median(taken)), aim="reported", figures={"s": median(taken)})


def _dropped(engine: sa.Engine, grown: Grown) -> Row:
    # Half as many messages as rows; of a run of few rows, half. Of the stream that look-ups read, all.
    gone = min(10 * MILLION, grown.rows // 2) // 2 + BATCH_ROWS
    with engine.begin() as connection:
        retain_from(connection, {GROWN_ID: gone, GROWN_ID - 1: REAL_MESSAGES})
    begun = time.perf_counter()
    rows = sum(drop_parts(engine).values())
    taken = time.perf_counter() - begun
    each = taken / max(1.0, rows / (10 * MILLION))
    return Row(
        GROUP,
        f"retention of {rows:,} rows",
        f"{taken:.2f} s",
        "",
        None,
        f"≤ {DROP_AIM_S:g} s for 10,000,000",
        bool(rows) and each <= DROP_AIM_S,
        figures={"rows": rows, "s": taken},
    )
