"""Reading the payloads of some messages, compared with reading the whole stream and joining."""

from collections.abc import Iterator
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import relatum_spark
from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import in_turns, median
from benchmarks.spark._session import consume, read_stream, session

GROUP: Final = "resolving"

ROUNDS: Final = 5

AIMS: Final = {50_000: 4.5, 500: 6.0}
"""The minimum speed-up over scan and join, by the number of requested messages of 1,000,000."""


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about `resolve`."""
    stream, count = context.orders(context.messages), context.messages
    for wanted_of_million, aim in AIMS.items():
        wanted = wanted_of_million * count // 1_000_000
        ids = _ids(stream, count, wanted).cache()
        ids.count()

        def resolved(ids: DataFrame = ids) -> DataFrame:
            return relatum_spark.resolve(ids, broker=context.broker)

        def joined(ids: DataFrame = ids) -> DataFrame:
            return ids.join(read_stream(context, stream, count), ["stream", "offset"])

        _check(resolved(), joined(), wanted)
        context.say(f"resolving {wanted:,} of {count:,} messages, and scan and join")
        actions = {"resolve": lambda: consume(resolved()), "join": lambda: consume(joined())}
        taken = in_turns(actions, context.rounds(ROUNDS))
        ours, other = median(taken["resolve"]), median(taken["join"])
        yield Row(
            GROUP,
            f"resolve {wanted:,} of {count:,} messages",
            f"{ours:.2f} s",
            f"{other:.2f} s: scan and join",
            other / ours,
            f"≥ {aim:g} × faster",
            other / ours >= aim,
            figures={"resolve_s": taken["resolve"], "join_s": taken["join"]},
        )
        ids.unpersist()


def _ids(stream: str, count: int, wanted: int) -> DataFrame:
    """Return places throughout the stream, in random order."""
    step = count // wanted
    offsets = session().range(wanted).select((F.col("id") * step + F.abs(F.xxhash64("id")) % step).alias("offset"))
    return offsets.select(F.lit(stream).alias("stream"), "offset").orderBy(F.xxhash64("offset"))


def _check(resolved: DataFrame, joined: DataFrame, wanted: int) -> None:
    """Check that both return the same messages; this also warms up both."""
    digest = F.bit_xor(F.xxhash64("offset", "value", F.col("headers")["order_id"], "timestamp"))
    found, expected = (frame.agg(F.count("*"), digest).first() for frame in (resolved, joined))
    assert found is not None
    assert found == expected, f"{found} instead of {expected}"
    assert found[0] == wanted
