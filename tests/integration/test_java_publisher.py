"""A publisher in Java, with the client of RabbitMQ's own, tapped and unchanged."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from relatum.keys import KeyDefinition
from relatum.superstreams import StreamOptions
from relatum.tapping import tap
from relatum_consumer import Relations
from tests.support import broker_connection, delete_stream, unique_name
from tests.support.place import Place

SMALL = StreamOptions(max_length_bytes=10_000_000)
PROGRAM = Path(__file__).parents[1] / "support" / "java" / "Publisher.java"
CLIENT = os.environ.get("RELATUM_AMQP_CLIENT_JAR", "/usr/share/java/amqp-client.jar")
JARS = [Path(CLIENT), Path("/usr/share/java/slf4j-api.jar")]
ORDERS = 20

pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(
        not (shutil.which("java") and shutil.which("javac") and all(jar.exists() for jar in JARS)),
        reason="there is no JDK or no RabbitMQ client for Java: tools/install java-client installs them",
    ),
]


def test_a_java_publisher_is_found_as_it_is(place: Place) -> None:
    """Its confirms come, its queue has its messages, and each is found by text, number, and what Java makes of both."""
    name = unique_name("java")
    stream = f"{name}.copied"
    keys: list[str | KeyDefinition] = ["customer", "paid"]
    keys += [KeyDefinition("order_id", type="integer"), KeyDefinition("cents", type="integer")]
    with broker_connection(place.amqp) as connection:
        channel = connection.channel()
        channel.queue_declare(name, durable=True)
        channel.exchange_declare(name, "topic", durable=True)
        channel.queue_bind(name, name, "order.#")
        tap(place.amqp, place.database, name, stream=stream, options=SMALL)
        command = ["java", "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, JARS)), str(PROGRAM)]
        command += [place.amqp.rstrip("/") + "/%2f", name, "order.new", str(ORDERS)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr
        assert channel.queue_delete(name).method.message_count == ORDERS
        channel.exchange_delete(name)
    place.record(stream, keys=keys)
    with Relations(place.amqp, place.database) as relations:
        (order,) = relations.find("order_id", 7)
        assert (order.body, order.properties.correlation_id) == (b"order 7", "order-7")
        assert order.headers["rate"] == 0.1
        assert relations.find("cents", 1234567890123 + 7).first == order
        assert len(list(relations.find("customer", "Müller & Söhne"))) == ORDERS
        assert len(list(relations.related(order, by="paid"))) == ORDERS // 2 - 1
        assert [message.id for message in relations.trace(order, by="order_id").messages] == [order.id]
    delete_stream(place.amqp, stream)
