"""Pairs of messages that share a key's value: relations first, payloads only for the pairs that are left."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from relatum.errors import InvalidInput
from relatum.reading import BrokerAddress
from relatum_spark._inputs import Inputs
from relatum_spark._sides import GivenKeys, GivenSide, key_columns, keys_of, prefixed, presented, side_of, span_us
from relatum_spark._snapshot import Snapshot
from relatum_spark._where import Broker

Span = tuple[int, int]
"""How long before and after the left message, in microseconds, the right one may be."""


def related_pairs(
    spark: SparkSession,
    left: GivenSide,
    right: GivenSide,
    *,
    on: GivenKeys,
    within: timedelta | float | None = None,
    before: timedelta | float | None = None,
    after: timedelta | float | None = None,
    payloads: bool = False,
    database: str | None = None,
    broker: str | BrokerAddress | Broker | None = None,
    stream_url: str | None = None,
    partitions: int | None = None,
    snapshot: Snapshot | None = None,
) -> DataFrame:
    """Every pair of a left and a right message that share a key's value, from the relationship table alone.

    Both sides are read in one state of the table: what is recorded when this is called, or the snapshot. A message
    takes part where the table has its value of the key. It is never paired with itself; where both sides hold both
    messages, each pair comes twice, once from either side. Duplicate rows of a DataFrame count once.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`).
        left: A stream, a super stream, several of them, or a DataFrame with `stream` and `offset` (or `stream_offset`).
        right: The same.
        on: The key whose values must be equal; or several, all of them.
        within: How far apart the two times may be, both ways, ends included; a timedelta or seconds. None for any.
            With it, or one of the next two, messages without a time have no pair.
        before: Instead: how much earlier the right message may be. None for not at all where `after` is given.
        after: Instead: how much later the right message may be. None for not at all where `before` is given.
        payloads: Also read the messages of the pairs.
        database: PostgreSQL's URL; None for RELATUM_DATABASE_URL, or for the snapshot's.
        broker: Which RabbitMQ; None for RELATUM_BROKER_URL. Needed for payloads; names the streams' virtual host.
        stream_url: Where the stream protocol is, if that cannot be told from the broker's URL.
        partitions: Tasks that read the table at once; None for 8.
        snapshot: The state to read; the action must run inside its block.

    Returns:
        Columns value, left_stream, left_offset, left_time, right_stream, right_offset, right_time, in no order of
        rows. `value` is text, or an array in the order of `on` where that is a list. With payloads also left_value,
        left_headers, left_properties, left_status and the same for right; the status is that of `resolve`, and
        "replaced" where what lies there does not carry the value.

    Raises:
        InvalidInput: an argument is wrong; nothing was run.
        StreamNotFound: a stream or super stream of that name was never recorded.
        KeyNotDefined: a key of that name is not in force.
        ConfigurationError: a broker, a database or the JDBC driver is missing.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    sides, keys, span = [side_of("left", left), side_of("right", right)], keys_of(on), span_of(within, before, after)
    inputs = Inputs.of(database, broker, stream_url, snapshot, partitions, needs_broker=payloads)
    relations = inputs.sides(spark, sides, keys)
    joined = paired(relations[0], relations[1], key_columns(keys), span)
    joined, more = inputs.with_payloads(joined, keys, "left", "right", wanted=payloads)
    return presented(joined, on, "left", "right", more=more)


def span_of(within: Any, before: Any, after: Any) -> Span | None:
    """The span of time that is asked for; None for any.

    Raises:
        InvalidInput: `within` stands beside the others, or one is no span of time.
    """
    if within is not None:
        if before is not None or after is not None:
            raise InvalidInput("within= stands for before= and after= of the same length: give it alone")
        both = span_us("within", within)
        return both, both
    if before is None and after is None:
        return None
    return span_us("before", 0 if before is None else before), span_us("after", 0 if after is None else after)


def paired(left: DataFrame, right: DataFrame, keys: Sequence[str], span: Span | None, how: str = "inner") -> DataFrame:
    """Join two sides' relations where all keys are equal and the times are near enough; no message with itself.

    A span is joined by slices of time as long as the span: a value that thousands of messages carry gives as many
    candidates as lie near each other, not thousands times thousands.

    Args:
        left: A side's relations.
        right: The other's.
        keys: The columns of the keys.
        span: How near; None for any.
        how: "inner" for the pairs, "left_semi" for the left ones that have any.
    """
    left, right = prefixed(left, keys, "left"), prefixed(right, keys, "right")
    itself = (F.col("left_stream") == F.col("right_stream")) & (F.col("left_offset") == F.col("right_offset"))
    condition = ~itself
    columns = list(keys)
    if span is not None:
        left, right = _sliced(left, right, span)
        columns.append("slice")
        distance = F.col("right_time_us") - F.col("left_time_us")
        condition &= distance.between(-span[0], span[1])
    for column in columns:
        right = right.withColumnRenamed(column, f"right_{column}")
        condition &= F.col(column) == F.col(f"right_{column}")
    joined = left.join(right, condition, how)
    return joined.drop("slice", *(f"right_{column}" for column in columns))


def _sliced(left: DataFrame, right: DataFrame, span: Span) -> tuple[DataFrame, DataFrame]:
    """Both sides with a column `slice`, equal in at least one row of every pair that is near enough, and in one only.

    A right message lies in one slice; a left one is looked for in each slice its span touches, which are two or three.
    """
    before, after = span
    length = max(before + after, 1)

    def slice_of(time_us: Any) -> Any:
        return time_us - F.pmod(time_us, F.lit(length))

    near = F.sequence(slice_of(F.col("left_time_us") - before), slice_of(F.col("left_time_us") + after), F.lit(length))
    timed = left.where(F.col("left_time_us").isNotNull())
    return timed.withColumn("slice", F.explode(near)), right.withColumn("slice", slice_of(F.col("right_time_us")))
