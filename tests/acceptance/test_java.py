"""A publisher in Java on a topic exchange, unchanged, and three commands: related, trace, missing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.acceptance._command import LIMIT_S, Relatum
from tests.support import broker_connection, delete_stream, unique_name, wait_until

PROGRAM = Path(__file__).parents[1] / "support" / "java" / "Publisher.java"
CLIENT = os.environ.get("RELATUM_AMQP_CLIENT_JAR", "/usr/share/java/amqp-client.jar")
JARS = [Path(CLIENT), Path("/usr/share/java/slf4j-api.jar")]

pytestmark = pytest.mark.skipif(
    not (shutil.which("java") and shutil.which("javac") and all(jar.exists() for jar in JARS)),
    reason="there is no JDK or no RabbitMQ client for Java: tools/install java-client installs them",
)


def publish(amqp_url: str, exchange: str, routing_key: str, count: int) -> None:
    """Run the publisher: orders 0 to before `count`."""
    command = ["java", "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, JARS)), str(PROGRAM)]
    command += [amqp_url + "%2f", exchange, routing_key, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_orders_shipments_and_what_is_missing(relatum: Relatum, amqp_url: str) -> None:
    """Five orders, three of them shipped: what belongs to an order, and which two were not."""
    exchange = unique_name("orders")
    ordered, shipped = f"{exchange}.new", f"{exchange}.shipped"
    with broker_connection(amqp_url) as connection:
        connection.channel().exchange_declare(exchange, "topic", durable=True)
    for stream, key in ((ordered, "order.new"), (shipped, "order.shipped")):
        relatum.ok("tap", exchange, "--binding-key", key, "--stream", stream, "--max-length-bytes", "20000000")
    relatum.ok("keys", "add", "order_id", "--type", "integer")
    recorder = relatum.start("record", ordered, shipped)
    try:
        publish(amqp_url, exchange, "order.new", 5)
        publish(amqp_url, exchange, "order.shipped", 3)
        words = ("--of", ordered, "--by", "order_id", "--follows", shipped)
        relatum.ok("expect", "add", "shipped", *words, "--within", "1s", "--grace", "0.5s")

        def is_known() -> bool:
            (report,) = relatum.json("missing", "shipped")
            return bool(report["missing_count"] == 2)

        wait_until(is_known, LIMIT_S, what="what was not shipped")
        (report,) = relatum.json("missing", "shipped")
        assert [each["value"] for each in report["missing"]] == ["3", "4"]
    finally:
        recorder.kill()
        recorder.communicate(timeout=LIMIT_S)
    (shipment,) = relatum.json("related", ordered, "2", "--by", "order_id")["messages"]
    assert (shipment["stream"], shipment["offset"], shipment["body"]) == (shipped, 2, "order 2")
    trace = relatum.json("trace", ordered, "1", "--by", "order_id")
    assert [(each["stream"], each["offset"]) for each in trace["messages"]] == [(ordered, 1), (shipped, 1)]
    relatum.ok("untap", exchange)
    for stream in (ordered, shipped):
        delete_stream(amqp_url, stream)
    with broker_connection(amqp_url) as connection:
        connection.channel().exchange_delete(exchange)
