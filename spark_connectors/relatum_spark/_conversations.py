"""Conversations: the messages connected over several keys' equal values, however long the chains between them."""

from collections.abc import Sequence
from typing import Any, Final, Unpack

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from relatum.checks import checked_count
from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX
from relatum_spark._sides import GivenKeys, Inputs, keys_of
from relatum_spark._where import Where, names_of

ROUNDS_MAX: Final = 100
"""Rounds of joining edges. They grow with the logarithm of the longest chain: 1,000 messages take at most 14."""

CHECKPOINT_DIRECTORY: Final = "spark.checkpoint.dir"
"""Spark's setting of where checkpoints that outlive an executor go."""


def conversations(
    spark: SparkSession,
    keys: GivenKeys,
    *,
    streams: str | Sequence[str] | None = None,
    max_value_size: int | None = None,
    members: bool = False,
    **where: Unpack[Where],
) -> DataFrame:
    """Return messages connected with each other over equal values of several keys, step by step, as far as that leads.

    Two messages are connected where they have an equal value of one key; values of different keys are never equal. A
    message that shares none is a conversation of one. This computes at once, in rounds of joins, ten or so; what it
    gives is held in Spark's storage: for a cluster whose executors come and go, set `spark.checkpoint.dir`.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`).
        keys: The keys that connect messages; one or several.
        streams: Streams and super streams; None for all that are recorded.
        max_value_size: A value that more messages than this carry connects none of them: a default such as "none"
            would make everything one conversation. None for no limit.
        members: One row for each message instead of one for each conversation.
        where: The servers, tasks and snapshot: see `Where`. The broker only names the streams' virtual host.

    Returns:
        Columns id, size (messages), streams (array, by name), first and last (times, of those messages that have
        one). The id is the conversation's first message by stream name and offset, as `orders@17`. With `members`:
        id, stream, offset, timestamp, for `resolve` too.

    Raises:
        InvalidInput: an argument is wrong; nothing was run.
        StreamNotFound: a stream or super stream of that name was never recorded.
        KeyNotDefined: a key of that name is not in force.
        ConfigurationError: a database or the JDBC driver is missing.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    names = None if streams is None else names_of("streams", streams)
    if max_value_size is not None:
        checked_count("max_value_size", max_value_size, most=INTEGER_MAX, otherwise=", or None for no limit")
    wanted = keys_of(keys, argument="keys")
    inputs = Inputs.of(needs_broker=False, **where)
    found = _connected(spark, inputs.relations(spark, names, wanted), max_value_size)
    if members:
        return found.withColumnRenamed("time", "timestamp")
    return found.groupBy("id").agg(
        F.count("*").alias("size"),
        F.sort_array(F.collect_set("stream")).alias("streams"),
        F.min("time").alias("first"),
        F.max("time").alias("last"),
    )


def _connected(spark: SparkSession, relations: DataFrame, max_value_size: int | None) -> DataFrame:
    """Return each message of rows of the table once: columns id, stream, offset, time."""
    rows = _truncated(spark, relations.select("key", "value", "stream", F.col("stream_offset").alias("offset"), "time"))
    numbered = _numbered(spark, rows)
    edges = _settled(spark, _edges(numbered, max_value_size))
    messages = numbered.groupBy("node", "stream", "offset").agg(F.max("time").alias("time"))
    roots = edges.select("node", F.col("to").alias("root"))
    labelled = messages.join(roots, "node", "left").withColumn("root", F.coalesce("root", "node"))
    # The root is the smallest number, so the smallest member: streams by name, then offsets.
    names = labelled.where(F.col("node") == F.col("root")).select(
        "root", F.concat_ws("@", "stream", F.col("offset").cast("string")).alias("id")
    )
    return _truncated(spark, labelled.join(names, "root").select("id", "stream", "offset", "time"))


def _numbered(spark: SparkSession, rows: DataFrame) -> DataFrame:
    """Number the messages, in the order of (stream, offset): numbers join several times faster."""
    ends = rows.groupBy("stream").agg(F.min("offset").alias("first"), F.max("offset").alias("last"))
    starts: list[tuple[str, int]] = []
    number = 0
    for stream, first, last in sorted(tuple(row) for row in ends.collect()):
        starts.append((stream, number - first))
        number += last - first + 1
    if number > INTEGER_MAX:
        raise InvalidInput("the offsets of these streams are too far apart to be numbered in 64 bits")
    shifts = spark.createDataFrame(starts, "stream string, shift long")
    joined = rows.join(F.broadcast(shifts), "stream")
    return joined.withColumn("node", F.col("offset") + F.col("shift")).drop("shift")


def _edges(numbered: DataFrame, max_value_size: int | None) -> DataFrame:
    """Return edges from each message to the smallest one that carries the same value: columns node, to."""
    values = numbered.groupBy("key", "value").agg(F.min("node").alias("to"), F.count("*").alias("size"))
    if max_value_size is not None:
        values = values.where(F.col("size") <= max_value_size)
    carried = numbered.select("key", "value", "node")
    return carried.join(values.drop("size"), ["key", "value"]).select("node", "to").where("node > to").distinct()


def _settled(spark: SparkSession, edges: DataFrame) -> DataFrame:
    """Join edges until every message points at the smallest one of all it is connected with.

    Source: Kiveris et al., "Connected Components in MapReduce and Beyond" (2014): alternating large and small stars.
    """
    edges = _truncated(spark, edges)
    before = _signature(edges)
    for _ in range(ROUNDS_MAX):
        edges = _truncated(spark, _small_star(_large_star(edges)))
        after = _signature(edges)
        if after == before:
            return edges
        before = after
    raise InvalidInput(f"the conversations did not settle in {ROUNDS_MAX} rounds: give a max_value_size")


def _large_star(edges: DataFrame) -> DataFrame:
    """Point every larger neighbour of a message at the smallest message among its neighbours and itself."""
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
    """Return a digest that is equal for equal sets of edges, and hardly ever for others."""
    hashed = F.xxhash64("node", "to")
    row = edges.agg(F.count("*"), F.expr("bit_xor(xxhash64(node, to))"), F.sum(hashed.cast("decimal(38,0)"))).head()
    assert row is not None, "an aggregate without groups has one row"
    return tuple(row)


def _truncated(spark: SparkSession, frame: DataFrame) -> DataFrame:
    """Compute a frame and forget the plan it came from: the plans of rounds would double with each.

    With a checkpoint directory it survives the loss of an executor; without one only the executors hold it.
    """
    if spark.conf.get(CHECKPOINT_DIRECTORY, None):
        return frame.checkpoint()
    return frame.localCheckpoint()
