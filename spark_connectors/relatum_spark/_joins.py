"""Joins of messages by their key values: pairs, the nearest in time, and messages without a counterpart."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, TypeAlias, Unpack, get_args

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from relatum.common.checks import checked_choice
from relatum.errors import InvalidInput
from relatum_consumer import Status
from relatum_spark._columns import PLACE
from relatum_spark._servers import span_us
from relatum_spark._sides import GivenKeys, GivenSide, Inputs, Side, Where, key_columns, keys_of, prefixed, side_of
from relatum_spark._table import status_of_missing

Direction: TypeAlias = Literal["backward", "forward", "nearest"]

Span = tuple[int, int]
"""Maximum lead and maximum lag of the right message against the left message, in microseconds."""


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
    **where: Unpack[Where],
) -> DataFrame:
    """Return every pair of a left and a right message with an equal value of a key.

    Both sides are read in one state of the table: its state at the call, or the snapshot's. Only messages whose value
    of the key is recorded take part. A message is never paired with itself. If both sides contain both messages, the
    pair appears twice, once from either side. Duplicate rows of a DataFrame are used once.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`).
        left: A stream, a super stream, several of them, or a DataFrame with `stream` and `offset` (or `stream_offset`).
        right: Like `left`.
        on: The key whose values must be equal, or several keys, all of which must be equal.
        within: Maximum distance of the two times, both ways, inclusive; a timedelta or seconds. None means any. With
            `within`, `before` or `after`, a message without a time has no pair.
        before: Instead of within: how much earlier the right message may be. None means 0 if `after` is given.
        after: Instead of within: how much later the right message may be. None means 0 if `before` is given.
        payloads: Whether to also read the messages of the pairs, which needs the broker.
        where: The servers, tasks and snapshot: see `Where`.

    Returns:
        Columns value, left_stream, left_offset, left_time, right_stream, right_offset, right_time, in no order of
        rows. `value` is text, or an array in the order of `on` if that is a list. Payloads add left_value,
        left_headers, left_properties, left_status and the same for right. The status is the status of `resolve`; it is
        "replaced" if the message at that offset does not have the value.

    Raises:
        InvalidInput: an argument is wrong; nothing was run.
        StreamNotFound: a stream or super stream was never recorded.
        KeyNotDefined: a key is not in force.
        ConfigurationError: a broker, a database or the JDBC driver is missing.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    sides, keys, span = [side_of("left", left), side_of("right", right)], keys_of(on), _span_of(within, before, after)
    inputs = Inputs.of(needs_broker=payloads, **where)
    relations = inputs.sides(spark, sides, keys)
    joined = _joined(relations[0], relations[1], key_columns(keys), span)
    return inputs.result(joined, on, "left", "right", payloads=payloads)


def as_of(
    spark: SparkSession,
    left: GivenSide,
    right: GivenSide,
    *,
    on: GivenKeys | None,
    direction: Direction = "backward",
    tolerance: timedelta | float | None = None,
    allow_exact_matches: bool = True,
    payloads: bool = False,
    **where: Unpack[Where],
) -> DataFrame:
    """Return each left message with the nearest right message that has an equal key value, by default not after it.

    The result equals pandas' `merge_asof` with the time as `on` and the key as `by`. Of right messages with equal
    times, "backward" takes the last and "forward" the first in the order of partition and offset; of two equally near
    messages, "nearest" takes the earlier. Each left message appears once, or once for each of its values; a message
    without a match or a time has nulls. If the sides overlap, a message can match itself, as in pandas;
    `allow_exact_matches=False` excludes that.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`) unless `on` is None.
        left: As for `related_pairs`.
        right: Like `left`.
        on: As for `related_pairs`. None matches by time alone:
            then the times of all messages of both sides are read from the streams, which needs the broker.
        direction: "backward" for the last right message not after the left one, "forward" for the first not before it,
            "nearest" for the nearer of the two.
        tolerance: Maximum distance of the two times, inclusive; a timedelta or seconds. None means any.
        allow_exact_matches: Whether messages with equal times match.
        payloads: Whether to also read the messages, which needs the broker.
        where: The servers, tasks and snapshot: see `Where`.

    Returns:
        Columns value, left_stream, left_offset, left_time, right_stream, right_offset, right_time, in no order of
        rows; without `value` if `on` is None. Payloads add the same columns as in `related_pairs`; the right status is
        null if there is no match.

    Raises:
        StreamNotFound: a stream or super stream was never recorded or, if `on` is None, does not exist.
        RelatumError: any other error of `related_pairs`.
    """
    sides, keys = [side_of("left", left), side_of("right", right)], () if on is None else keys_of(on)
    tolerance_us = None if tolerance is None else span_us("tolerance", tolerance)
    checked_choice("direction", direction, get_args(Direction))
    inputs = Inputs.of(needs_broker=payloads or on is None, **where)
    relations = [inputs.times(spark, side) for side in sides] if on is None else inputs.sides(spark, sides, keys)
    joined = _nearest(
        relations[0], relations[1], key_columns(keys), direction, tolerance_us, allow_exact_matches=allow_exact_matches
    )
    return inputs.result(joined, on, "left", "right", payloads=payloads)


def unmatched(
    spark: SparkSession,
    left: GivenSide,
    right: GivenSide,
    *,
    on: GivenKeys,
    older_than: timedelta | float | None = None,
    within: timedelta | float | None = None,
    before: timedelta | float | None = None,
    after: timedelta | float | None = None,
    payloads: bool = False,
    **where: Unpack[Where],
) -> DataFrame:
    """Return the left messages without a right message of an equal key value, such as orders without a payment.

    Only left messages whose value is recorded are checked: messages that are not recorded yet, or do not have the key,
    do not appear. A right message counts while its row is in the table, even if retention has dropped the message. A
    message does not match itself.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`).
        left: As for `related_pairs`.
        right: Like `left`.
        on: As for `related_pairs`.
        older_than: Omit left messages younger than this, which may still get a match, and messages without a time; a
            timedelta or seconds by the driver's clock. None means messages of any age.
        within: Match only right messages at most this far in time, both ways, inclusive; a timedelta or seconds. A
            left message without a time is then unmatched. None means any.
        before: Instead of within: how much earlier the right message may be. None means 0 if `after` is given.
        after: Instead of within: how much later the right message may be. None means 0 if `before` is given.
        payloads: Whether to also read the unmatched messages.
        where: The servers, tasks and snapshot: see `Where`. The broker is required, for the right streams' ends.

    Returns:
        Columns value, left_stream, left_offset, left_time and status, in no particular order. The status is "absent"
        if every message that the right streams retained at the call is recorded for the keys (and, with a span, for
        times): no match exists. Otherwise a match may exist, and the status of all rows is "not_recorded_yet", or
        "unproven" if the contents of the streams cannot be proven (for example, no leader is reachable). Payloads add
        left_value, left_headers, left_properties and left_status.

    Raises:
        StreamNotFound: a left stream was never recorded, or a right stream is unknown to both table and broker.
        StreamReplaced: a right stream was replaced since it was recorded; run a recorder on it.
        BrokerUnavailable: the broker does not answer.
        RelatumError: any other error of `related_pairs`.
    """
    sides, keys, span = [side_of("left", left), side_of("right", right)], keys_of(on), _span_of(within, before, after)
    age_us = None if older_than is None else span_us("older_than", older_than)
    inputs = Inputs.of(needs_broker=True, **where)
    # Read the streams' ends and the coverage before the rows, so that the rows include everything covered.
    status = _status(inputs, sides[1], keys, with_time=span is not None)
    left_rows, right_rows = inputs.sides(spark, sides, keys, is_right_known=False)
    if age_us is not None:
        left_rows = left_rows.where(F.col("time_us") <= time.time_ns() // 1000 - age_us)
    unmatched_rows = _unmatched(left_rows, right_rows, key_columns(keys), span)
    unmatched_rows = unmatched_rows.withColumn("status", F.lit(str(status)))
    return inputs.result(unmatched_rows, on, "left", payloads=payloads, more=["status"])


def _span_of(within: Any, before: Any, after: Any) -> Span | None:
    """Return the span in microseconds; None for any."""
    if within is not None:
        if before is not None or after is not None:
            raise InvalidInput("within= sets both before= and after=: leave them out")
        both = span_us("within", within)
        return both, both
    if before is None and after is None:
        return None
    return span_us("before", 0 if before is None else before), span_us("after", 0 if after is None else after)


# --- pairs ------------------------------------------------------------------------------------------------


def _joined(left: DataFrame, right: DataFrame, keys: Sequence[str], span: Span | None, how: str = "inner") -> DataFrame:
    """Join two sides' relations by equal keys and times within the span; no message is joined to itself.

    With a span, slices of time as long as the span are join keys. A value of thousands of messages then gives only
    candidates that are near in time, not thousands times thousands. `how` is "inner" for the pairs, "left_semi" for
    left relations with a pair, "left_anti" for left relations without a pair.
    """
    left, right = prefixed(left, keys, "left"), prefixed(right, keys, "right")
    condition = (F.col("left_stream") != F.col("right_stream")) | (F.col("left_offset") != F.col("right_offset"))
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
    """Add a column `slice` that is equal in exactly one row of every pair within the span.

    A right message is in one slice; a left message has a row for each of the two or three slices that its span touches.
    """
    before, after = span
    length = max(before + after, 1)

    def slice_of(time_us: Column) -> Column:
        return time_us - F.pmod(time_us, F.lit(length))

    near = F.sequence(slice_of(F.col("left_time_us") - before), slice_of(F.col("left_time_us") + after), F.lit(length))
    timed = left.where(F.col("left_time_us").isNotNull())
    return timed.withColumn("slice", F.explode(near)), right.withColumn("slice", slice_of(F.col("right_time_us")))


def _unmatched(left: DataFrame, right: DataFrame, keys: list[str], span: Span | None) -> DataFrame:
    """Return the left relations without a right relation; columns have the prefix `left_`."""
    if span is None:
        return _joined(left, right, keys, None, "left_anti")
    # Relations include the value: a message with several values keeps the values without a counterpart.
    relation = [*keys, "left_stream", "left_offset"]
    matched = _joined(left, right, keys, span, "left_semi").select(*relation)
    return prefixed(left, keys, "left").join(matched, relation, "left_anti")


def _status(inputs: Inputs, side: Side, keys: Sequence[str], *, with_time: bool) -> Status:
    """Return the status of left messages without a message on this right side."""
    names: Any = side
    if not isinstance(side, tuple):
        names = [row.stream for row in side.where("stream IS NOT NULL").select("stream").distinct().collect()]
    if not names:
        # The right frame is empty, so no match can exist.
        return Status.ABSENT
    assert inputs.broker is not None, "the broker has the ends of the streams"
    return status_of_missing(inputs.broker, inputs.database, names, keys, with_time=with_time, snapshot=inputs.snapshot)


# --- the nearest in time ----------------------------------------------------------------------------------


def _nearest(
    left: DataFrame,
    right: DataFrame,
    keys: Sequence[str],
    direction: Direction,
    tolerance_us: int | None,
    *,
    allow_exact_matches: bool,
) -> DataFrame:
    """Return left relations, each with its right relation: columns `left_…` and `right_…`, null without a match.

    Both sides are sorted together and read once; each left row matches the last right row before it. So the work is
    proportional to the number of rows, even if many rows have an equal value.
    """
    columns = [*keys, *PLACE, "time_us"]
    itself = F.struct(*PLACE, "time_us")
    timed = right.where(F.col("time_us").isNotNull())
    both = left.select(*columns, F.lit(True).alias("is_left")).unionByName(
        timed.select(*columns, F.lit(False).alias("is_left"))
    )
    both = both.withColumn("candidate", F.when(~F.col("is_left"), itself))
    found = {
        step: _last_right_row(step, keys, allow_exact_matches=allow_exact_matches)
        for step in ("backward", "forward")
        if direction in (step, "nearest")
    }
    both = both.select("*", *(column.alias(step) for step, column in found.items())).where("is_left")
    match = F.col(next(iter(found)))
    if direction == "nearest":
        # Of two equally near messages take the earlier, as pandas does; both directions find an equal time.
        distances = {step: F.abs(F.col("time_us") - F.col(step)["time_us"]) for step in found}
        is_later = F.col("backward").isNull() | (distances["forward"] < distances["backward"])
        match = F.when(is_later, F.coalesce("forward", "backward")).otherwise(F.col("backward"))
    is_near = F.col("time_us").isNotNull()
    if tolerance_us is not None:
        is_near &= F.abs(F.col("time_us") - match["time_us"]) <= tolerance_us
    matched = both.withColumn("match", F.when(is_near, match))
    names = (*PLACE, "time_us")
    return matched.select(
        *keys,
        *(F.col(name).alias(f"left_{name}") for name in names),
        *(F.col("match")[name].alias(f"right_{name}") for name in names),
    )


def _last_right_row(step: str, keys: Sequence[str], *, allow_exact_matches: bool) -> Column:
    """Return the last right row before each row, in ascending order of time, or descending for "forward".

    Messages with equal times are in the order of partition and offset, as in lookups by time. The side that is sorted
    first decides whether a right row with an equal time matches.
    """
    sorted_by = F.asc if step == "backward" else F.desc
    exact_match = F.asc("is_left") if allow_exact_matches else F.desc("is_left")
    order = [sorted_by("time_us"), exact_match, sorted_by(F.length("stream")), sorted_by("stream"), sorted_by("offset")]
    so_far = Window.partitionBy(*keys).orderBy(*order).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return F.last("candidate", ignorenulls=True).over(so_far)
