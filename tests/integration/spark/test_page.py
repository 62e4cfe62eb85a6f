"""What docs/spark.md shows is run, unchanged."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from relatum.store.catalog import add_keys
from tests.support import (
    JVM_VARIABLES,
    broker_connection,
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    run_python,
    unique_name,
)
from tests.support.pages import blocks_of
from tests.support.spark_python import spark_python

SETTINGS = "--conf spark.ui.enabled=false --conf spark.driver.host=127.0.0.1 --conf spark.driver.memory=512m"

SETTLE = """
def settle():
    for each in spark.streams.active:
        each.processAllAvailable()
        order = spark.createDataFrame([("1 lamp", 4714)], "value string, order_id long")
        order.write.format("rabbitmq_streams").options(stream="orders", keyColumns="order_id").mode("append").save()
        each.processAllAvailable()
        each.stop()
"""
"""Hand one more order to the query that runs, and end it when it has it: so that one at a time needs a processor."""

CHECKED = """
settle()
sales = spark.read.format("rabbitmq_streams").option("superStream", "sales").load()
invoices = spark.read.format("rabbitmq_streams").option("stream", "invoices").load()
for copies in (spark.read.parquet("orders"), sales, invoices):
    assert copies.where("value = X'31206C616D70'").count() == 1
assert (few.count(), lag) == (2, {"orders": 0}), (few.count(), lag)
spark.stop()
"""
"""What holds at the page's end: each query has copied one more order, once, and the key's two orders are found."""


@pytest.fixture
def names(amqp_url: str, engine: sa.Engine) -> Iterator[dict[str, str]]:
    """The streams of the page, each with the name it has here; of them `sales` is the page's to make."""
    names = {name: unique_name(name) for name in ("orders", "invoices", "sales")}
    for name in ("orders", "invoices"):
        declare_stream(amqp_url, names[name])
        publish_plain(amqp_url, names[name], [(b"4 chairs", {"order_id": 4711})])
    add_keys(engine, ["order_id"])
    record(amqp_url, engine, names["orders"])
    yield names
    with broker_connection(amqp_url) as connection:
        connection.channel().exchange_delete(names["sales"])
    for stream in (names["orders"], names["invoices"], *(f"{names['sales']}-{number}" for number in range(3))):
        delete_stream(amqp_url, stream)


@pytest.mark.own_jvms
@pytest.mark.timeout(900)
def test_what_the_page_shows_runs(names: dict[str, str], amqp_url: str, database_url: str, tmp_path: Path) -> None:
    """Its Python, from top to bottom, is a program; what it reads and writes is there."""
    shown = "\n".join(blocks_of("spark.md")).replace("\nquery = ", "\nsettle()\nquery = ")
    program = SETTLE + shown + CHECKED
    for name, own in names.items():
        program = program.replace(f'"{name}"', f'"{own}"')
    environment = os.environ | {
        "RELATUM_BROKER_URL": amqp_url,
        "RELATUM_DATABASE_URL": database_url,
        "PYSPARK_SUBMIT_ARGS": f"{SETTINGS} pyspark-shell",
        "PYSPARK_PYTHON": str(spark_python()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        **JVM_VARIABLES,
    }
    run_python("-c", program, cwd=tmp_path, env=environment, timeout_s=840)
