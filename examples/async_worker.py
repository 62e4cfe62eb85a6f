"""asyncio: a worker that consumes a stream with aio-pika and looks up the related message of each message.

The worker acknowledges every message, even if it failed. A stream accepts no rejections: aio-pika's `message.process()`
rejects the message if the block raises, and RabbitMQ before 3.13 then closes the connection (540). On a stream, an
acknowledgement only requests more messages: to continue after a restart, the worker must store its own position.

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
    """Find the order of a payment; wait a moment if it is not recorded yet."""
    answer = await relations.wait_related(payment, to="example-orders", by="order", timeout_s=10)
    if answer:
        euros = int(payment.body.split()[0])
        print(f"{answer[0].body.decode()}: paid {euros}")
    else:
        # Here a worker would store the payment, in its own table or stream, and retry it later.
        print(f"{payment.body.decode()}: {answer.status}: {answer.explanation}")


async def work(channel: aio_pika.abc.AbstractChannel, relations: AsyncRelations) -> None:
    """Handle the payments one by one."""
    await channel.set_qos(prefetch_count=1)
    queue = await channel.get_queue("example-payments")
    done = asyncio.Semaphore(0)

    async def on_delivery(delivery: aio_pika.abc.AbstractIncomingMessage) -> None:
        offset = delivery.headers["x-stream-offset"]
        try:
            payment = Message.from_amqp("example-payments", offset, delivery.properties, delivery.body)
            await handle(payment, relations)
        except Exception as error:  # noqa: BLE001 no error may end the worker
            print(f"offset {offset} failed: {error}")
        finally:
            await delivery.ack()
            done.release()

    tag = await queue.consume(on_delivery, arguments={"x-stream-offset": "first"})
    for _ in PAYMENTS:  # A real worker continues forever.
        await done.acquire()
    await queue.cancel(tag)


async def main() -> None:
    """Publish an order and three payments, two of them wrong, and handle the payments."""
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
