"""Read a stream with Spark, back-fill the index and join orders with their invoices."""

import os
import sys

from pyspark.sql import SparkSession

import relatum_spark

os.environ["PYSPARK_PYTHON"] = sys.executable  # otherwise Spark's tasks run `python3` of the PATH
spark = SparkSession.builder.config("spark.jars", relatum_spark.jdbc_jar()).getOrCreate()
relatum_spark.register(spark)
parcels = spark.read.format("rabbitmq_streams").option("stream", "parcels").load()
parcels.selectExpr("offset", "timestamp", "headers['order_id'] AS order_id", "string(value)").show()
relatum_spark.backfill(spark, ["orders", "invoices", "parcels"])
billed = relatum_spark.related_pairs(spark, "orders", "invoices", on="order_id", payloads=True)
for row in billed.selectExpr("value", "string(left_value)", "string(right_value)").collect():
    print(*row)
spark.stop()
