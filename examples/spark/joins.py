"""Join the messages of two recorded streams by a key, and print the first rows of each join.

    spark-submit --master 'local[*,4]' --jars /usr/share/java/postgresql.jar \
        examples/spark/joins.py orders invoices order_id

The driver reads RELATUM_BROKER_URL and RELATUM_DATABASE_URL. The jar is PostgreSQL's JDBC driver. In a notebook, which
has a session already, set the three names and run the rest. Each join is a DataFrame: write it where you like.
"""

import sys

from pyspark.sql import SparkSession

import relatum_spark

left, right, key = sys.argv[1:]

spark = SparkSession.builder.appName("relatum joins").getOrCreate()

# %% Pairs of messages of both streams with an equal value of the key, with their bodies.
pairs = relatum_spark.related_pairs(spark, left, right, on=key, payloads=True)
pairs.orderBy("value").selectExpr("value", "string(left_value)", "string(right_value)").show(truncate=False)

# %% Left messages without a right one: `absent` is proven, `not_recorded_yet` is not.
alone = relatum_spark.unmatched(spark, left, right, on=key)
alone.orderBy("value").select("value", "left_offset", "status").show(truncate=False)

# %% Each left message with the right message nearest in time that has an equal value.
nearest = relatum_spark.as_of(spark, left, right, on=key, direction="nearest")
nearest.orderBy("value").select("value", "left_offset", "right_offset").show(truncate=False)

spark.stop()
