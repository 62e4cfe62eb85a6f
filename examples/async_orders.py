"""asyncio: publish with aio-pika, and wait for a message that is related to another.

Set RELATUM_BROKER_URL and RELATUM_DATABASE_URL (`relatum up` prints both), then: python examples/async_orders.py
"""

import asyncio
import os

import aio_pika

import relatum
from relatum_consumer import AsyncRelations

BROKER = os.environ["RELATUM_BROKER_URL"]
DATABASE = os.environ["RELATUM_DATABASE_URL"]
STREAM = {"x-queue-type": "stream"}


async def pay_later(channel: aio_pika.abc.AbstractChannel) -> None:
    """Publish the payment a moment after the order."""
    await asyncio.sleep(0.5)
    payment = aio_pika.Message(b"480 EUR", headers={"order": "A-17"})
    await channel.default_exchange.publish(payment, routing_key="example-payments")


async def main() -> None:
    """Publish an order, and wait for its payment."""
    connection = await aio_pika.connect_robust(BROKER)
    async with connection, AsyncRelations(broker=BROKER, database=DATABASE) as relations:
        relatum.intercept(connection, database=DATABASE, keys=["order"])
        channel = await connection.channel()
        for name in ("example-orders", "example-payments"):
            await channel.declare_queue(name, durable=True, arguments=STREAM)

        message = aio_pika.Message(b"4 chairs", headers={"order": "A-17"})
        receipt = await relatum.publish_async(channel, message, routing_key="example-orders")
        [place] = await receipt.wait(timeout_s=10)
        order = await relations.read(*place)
        print("ordered:", order.body.decode())

        paying = asyncio.create_task(pay_later(channel))
        answer = await relations.wait_related(order, to="example-payments", by="order", timeout_s=20)
        await paying
        print("paid:", answer[0].body.decode() if answer else f"not yet ({answer.status})")
        relatum.release(connection)


asyncio.run(main())
