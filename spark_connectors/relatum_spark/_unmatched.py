"""Left messages without any right one, and whether that is known for good."""

import time
from collections.abc import Sequence
from datetime import timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from relatum.reading import BrokerAddress
from relatum_consumer import Status
from relatum_spark._evidence import status_of_missing
from relatum_spark._inputs import Inputs
from relatum_spark._pairs import Span, paired, span_of
from relatum_spark._sides import (
    GivenKeys,
    GivenSide,
    Side,
    key_columns,
    keys_of,
    prefixed,
    presented,
    side_of,
    span_us,
)
from relatum_spark._snapshot import Snapshot
from relatum_spark._where import Broker


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
    database: str | None = None,
    broker: str | BrokerAddress | Broker | None = None,
    stream_url: str | None = None,
    partitions: int | None = None,
    snapshot: Snapshot | None = None,
) -> DataFrame:
    """The left messages that have no right message with an equal value of the key: orders without a payment.

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
        database: PostgreSQL's URL; None for RELATUM_DATABASE_URL, or for the snapshot's.
        broker: Which RabbitMQ; None for RELATUM_BROKER_URL. It tells where the right streams end.
        stream_url: Where the stream protocol is, if that cannot be told from the broker's URL.
        partitions: Tasks that read the table at once; None for 8.
        snapshot: The state to read; the action must run inside its block.

    Returns:
        Columns value, left_stream, left_offset, left_time and status, in no order of rows. The status is "absent"
        where every message that the right streams retained when this was called is recorded for the keys (and, with a
        span of time, for times): there is none. Else it is "not_recorded_yet" for all rows, or "unproven" where nobody
        can prove what the streams hold (a leader cannot be reached): there may be one. With payloads also left_value,
        left_headers, left_properties and left_status.

    Raises:
        InvalidInput: an argument is wrong; nothing was run.
        StreamNotFound: a left stream was never recorded; a right one is unknown to the broker too.
        StreamReplaced: a right stream is not the one that was recorded; a recorder puts that right.
        KeyNotDefined: a key of that name is not in force.
        ConfigurationError: a broker, a database or the JDBC driver is missing.
        DatabaseUnavailable, BrokerUnavailable: one does not answer.
    """
    sides, keys, span = [side_of("left", left), side_of("right", right)], keys_of(on), span_of(within, before, after)
    age_us = None if older_than is None else span_us("older_than", older_than)
    inputs = Inputs.of(database, broker, stream_url, snapshot, partitions, needs_broker=True)
    # First the ends of the streams and the coverage, then the rows: what is covered then is among the rows.
    status = _status(inputs, _streams_of(sides[1]), keys, with_time=span is not None)
    lefts, rights = inputs.sides(spark, sides, keys, unrecorded=("right",))
    if age_us is not None:
        lefts = lefts.where(F.col("time_us") <= time.time_ns() // 1000 - age_us)
    alone = without(lefts, rights, key_columns(keys), span)
    alone, more = inputs.with_payloads(alone, keys, "left", wanted=payloads)
    return presented(alone.withColumn("status", F.lit(str(status))), on, "left", more=["status", *more])


def _status(inputs: Inputs, names: list[str], keys: Sequence[str], *, with_time: bool) -> Status:
    """What may be said of a left message without a right one."""
    if not names:
        # A right frame without any place: there is nothing to be found among the places that were given.
        return Status.ABSENT
    assert inputs.broker is not None, "the ends of streams are the broker's to tell"
    with inputs.broker.open() as reader, inputs.connect() as connection:
        return status_of_missing(reader, connection, inputs.vhost, names, keys, with_time=with_time)


def without(left: DataFrame, right: DataFrame, keys: list[str], span: Span | None) -> DataFrame:
    """The left relations, with the prefix `left_`, that have no right one."""
    if span is None:
        return paired(left, right, keys, None, "left_anti")
    # By the value, too: of a message with several, those without a counterpart are left.
    relation = [*keys, "left_stream", "left_offset"]
    matched = paired(left, right, keys, span, "left_semi").select(*relation)
    return prefixed(left, keys, "left").join(matched, relation, "left_anti")


def _streams_of(side: Side) -> list[str]:
    """The streams of a side by name; those of a frame are looked up in it."""
    if side.places is None:
        return list(side.names)
    return [row.stream for row in side.places.where("stream IS NOT NULL").select("stream").distinct().collect()]
