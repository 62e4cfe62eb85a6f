"""Message groups: two publishers publish an invoice in several messages, in any order; a consumer reads it whole.

Set RELATUM_BROKER_URL and RELATUM_DATABASE_URL (`relatum up` prints both), then: python examples/message_groups.py
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pika
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum.membership import Membership
from relatum_consumer import Relations

BROKER = os.environ["RELATUM_BROKER_URL"]
DATABASE = os.environ["RELATUM_DATABASE_URL"]
STREAM = "example-invoices"
LINES = ["Invoice 2026-17", "4 chairs, 480 EUR", "1 table, 350 EUR", "delivery, 40 EUR", "total: 870 EUR"]


@contextmanager
def publisher() -> Iterator[BlockingChannel]:
    """Open a channel on a connection whose groups are checked and recorded."""
    connection = pika.BlockingConnection(pika.URLParameters(BROKER))
    relatum.intercept(connection, database=DATABASE, keys=[relatum.GROUP_KEY])
    yield connection.channel()
    relatum.release(connection).close()


def put(channel: BlockingChannel, group_id: str, number: int) -> None:
    """Publish a line of the invoice; its headers have the group's id and the line's number."""
    membership = Membership(group_id, number, last=number == len(LINES))
    properties = pika.BasicProperties(headers=membership.headers)
    relatum.publish(channel, "", STREAM, LINES[number - 1].encode(), properties).wait(timeout_s=20)


group_id = relatum.new_group_id()  # One publisher creates the id, and passes it to the other.
with publisher() as first, publisher() as second, Relations(broker=BROKER, database=DATABASE) as relations:
    first.queue_declare(STREAM, durable=True, arguments={"x-queue-type": "stream"})
    put(second, group_id, 5)
    put(first, group_id, 1)
    put(second, group_id, 4)
    put(first, group_id, 2)
    position = relations.group_position(group_id, streams=STREAM)
    print("missing:", position.missing, "complete:", position.is_complete)
    put(second, group_id, 3)
    for group in relations.groups(STREAM):
        if group.group_id == group_id:
            print("\n".join(message.body.decode() for message in group))

# If the messages are published in order, the group numbers them.
with publisher() as channel, relatum.MessageGroup(channel, "", STREAM) as invoice:
    for number, line in enumerate(["Invoice 2026-18", "1 lamp, 60 EUR"], 1):
        invoice.put(line.encode(), last=number == 2)
with Relations(broker=BROKER, database=DATABASE) as relations:
    print(" / ".join(message.body.decode() for message in relations.group(invoice.group_id, streams=STREAM)))
