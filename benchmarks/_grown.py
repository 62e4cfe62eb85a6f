"""Queries of a grown table, compared with a table of 1,000,000 rows."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import median, milliseconds
from relatum.reading import StreamReader
from relatum.recording import status, verify
from relatum.store.parts import drop_parts, retain_from
from relatum_consumer import Relations, Status

GROUP: Final = "growth"

MILLION: Final = 1_000_000
HOSTS: Final = 50
GROWN_ID: Final = 2
"""The id of the stream with artificial rows: the second recorded one."""
REAL_MESSAGES: Final = 20_000
"""Messages that exist in a stream, whose rows are the first in the table: lookups ask for these."""
HOT_MESSAGES: Final = 10_000
"""The same for the stream with artificial rows: the oldest messages of each value."""
HOT: Final = "host-7"
HOT_LIMIT: Final = 100
ASKED: Final = 500
RELATED_AIM: Final = 1.3
BYTES_AIM: Final = 115.0
DROP_AIM_S: Final = 1.0
BOUND: Final = 2.0
"""Allowed ratio of the time of bounded queries to that at 1,000,000 rows: there are more parts to query."""
ROUNDS: Final = 5
SETTLED_S: Final = 180.0
"""Seconds within which autovacuum must process a closed part: it wakes up once a minute."""
LAST: Final = 4
"""Millions of last rows whose rate is compared: a whole part, while another part is closed."""
LOOKED_S: Final = 1.0


@dataclass(slots=True)
class Grown:
    """Rows a second for each million, and bytes of a row, including its index."""

    rates: list[float] = field(default_factory=list)
    bytes: float = 0.0

    @property
    def rows(self) -> int:
        """Number of written rows."""
        return len(self.rates) * MILLION

    @property
    def last(self) -> float:
        """Rows a second in the last millions."""
        taken = [1 / rate for rate in self.rates[-LAST:]]
        return len(taken) / sum(taken)


def related(context: Context, small: sa.Engine, large: sa.Engine, grown: Grown) -> Row:
    """Compare lookups by a value of a single message, in turns, payload included. All parts have such values."""
    context.say("looking up")
    numbers = range(0, REAL_MESSAGES, REAL_MESSAGES // ASKED)
    name = context.stream(
        "growth-questions", lambda name: streams.write_one_by_one(context.broker_url, name, numbers), len(numbers)
    )
    real = context.orders(REAL_MESSAGES)
    with StreamReader.open(context.broker) as reader:
        questions = list(reader.iterate(name))
    taken: tuple[list[float], list[float]] = ([], [])
    with (
        Relations(context.broker, _url(small)) as few,
        Relations(context.broker, _url(large)) as many,
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


def sizes(engine: sa.Engine, before: Grown) -> Row:
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


def bounded(context: Context, small: sa.Engine, large: sa.Engine, grown: Grown) -> Iterator[Row]:
    """Compare queries that must not grow with the table, in turns with the same at 1,000,000 rows."""
    real, hot = context.orders(REAL_MESSAGES), context.orders(HOT_MESSAGES)
    of_hot = f"`find` of a value of {HOT_MESSAGES // HOSTS + grown.rows // 2 // HOSTS:,} messages, limit {HOT_LIMIT}"
    with Relations(context.broker, _url(small)) as few, Relations(context.broker, _url(large)) as many:

        def find(engine: sa.Engine) -> None:
            relations = few if engine is small else many
            answer = relations.find("host", HOT, streams=[hot], limit=HOT_LIMIT)
            assert answer.status is Status.FOUND
            assert [each.offset % HOSTS for each in answer] == [int(HOT.removeprefix("host-"))] * HOT_LIMIT

        asked: Sequence[tuple[str, Callable[[sa.Engine], object]]] = (
            (of_hot, find),
            ("`status` of a stream", lambda engine: status(context.broker, engine.url, [real])),
            (
                "`verify --sample` of a stream, a window",
                lambda engine: verify(context.broker, engine.url, [real], sample=0.01),
            ),
        )
        for what, ask in asked:
            taken: tuple[list[float], list[float]] = ([], [])
            for _ in range(ROUNDS + 1):
                for engine, seconds in zip((small, large), taken, strict=True):
                    begun = time.perf_counter()
                    ask(engine)
                    seconds.append(time.perf_counter() - begun)
            at_first, at_last = (median(seconds[1:]) for seconds in taken)
            yield Row(
                GROUP,
                what,
                milliseconds(at_last),
                f"{milliseconds(at_first)} at 1,000,000",
                at_last / at_first,
                f"≤ {BOUND:g}",
                at_last / at_first <= BOUND,
                figures={"small_s": at_first, "s": at_last},
            )


def settled(context: Context, engine: sa.Engine) -> Row:
    """Check that autovacuum has frozen each closed part, and has no reason to process it again."""
    query = sa.text(
        "SELECT count(*), count(*) FILTER (WHERE last_autovacuum > closed_at AND relallvisible > relpages * 0.99), "
        "coalesce(sum(n_dead_tup), 0), extract(epoch FROM clock_timestamp() - max(closed_at)) "
        "FROM relatum.table_parts JOIN pg_class ON oid = to_regclass('relatum.relationships_' || part) "
        "JOIN pg_stat_all_tables ON relid = oid WHERE closed_at IS NOT NULL"
    )
    # COPY extends a table by up to 64 pages at a time; the last pages stay new, and vacuum does not mark them.
    context.say("waiting for autovacuum")
    while True:
        with engine.connect() as connection:
            parts, seen, dead, seconds = connection.execute(query).one()
        if seen == parts or seconds > SETTLED_S:
            break
        time.sleep(LOOKED_S)
    return Row(
        GROUP,
        "closed parts that autovacuum has frozen, and their dead rows",
        f"{seen} of {parts}, {dead}",
        f"{seconds:.0f} s after the last was closed",
        aim=f"all within {SETTLED_S:.0f} s, 0",
        is_met=bool(seen == parts and not dead),
        figures={"parts": parts, "seen": seen, "dead": int(dead), "s": float(seconds)},
    )


def dropped(engine: sa.Engine, grown: Grown) -> Row:
    # Messages are half the rows. Drop 11 million rows, or half of a small run; of the other stream, all.
    gone = HOT_MESSAGES + min(11 * MILLION, grown.rows // 2) // 2
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
