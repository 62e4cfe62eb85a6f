"""A client of Spark Connect, run by `test_spark_connect`: calls everything once and prints what came out as JSON."""

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import relatum_spark

NAME = "rabbitmq_streams"


def main(remote: str, broker: str, left: str, right: str, target: str) -> None:
    """Call everything; options name the broker, since the server reads them, and its environment is its own."""
    spark = SparkSession.Builder().remote(remote).getOrCreate()
    relatum_spark.register(spark)

    def messages() -> DataFrame:
        return spark.read.format(NAME).options(broker=broker, stream=left).load()

    def batch_write() -> None:
        writer = messages().select("value", "headers").write.format(NAME).mode("append")
        writer.options(broker=broker, stream=target).save()

    def stream_write() -> None:
        rows = spark.readStream.format(NAME).options(broker=broker, stream=left, startingOffsets="earliest").load()
        writer = rows.select("value").writeStream.format(NAME).options(broker=broker, stream=target)
        query = writer.option("checkpointLocation", tempfile.mkdtemp()).trigger(availableNow=True).start()
        query.awaitTermination()

    def resolve() -> int:
        places = spark.range(5).select(F.lit(left).alias("stream"), F.col("id").alias("offset"))
        return relatum_spark.resolve(places).where("status = 'found'").count()

    def in_snapshot() -> int:
        with relatum_spark.snapshot() as held:
            return relatum_spark.relationships(spark, streams=left, snapshot=held).count()

    def in_catalog() -> Any:
        view = relatum_spark.catalog(spark)
        return spark.sql(f"SELECT count(*) FROM {view}").collect()[0][0]

    def enrichment() -> None:
        joined = relatum_spark.Enrichment(to=right, on="order_id", pending=f"file://{tempfile.mkdtemp()}")
        joined.batch(lambda rows, batch: None)(messages(), 0)

    calls: dict[str, Callable[[], Any]] = {
        "backfill": lambda: [report.rows for report in relatum_spark.backfill(spark, [left, right])],
        "read": lambda: messages().count(),
        "write": batch_write,
        "streaming": stream_write,
        "relationships": lambda: relatum_spark.relationships(spark, streams=left).count(),
        "snapshot": in_snapshot,
        "catalog": in_catalog,
        "resolve": resolve,
        "related_pairs": lambda: relatum_spark.related_pairs(spark, left, right, on="order_id", payloads=True).count(),
        "as_of": lambda: relatum_spark.as_of(spark, left, right, on="order_id", direction="nearest").count(),
        "as_of by time": lambda: relatum_spark.as_of(spark, left, right, on=None).count(),
        "unmatched": lambda: relatum_spark.unmatched(spark, left, right, on="order_id").count(),
        "conversations": lambda: relatum_spark.conversations(spark, "order_id").count(),
        "Enrichment": enrichment,
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:1000]}"
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
