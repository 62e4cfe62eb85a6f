"""Affinity sets: two publishers publish the lines of invoices, each invoice into one partition.

Set RELATUM_BROKER_URL and RELATUM_DATABASE_URL (`relatum up` prints both), then: python examples/affinity_sets.py
"""

import os

import pika

import relatum
from relatum.reading import StreamReader
from relatum.superstreams import declare_super_stream

BROKER = os.environ["RELATUM_BROKER_URL"]
DATABASE = os.environ["RELATUM_DATABASE_URL"]
INVOICES = "example-affinity"
LINES = ["4 chairs", "1 table", "total: 830 EUR"]

declare_super_stream(BROKER, INVOICES, 3)

connections = [relatum.intercept(pika.BlockingConnection(pika.URLParameters(BROKER))) for _ in range(2)]
channels = [connection.channel() for connection in connections]
for channel in channels:
    channel.confirm_delivery()

# Each process has its own router; the routers share their placements.
with relatum.AffinityRouter(INVOICES, DATABASE) as router_a, relatum.AffinityRouter(INVOICES, DATABASE) as router_b:
    for number, line in enumerate(LINES):
        router, channel = [(router_a, channels[0]), (router_b, channels[1])][number % 2]
        for invoice in ("invoice 17", "invoice 18"):
            headers = {"affinity_set": invoice, "affinity_last": line == LINES[-1]}
            channel.basic_publish(router, "", line.encode(), pika.BasicProperties(headers=headers))

with StreamReader.open(BROKER) as reader:
    for invoice in ("invoice 17", "invoice 18"):
        found = [
            [each.body.decode() for each in reader.iterate(stream) if each.headers.get("affinity_set") == invoice]
            for stream in reader.partitions(INVOICES)
        ]
        (lines,) = filter(None, found)
        print(f"{invoice} is in one partition: {', '.join(lines)}")

with relatum.AffinitySets(INVOICES, DATABASE) as sets:
    print("open sets:", sum(sets.count().values()))

# Without a database, the caller keeps the placement.
with relatum.SuperStream(INVOICES).affinity() as handle:
    channels[0].basic_publish(handle, "", b"1 lamp")
    restored = relatum.AffinityHandle.from_token(handle.token)
    channels[1].basic_publish(restored, "", b"60 EUR")
    print("the same partition:", handle.partition == restored.partition)

for connection in connections:
    relatum.release(connection).close()
