"""The message collector: messages are published singly and consumed in bulks, and publishers get their outcomes.

Set RELATUM_BROKER_URL and RELATUM_DATABASE_URL (`relatum up` prints both), then: python examples/collector.py
"""

import os

import pika
import psycopg
import sqlalchemy as sa

import relatum
from relatum import MessageCollector
from relatum.collecting import Bulk, ExecutorOptions, Failure

BROKER = os.environ["RELATUM_BROKER_URL"]
DATABASE = os.environ["RELATUM_DATABASE_URL"]
STREAM = "example-bookings"
TABLE = "CREATE TABLE IF NOT EXISTS example_booked (message_id text PRIMARY KEY, kind text, amount integer)"
BOOK = sa.text("INSERT INTO example_booked VALUES (:message_id, :kind, :amount)")


def book(bulk: Bulk) -> list[Failure | None]:
    """Write a bulk of one type in the transaction that also stores its results; return the failures."""
    rows: list[dict[str, object]] = []
    results: list[Failure | None] = []
    for each in bulk.messages:
        amount = each.message.body.decode()
        if amount.isdecimal():
            rows.append({"message_id": each.message_id, "kind": bulk.type, "amount": int(amount)})
            results.append(None)
        else:
            results.append(Failure(f"{amount!r} is not an amount", retry=False))
    if rows and bulk.connection is not None:
        bulk.connection.execute(BOOK, rows)
    return results


connection = pika.BlockingConnection(pika.URLParameters(BROKER))
channel = connection.channel()
channel.queue_declare(STREAM, durable=True, arguments={"x-queue-type": "stream"})
with psycopg.connect(DATABASE) as database:
    database.execute(TABLE)

collector = MessageCollector("example-billing", database=DATABASE, broker=BROKER, streams=[STREAM])
collector.register_executor("order", book, ExecutorOptions(bulk_messages=500, max_age_s=0.2, joins_transaction=True))
collector.register_executor("payment", book, ExecutorOptions(bulk_messages=500, max_age_s=0.2, joins_transaction=True))

# The collector may run in another process: the publisher needs only the broker and the database.
relatum.intercept(connection, database=DATABASE, keys=["customer"])
with collector:
    receipts = []
    for type_, body in [("order", b"480"), ("payment", b"480"), ("order", b"a lot"), ("order", b"20")]:
        properties = pika.BasicProperties(type=type_, headers={"customer": "C-1"})
        receipts.append((type_, relatum.publish(channel, "", STREAM, body, properties)))
    for type_, receipt in receipts:
        outcome = receipt.outcome(timeout_s=20, collector="example-billing")
        print(f"{type_}: {outcome.status.value}" + (f", {outcome.reason}" if outcome.reason else ""))
relatum.release(connection).close()

ids = [receipt.message_id for _, receipt in receipts]
with psycopg.connect(DATABASE) as database:
    for kind, total in database.execute(
        "SELECT kind, sum(amount) FROM example_booked WHERE message_id = ANY(%s) GROUP BY kind ORDER BY kind", [ids]
    ):
        print(f"booked, {kind}: {total}")
