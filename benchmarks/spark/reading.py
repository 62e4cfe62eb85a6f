"""Reading a stream into Spark, compared with a source of rstream and tuples."""

from collections.abc import Iterator
from typing import Final

from pyspark.sql import functions as F

from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import in_turns, median, per_second
from benchmarks.spark._naive import Naive
from benchmarks.spark._session import TASKS, consume, read_stream, session

GROUP: Final = "reading"

ROUNDS: Final = 3

NAIVE_AIM: Final = 1.5
RATE_AIM: Final = 350_000.0
BARE_AIM: Final = 3.0


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about the batch source."""
    stream, count = context.orders(context.messages), context.messages
    _check(context, stream, count)
    spark = session()
    spark.dataSource.register(Naive)
    naive = spark.read.format("naive").option("streamUrl", context.stream_url).option("stream", stream)
    naive = naive.option("messages", count).option("partitions", TASKS)
    actions = {
        "decoded": lambda: consume(read_stream(context, stream, count)),
        "naive": lambda: consume(naive.load()),
        "bare": lambda: consume(read_stream(context, stream, count, includeValue=False, includeHeaders=False)),
    }
    context.say(f"reading {count:,} messages into Spark, {TASKS} tasks")
    taken = in_turns(actions, context.rounds(ROUNDS))
    rates = {name: count / median(times) for name, times in taken.items()}
    figures = {f"{name}_messages_per_s": [count / seconds for seconds in times] for name, times in taken.items()}
    what = f"batch read of {count:,} messages, decoded, {TASKS} tasks"
    yield Row(
        GROUP,
        what,
        per_second(rates["decoded"]),
        f"{per_second(rates['naive'])}: rstream and tuples",
        rates["decoded"] / rates["naive"],
        f"≥ {NAIVE_AIM:g} ×",
        rates["decoded"] / rates["naive"] >= NAIVE_AIM,
        note="The source of rstream and tuples leaves the properties out.",
        figures=figures,
    )
    yield Row(
        GROUP,
        "the same",
        per_second(rates["decoded"]),
        aim=f"≥ {RATE_AIM:,.0f} messages/s",
        is_met=rates["decoded"] >= RATE_AIM,
    )
    yield Row(
        GROUP,
        "the same without value and headers",
        per_second(rates["bare"]),
        f"{per_second(rates['decoded'])}: decoded",
        rates["bare"] / rates["decoded"],
        f"≥ {BARE_AIM:g} ×",
        rates["bare"] / rates["decoded"] >= BARE_AIM,
    )


def _check(context: Context, stream: str, count: int) -> None:
    """Check that every message appears once with its header; this also warms up Spark."""
    frame = read_stream(context, stream, count)
    matching = F.sum((F.col("headers")["order_id"] == F.concat(F.lit("o"), F.col("offset"))).cast("long"))
    row = frame.agg(F.count("*"), F.countDistinct("offset"), F.max("offset"), matching).first()
    assert row is not None
    assert tuple(row) == (count, count, count - 1, count), f"{row} instead of {count} messages"
