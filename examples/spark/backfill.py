"""Record, in parallel tasks, the messages of streams that the relationship table lacks.

    spark-submit --master 'local[*,4]' examples/spark/backfill.py orders invoices

The driver reads RELATUM_BROKER_URL and RELATUM_DATABASE_URL. In a notebook, which has a session already, set `streams`
to a list of names and run the rest. Stop it at any time: the next run continues from there.
"""

import sys

from pyspark.sql import SparkSession

import relatum_spark

streams = sys.argv[1:]

spark = SparkSession.builder.appName("relatum back-fill").getOrCreate()

for report in relatum_spark.backfill(spark, streams):
    print(f"{report.stream}: {report.messages} messages read, {report.rows} rows written in {report.seconds:.1f} s")

spark.stop()
