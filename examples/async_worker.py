"""asyncio: a worker that takes messages from a stream through aio-pika and finds what each belongs to.

It acknowledges every message, also one that it failed on. A stream takes no other answer: `message.process()` of
aio-pika rejects where the block raises, and RabbitMQ before 3.13 closes the connection for that (540). On a stream an
acknowledgement asks for more messages, and nothing else: where to go on after a restart is for the worker to keep.

Set RELATUM_BROKER_URL and RELATUM_DATABASE_URL (`relatum up` prints both), then: python examples/async_worker.py
"""

import asyncio
import os

import aio_pika

import relatum
from relatum.reading import Message
from relatum_consumer import AsyncRelations

BROKER = os.environ["RELATUM_BROKER_URL"]
DATABASE = os.environ["RELATUM_DATABASE_URL"]
STREAM = {"x-queue-type": "stream"}
PAYMENTS = [(b"480 EUR", {"order": "B-1"}), (b"12 EUR", {"oder": "B-2"}), (b"much", {"order": "B-1"})]


async def handle(payment: Message, relations: AsyncRelations) -> None:
    """Find the order of a payment, waiting a moment for one that is not recorded yet."""
    answer = await relations.wait_related(payment, to="example-orders", by="order", timeout_s=10)
    if answer:
        euros = int(payment.body.split()[0])
        print(f"{answer[0].body.decode()}: paid {euros}")
    else:
        # Store it in a table, or in a stream of its own, and retry it later.
        print(f"{payment.body.decode()}: {answer.status}: {answer.explanation}")


async def work(channel: aio_pika.abc.AbstractChannel, relations: AsyncRelations) -> None:
    """Handle the payments, one after the other."""
    await channel.set_qos(prefetch_count=1)
    queue = await channel.get_queue("example-payments")
    done = asyncio.Semaphore(0)

    async def on_delivery(delivery: aio_pika.abc.AbstractIncomingMessage) -> None:
        offset = delivery.headers["x-stream-offset"]
        try:
            payment = Message.from_amqp("example-payments", offset, delivery.properties, delivery.body)
            await handle(payment, relations)
        except Exception as error:  # noqa: BLE001 whatever it is, it must not end the worker
            print(f"offset {offset} failed: {error}")
        finally:
            await delivery.ack()
            done.release()

    tag = await queue.consume(on_delivery, arguments={"x-stream-offset": "first"})
    for _ in PAYMENTS:  # A worker goes on.
        await done.acquire()
    await queue.cancel(tag)


async def main() -> None:
    """Publish an order and three payments, two of them wrong, and handle them."""
    connection = await aio_pika.connect_robust(BROKER)
    async with connection, AsyncRelations(broker=BROKER, database=DATABASE) as relations:
        relatum.intercept(connection, database=DATABASE, keys=["order"])
        channel = await connection.channel()
        for name in ("example-orders", "example-payments"):
            await channel.declare_queue(name, durable=True, arguments=STREAM)
        order = aio_pika.Message(b"4 chairs", headers={"order": "B-1"})
        await channel.default_exchange.publish(order, routing_key="example-orders")
        for body, headers in PAYMENTS:
            await channel.default_exchange.publish(aio_pika.Message(body, headers=headers), "example-payments")
        await work(channel, relations)
        await asyncio.to_thread(relatum.release, connection)


asyncio.run(main())
