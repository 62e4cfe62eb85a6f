"""Conversations: messages connected by equal values of several keys, through chains of any length."""

from collections.abc import Sequence
from typing import Any, Final, Unpack

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from relatum.common.checks import checked_count
from relatum.common.limits import INTEGER_MAX
from relatum.errors import InvalidInput
from relatum_spark._servers import names_of
from relatum_spark._sides import GivenKeys, Inputs, Where, keys_of

ROUNDS_MAX: Final = 100
"""Maximum rounds of joining edges. The rounds grow with the logarithm of the longest chain: 14 for 1,000 messages."""


def conversations(
    spark: SparkSession,
    keys: GivenKeys,
    *,
    streams: str | Sequence[str] | None = None,
    max_value_size: int | None = None,
    members: bool = False,
    **where: Unpack[Where],
) -> DataFrame:
    """Return the conversations: messages that are connected, directly or through others, by equal values of keys.

    Two messages are connected if they have an equal value of the same key; values of different keys are never equal. A
    message without connections is its own conversation. The call computes the result immediately, in about ten rounds
    of joins, and keeps it in Spark's storage. If your cluster adds and removes executors, set `spark.checkpoint.dir`.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`).
        keys: The key or keys that connect messages.
        streams: Streams and super streams. None: all recorded streams.
        max_value_size: Ignore values that more messages than this have, such as a default value, which would connect
            everything. None means no limit.
        members: Return one row for each message instead of one for each conversation.
        where: The servers, tasks and snapshot: see `Where`. The broker is used only for its virtual host.

    Returns:
        Columns id, size (messages), streams (array, by name), first and last (times; messages without a time are
        ignored). The id is the conversation's first message by stream name and offset, such as `orders@17`. With
        `members`: id, stream, offset, timestamp, which `resolve` accepts too.

    Raises:
        InvalidInput: an argument is wrong, or the result did not converge in 100 rounds: lower `max_value_size`.
        StreamNotFound: a stream or super stream was never recorded.
        KeyNotDefined: a key is not in force.
        ConfigurationError: a database or the JDBC driver is missing.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    names = None if streams is None else names_of("streams", streams)
    if max_value_size is not None:
        checked_count("max_value_size", max_value_size, most=INTEGER_MAX, otherwise=", or None for no limit")
    wanted = keys_of(keys, argument="keys")
    inputs = Inputs.of(needs_broker=False, **where)
    found = _connected(inputs.relations(spark, names, wanted), max_value_size)
    if members:
        return found.withColumnRenamed("time", "timestamp")
    return found.groupBy("id").agg(
        F.count("*").alias("size"),
        F.sort_array(F.collect_set("stream")).alias("streams"),
        F.min("time").alias("first"),
        F.max("time").alias("last"),
    )


def _connected(relations: DataFrame, max_value_size: int | None) -> DataFrame:
    """Return each message of the relations once: columns id, stream, offset, time."""
    rows = _truncated(relations.select("key", "value", "stream", F.col("stream_offset").alias("offset"), "time"))
    numbered = _numbered(rows)
    edges = _converged(_edges(numbered, max_value_size))
    messages = numbered.groupBy("node", "stream", "offset").agg(F.max("time").alias("time"))
    roots = edges.select("node", F.col("to").alias("root"))
    labelled = messages.join(roots, "node", "left").withColumn("root", F.coalesce("root", "node"))
    # The root is the smallest number, so it is the first member by stream name and offset.
    names = labelled.where(F.col("node") == F.col("root")).select(
        "root", F.concat_ws("@", "stream", F.col("offset").cast("string")).alias("id")
    )
    return _truncated(labelled.join(names, "root").select("id", "stream", "offset", "time"))


def _numbered(rows: DataFrame) -> DataFrame:
    """Number the messages in the order of (stream, offset): joins of numbers are several times faster."""
    ends = rows.groupBy("stream").agg(F.min("offset").alias("first"), F.max("offset").alias("last"))
    starts: list[tuple[str, int]] = []
    number = 0
    for stream, first, last in sorted(tuple(row) for row in ends.collect()):
        starts.append((stream, number - first))
        number += last - first + 1
    if number > INTEGER_MAX:
        raise InvalidInput("the offsets of these streams together exceed 64 bits: name fewer streams in streams=")
    shifts = rows.sparkSession.createDataFrame(starts, "stream string, shift long")
    joined = rows.join(F.broadcast(shifts), "stream")
    return joined.withColumn("node", F.col("offset") + F.col("shift")).drop("shift")


def _edges(numbered: DataFrame, max_value_size: int | None) -> DataFrame:
    """Return edges from each message to the smallest message with the same value: columns node, to."""
    values = numbered.groupBy("key", "value").agg(F.min("node").alias("to"), F.count("*").alias("size"))
    if max_value_size is not None:
        values = values.where(F.col("size") <= max_value_size)
    carried = numbered.select("key", "value", "node")
    return carried.join(values.drop("size"), ["key", "value"]).select("node", "to").where("node > to").distinct()


def _converged(edges: DataFrame) -> DataFrame:
    """Join edges until every message points at the smallest message connected to it.

    Source: Kiveris et al., "Connected Components in MapReduce and Beyond" (2014): alternating large and small stars.
    """
    edges = _truncated(edges)
    before = _signature(edges)
    for _ in range(ROUNDS_MAX):
        edges = _truncated(_small_star(_large_star(edges)))
        after = _signature(edges)
        if after == before:
            return edges
        before = after
    raise InvalidInput(f"the conversations did not converge in {ROUNDS_MAX} rounds: give a lower max_value_size")


def _large_star(edges: DataFrame) -> DataFrame:
    """Point every larger neighbour of a message at the smallest of its neighbours and itself."""
    both = edges.union(edges.select("to", "node")).toDF("at", "neighbour")
    smallest = both.groupBy("at").agg(F.min("neighbour").alias("smallest"))
    larger = both.where("neighbour > at").join(smallest, "at")
    return larger.select(F.col("neighbour").alias("node"), F.least("smallest", "at").alias("to")).distinct()


def _small_star(edges: DataFrame) -> DataFrame:
    """Point every smaller neighbour of a message, and the message itself, at the smallest of them."""
    smallest = edges.groupBy("node").agg(F.min("to").alias("smallest"))
    others = edges.join(smallest, "node").select(F.col("to").alias("node"), F.col("smallest").alias("to"))
    own = smallest.select("node", F.col("smallest").alias("to"))
    return others.where("node > to").union(own).distinct()


def _signature(edges: DataFrame) -> tuple[Any, ...]:
    """Return a digest that is equal for equal sets of edges, and almost certainly differs for others."""
    hashed = F.xxhash64("node", "to")
    row = edges.agg(F.count("*"), F.expr("bit_xor(xxhash64(node, to))"), F.sum(hashed.cast("decimal(38,0)"))).head()
    assert row is not None, "an aggregate without groups has one row"
    return tuple(row)


def _truncated(frame: DataFrame) -> DataFrame:
    """Compute a frame and drop its plan: otherwise the plan would double with each round.

    With a checkpoint directory the result survives the loss of an executor; otherwise only the executors hold it.
    """
    if frame.sparkSession.conf.get("spark.checkpoint.dir", None):
        return frame.checkpoint()
    return frame.localCheckpoint()
