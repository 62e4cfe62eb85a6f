"""Keys from the body, a composite key, and time: which readings surround an alarm?

Set RELATUM_BROKER_URL and RELATUM_DATABASE_URL (`relatum up` prints both), then: python examples/sensors.py
"""

import json
import os
from datetime import UTC, datetime, timedelta

import pika

import relatum
from relatum import KeyDefinition
from relatum_consumer import Relations

BROKER = os.environ["RELATUM_BROKER_URL"]
DATABASE = os.environ["RELATUM_DATABASE_URL"]
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)

KEYS = [
    # The bodies are JSON, but consumers need not read them to relate messages.
    KeyDefinition("device", source=lambda body: json.loads(body)["device"]),
    KeyDefinition("place", source=("site", "room")),
]


def publish(channel: pika.adapters.blocking_connection.BlockingChannel, stream: str, second: int, value: str) -> None:
    """Publish a device's value at a number of seconds after noon."""
    moment = NOON + timedelta(seconds=second)
    headers = {"site": "Ulm", "room": "3.14", "relatum_time": int(moment.timestamp() * 1_000_000)}
    body = json.dumps({"device": "pump-7", "value": value}).encode()
    relatum.publish(channel, "", stream, body, pika.BasicProperties(headers=headers)).wait(timeout_s=10)


connection = pika.BlockingConnection(pika.URLParameters(BROKER))
relatum.intercept(connection, database=DATABASE, keys=KEYS)
channel = connection.channel()
for name in ("example-readings", "example-alarms"):
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
# Not in the order of their times, as from a device that was offline.
for second, value in [(0, "20 °C"), (30, "25 °C"), (90, "61 °C"), (60, "48 °C")]:
    publish(channel, "example-readings", second, value)
publish(channel, "example-alarms", 70, "too hot")
relatum.release(connection).close()

with Relations(broker=BROKER, database=DATABASE) as relations:
    [alarm] = relations.find("place", ("Ulm", "3.14"), streams="example-alarms")
    for message in relations.window(alarm, "example-readings", before_s=45, after_s=45, by="device"):
        reading = json.loads(message.body)
        print(f"{message.time:%H:%M:%S} {reading['device']}: {reading['value']}")
    before = relations.before(alarm, "example-readings", by="device")
    print("before the alarm:", json.loads(before[0].body)["value"])
