"""Joins of messages over their relations: pairs, the nearest in time, and those without a counterpart."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, TypeAlias, Unpack, get_args

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from relatum.checks import checked_choice
from relatum.errors import InvalidInput
from relatum_consumer import Status
from relatum_spark._sides import (
    PLACE,
    GivenKeys,
    GivenSide,
    Inputs,
    Side,
    key_columns,
    keys_of,
    prefixed,
    result_columns,
    side_of,
)
from relatum_spark._table import connected, status_of_missing
from relatum_spark._where import Where, open_reader, span_us

Direction: TypeAlias = Literal["backward", "forward", "nearest"]

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
    **where: Unpack[Where],
) -> DataFrame:
    """Return every pair of a left and a right message that share a key's value, from the relationship table alone.

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
        payloads: Also read the messages of the pairs, which needs the broker.
        where: The servers, tasks and snapshot: see `Where`.

    Returns:
        Columns value, left_stream, left_offset, left_time, right_stream, right_offset, right_time, in no order of
        rows. `value` is text, or an array in the order of `on` where that is a list. With payloads also left_value,
        left_headers, left_properties, left_status and the same for right; the status is that of `resolve`, and
        "replaced" where the message there does not carry the value.

    Raises:
        InvalidInput: an argument is wrong; nothing was run.
        StreamNotFound: a stream or super stream of that name was never recorded.
        KeyNotDefined: a key of that name is not in force.
        ConfigurationError: a broker, a database or the JDBC driver is missing.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    sides, keys, span = _sides(left, right), keys_of(on), _span_of(within, before, after)
    inputs = Inputs.of(needs_broker=payloads, **where)
    relations = inputs.sides(spark, sides, keys)
    joined = _paired(relations[0], relations[1], key_columns(keys), span)
    joined, more = inputs.with_payloads(joined, keys, "left", "right", wanted=payloads)
    return result_columns(joined, on, "left", "right", more=more)


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
    """Return for each left message the one right message nearest in time among those of the same key's value.

    The result is that of pandas' `merge_asof` with `on` the time and `by` the key. Of right messages of one time,
    "backward" takes the last and "forward" the first, in the order of partition and offset; of two equally near,
    "nearest" takes the earlier. Each left message comes once, with several values once for each; one without a match,
    or without a time, with nulls. Where the sides overlap a message can be its own match, as in pandas;
    `allow_exact_matches=False` looks past it.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`) unless `on` is None.
        left: A stream, a super stream, several of them, or a DataFrame with `stream` and `offset` (or `stream_offset`).
        right: The same.
        on: The key whose values must be equal; several, all of them; None to match by time alone. Then the times of
            all messages of both sides are read from the streams, keys or not, which needs the broker.
        direction: "backward" for the last right message not after the left one, "forward" for the first not before it,
            "nearest" for the nearer of the two.
        tolerance: How far apart the two may be at most, ends included; a timedelta or seconds. None for any.
        allow_exact_matches: Whether messages of the same time match.
        payloads: Also read the messages, which needs the broker.
        where: The servers, tasks and snapshot: see `Where`.

    Returns:
        Columns value, left_stream, left_offset, left_time, right_stream, right_offset, right_time, in no order of
        rows; without `value` where `on` is None. More with payloads, as of `related_pairs`; the right status is null
        where there is no match.

    Raises:
        StreamNotFound: a stream or super stream of that name was never recorded, or without a key does not exist.
        RelatumError: any other error of `related_pairs`.
    """
    sides, keys = _sides(left, right), () if on is None else keys_of(on)
    tolerance_us = None if tolerance is None else span_us("tolerance", tolerance)
    checked_choice("direction", direction, get_args(Direction))
    inputs = Inputs.of(needs_broker=payloads or on is None, **where)
    relations = [inputs.times(spark, side) for side in sides] if on is None else inputs.sides(spark, sides, keys)
    joined = _nearest(
        relations[0], relations[1], key_columns(keys), direction, tolerance_us, allow_exact_matches=allow_exact_matches
    )
    joined, more = inputs.with_payloads(joined, keys, "left", "right", wanted=payloads)
    return result_columns(joined, on, "left", "right", more=more)


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
    """Return the left messages that have no right message with an equal value of the key: orders without a payment.

    Only messages whose values the table has are looked at on the left: one that is not recorded yet is not named, and
    one that carries no such key never is. A right message counts while its row is in the table, even where retention
    has dropped it since. A message is no match of itself.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`).
        left: A stream, a super stream, several of them, or a DataFrame with `stream` and `offset` (or `stream_offset`).
        right: The same.
        on: The key whose values must be equal; or several, all of them.
        older_than: Leave out left messages younger than this, which may find theirs yet, and those without a time; a
            timedelta or seconds, counted from the driver's clock. None for messages of any age.
        within: Only a right message this near in time counts, both ways, ends included; a timedelta or seconds. A
            left message without a time is then unmatched. None for any.
        before: Instead: how much earlier the right message may be. None for not at all where `after` is given.
        after: Instead: how much later the right message may be. None for not at all where `before` is given.
        payloads: Also read the unmatched messages.
        where: The servers, tasks and snapshot: see `Where`. The broker is needed: it tells where the right streams end.

    Returns:
        Columns value, left_stream, left_offset, left_time and status, in no order of rows. The status is "absent"
        where every message that the right streams retained when this was called is recorded for the keys (and, with a
        span of time, for times): there is none. Else it is "not_recorded_yet" for all rows, or "unproven" where nobody
        can prove what the streams hold (a leader cannot be reached): there may be one. With payloads also left_value,
        left_headers, left_properties and left_status.

    Raises:
        StreamNotFound: a left stream was never recorded; a right one is unknown to the broker too.
        StreamReplaced: a right stream is not the one that was recorded; a recorder puts that right.
        BrokerUnavailable: the broker does not answer.
        RelatumError: any other error of `related_pairs`.
    """
    sides, keys, span = _sides(left, right), keys_of(on), _span_of(within, before, after)
    age_us = None if older_than is None else span_us("older_than", older_than)
    inputs = Inputs.of(needs_broker=True, **where)
    # First the ends of the streams and the coverage, then the rows: what is covered then is among the rows.
    status = _status(inputs, sides[1], keys, with_time=span is not None)
    lefts, rights = inputs.sides(spark, sides, keys, is_right_known=False)
    if age_us is not None:
        lefts = lefts.where(F.col("time_us") <= time.time_ns() // 1000 - age_us)
    alone = _without(lefts, rights, key_columns(keys), span)
    alone, more = inputs.with_payloads(alone, keys, "left", wanted=payloads)
    return result_columns(alone.withColumn("status", F.lit(str(status))), on, "left", more=["status", *more])


def _sides(left: Any, right: Any) -> list[Side]:
    return [side_of("left", left), side_of("right", right)]


def _span_of(within: Any, before: Any, after: Any) -> Span | None:
    """Return the span of time that is asked for; None for any."""
    if within is not None:
        if before is not None or after is not None:
            raise InvalidInput("within= means before= and after= of the same length: give it alone")
        both = span_us("within", within)
        return both, both
    if before is None and after is None:
        return None
    return span_us("before", 0 if before is None else before), span_us("after", 0 if after is None else after)


# --- pairs ------------------------------------------------------------------------------------------------


def _paired(left: DataFrame, right: DataFrame, keys: Sequence[str], span: Span | None, how: str = "inner") -> DataFrame:
    """Join two sides' relations where all keys are equal and the times are near enough; no message with itself.

    A span is joined by slices of time as long as the span: a value that thousands of messages carry gives as many
    candidates as are near each other, not thousands times thousands. `how` is "inner" for the pairs, "left_semi" for
    the left relations that have any, "left_anti" for those that have none.
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
    """Add a column `slice` that is equal in one row of every pair that is near enough.

    A right message is in one slice; a left one is looked for in each slice its span touches, which are two or three.
    """
    before, after = span
    length = max(before + after, 1)

    def slice_of(time_us: Column) -> Column:
        return time_us - F.pmod(time_us, F.lit(length))

    near = F.sequence(slice_of(F.col("left_time_us") - before), slice_of(F.col("left_time_us") + after), F.lit(length))
    timed = left.where(F.col("left_time_us").isNotNull())
    return timed.withColumn("slice", F.explode(near)), right.withColumn("slice", slice_of(F.col("right_time_us")))


def _without(left: DataFrame, right: DataFrame, keys: list[str], span: Span | None) -> DataFrame:
    """Return the left relations, with the prefix `left_`, that have no right one."""
    if span is None:
        return _paired(left, right, keys, None, "left_anti")
    # By the value, too: of a message with several, those without a counterpart are left.
    relation = [*keys, "left_stream", "left_offset"]
    matched = _paired(left, right, keys, span, "left_semi").select(*relation)
    return prefixed(left, keys, "left").join(matched, relation, "left_anti")


def _status(inputs: Inputs, side: Side, keys: Sequence[str], *, with_time: bool) -> Status:
    """Return what may be said of a left message without one on this right side."""
    names: Sequence[str]
    if isinstance(side, tuple):
        names = side
    else:
        names = [row.stream for row in side.where("stream IS NOT NULL").select("stream").distinct().collect()]
    if not names:
        # A right frame without any place: there is nothing to be found among the places that were given.
        return Status.ABSENT
    assert inputs.broker is not None, "the broker tells where streams end"
    with open_reader(inputs.broker) as reader, connected(inputs.database, inputs.snapshot) as connection:
        return status_of_missing(reader, connection, inputs.vhost, names, keys, with_time=with_time)


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
    """Return left relations, each with its right one: columns `left_…` and `right_…`, null where there is none.

    Both sides are sorted together and read once, and each left row takes the last right row before it: the work grows
    with the rows, never with their products, however many carry one value.
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
        # Of two equally near the earlier, as in pandas: both directions find an equal time.
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
    """Return the last right row before each row, in the order of time or against it.

    Messages of one time come in the order of partition and offset, as in lookups by time. Whether a right row of the
    same time counts depends on which side is sorted first.
    """
    turn = F.asc if step == "backward" else F.desc
    at_once = F.asc("is_left") if allow_exact_matches else F.desc("is_left")
    order = [turn("time_us"), at_once, turn(F.length("stream")), turn("stream"), turn("offset")]
    so_far = Window.partitionBy(*keys).orderBy(*order).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return F.last("candidate", ignorenulls=True).over(so_far)
