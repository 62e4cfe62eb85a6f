"""For each left message the one right message nearest in time, as pandas' `merge_asof`, at any number of messages."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, TypeAlias, get_args

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from relatum.errors import InvalidInput
from relatum.reading import BrokerAddress
from relatum_spark._inputs import Inputs
from relatum_spark._sides import PLACE, GivenKeys, GivenSide, key_columns, keys_of, presented, side_of, span_us
from relatum_spark._snapshot import Snapshot
from relatum_spark._times import times_of
from relatum_spark._where import Broker

Direction: TypeAlias = Literal["backward", "forward", "nearest"]


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
    database: str | None = None,
    broker: str | BrokerAddress | Broker | None = None,
    stream_url: str | None = None,
    partitions: int | None = None,
    snapshot: Snapshot | None = None,
) -> DataFrame:
    """For each left message the one right message nearest in time among those of the same key's value.

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
        payloads: Also read the messages.
        database: PostgreSQL's URL; None for RELATUM_DATABASE_URL, or for the snapshot's.
        broker: Which RabbitMQ; None for RELATUM_BROKER_URL. Needed for payloads and without a key.
        stream_url: Where the stream protocol is, if that cannot be told from the broker's URL.
        partitions: Tasks that read the table or the streams at once; None for 8.
        snapshot: The state to read; the action must run inside its block.

    Returns:
        Columns value, left_stream, left_offset, left_time, right_stream, right_offset, right_time, in no order of
        rows; without `value` where `on` is None. More with payloads, as of `related_pairs`; the right status is null
        where there is no match.

    Raises:
        InvalidInput: an argument is wrong; nothing was run.
        StreamNotFound: a stream or super stream of that name was never recorded, or without a key is not there.
        KeyNotDefined: a key of that name is not in force.
        ConfigurationError: a broker, a database or the JDBC driver is missing.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    sides, keys = [side_of("left", left), side_of("right", right)], () if on is None else keys_of(on)
    tolerance_us = None if tolerance is None else span_us("tolerance", tolerance)
    if direction not in get_args(Direction):
        raise InvalidInput(f"direction= takes one of {', '.join(get_args(Direction))}")
    inputs = Inputs.of(database, broker, stream_url, snapshot, partitions, needs_broker=payloads or on is None)
    relations = times_of(spark, inputs, sides) if on is None else inputs.sides(spark, sides, keys)
    joined = nearest_of(
        relations[0], relations[1], key_columns(keys), direction, tolerance_us, allow_exact_matches=allow_exact_matches
    )
    joined, more = inputs.with_payloads(joined, keys, "left", "right", wanted=payloads)
    return presented(joined, on, "left", "right", more=more)


def nearest_of(
    left: DataFrame,
    right: DataFrame,
    keys: Sequence[str],
    direction: Direction,
    tolerance_us: int | None,
    *,
    allow_exact_matches: bool,
) -> DataFrame:
    """Left relations, each with its right one: columns `left_…` and `right_…`, the latter null where there is none.

    Both sides are put into one order and gone through once, each left row taking the last right row that was met: the
    work grows with the rows, never with their products, however many carry one value.
    """
    both = _together(left, right, keys)
    found = {
        step: _last_met(step, keys, allow_exact_matches=allow_exact_matches)
        for step in ("backward", "forward")
        if direction in (step, "nearest")
    }
    both = both.select("*", *(column.alias(step) for step, column in found.items())).where("is_left")
    distances = {step: F.abs(F.col("time_us") - F.col(step)["time_us"]) for step in found}
    match = F.col(next(iter(found)))
    if direction == "nearest":
        # Of two equally near the earlier, as in pandas: an equal time is met by both.
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


def _together(left: DataFrame, right: DataFrame, keys: Sequence[str]) -> DataFrame:
    """The rows of both sides; those of the right one carry themselves as what may be met. One without a time can't."""
    columns = [*keys, *PLACE, "time_us"]
    itself = F.struct(*PLACE, "time_us")
    rows = left.select(*columns, F.lit(True).alias("is_left"))
    timed = right.where(F.col("time_us").isNotNull())
    return rows.unionByName(timed.select(*columns, F.lit(False).alias("is_left"))).withColumn(
        "candidate", F.when(~F.col("is_left"), itself)
    )


def _last_met(step: str, keys: Sequence[str], *, allow_exact_matches: bool) -> Column:
    """The last right row before each row, going through time forwards or backwards.

    Messages of one time come in the order of partition and offset, as in look-ups by time. Whether a right row of the
    same time is met depends on which side comes first there.
    """
    turn = F.asc if step == "backward" else F.desc
    at_once = F.asc("is_left") if allow_exact_matches else F.desc("is_left")
    order = [turn("time_us"), at_once, turn(F.length("stream")), turn("stream"), turn("offset")]
    so_far = Window.partitionBy(*keys).orderBy(*order).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return F.last("candidate", ignorenulls=True).over(so_far)
