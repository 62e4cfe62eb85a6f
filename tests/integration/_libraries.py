"""Programs of others, as their users write them: `celery`, `answer`, `dramatiq`, `faststream`, then a URL and a name.

Each publishes, prints one document, and ends. They have processes of their own, since they leave sockets and threads.
"""

import asyncio
import json
import sys
from typing import Any


def celery(url: str, exchange: str) -> dict[str, Any]:
    from celery import Celery, chain, chord
    from celery.contrib.testing.worker import start_worker

    app = Celery("tests", broker=url, backend="cache+memory://")
    app.conf.update(
        task_default_queue=exchange,
        task_default_exchange=exchange,
        task_default_exchange_type="topic",
        broker_connection_retry_on_startup=True,
    )

    @app.task
    def add(x: int, y: int) -> int:
        return x + y

    @app.task
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR", shutdown_timeout=120):
        last = chain(add.s(1, 2), add.s(3), add.s(4)).apply_async()
        sums = [last.get(timeout=120), chord([add.s(1, 1), add.s(2, 2)], total.s()).apply_async().get(timeout=120)]
    with app.connection_for_write() as connection:
        connection.default_channel.queue_delete(exchange)
    return {"chain": [last.parent.parent.id, last.parent.id, last.id], "sums": sums}


def answer(url: str, queue: str) -> dict[str, Any]:
    """What the backend `rpc://` answers for a task."""
    from celery import Celery

    class Request:
        id, correlation_id, reply_to = "t-1", "t-1", queue

    app = Celery("tests", broker=url, backend="rpc://")
    app.backend.store_result("t-1", 3, "SUCCESS", request=Request())
    app.close()
    return {}


def dramatiq(url: str, queue: str) -> dict[str, Any]:
    """A message, and a pipeline of two, to a queue."""
    import dramatiq
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    dramatiq.set_broker(RabbitmqBroker(url=url))

    @dramatiq.actor(queue_name=queue)
    def charge(order: str) -> None:
        """Never run here."""

    pipeline = charge.message("o2") | charge.message("o3")
    alone = charge.send("o1")
    pipeline.run()
    return {"alone": alone.message_id, "following": pipeline.messages[1].message_id}


def faststream(url: str, exchange: str) -> dict[str, Any]:
    """A request, whose handler publishes what it gives back."""
    from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange, RabbitQueue

    async def talk() -> dict[str, Any]:
        broker, topic = RabbitBroker(url, logger=None), RabbitExchange(exchange, type=ExchangeType.TOPIC)

        @broker.subscriber(RabbitQueue(exchange, routing_key="orders", auto_delete=True), topic)
        @broker.publisher(exchange=topic, routing_key="payments")
        async def pay(message: dict[str, Any]) -> dict[str, Any]:
            return {"paid": message["id"]}

        async with broker:
            await broker.start()
            reply = await broker.request({"id": "o1"}, exchange=topic, routing_key="orders", timeout=120)
            return {"correlation": reply.correlation_id}

    return asyncio.run(talk())


if __name__ == "__main__":
    print(
        json.dumps({each.__name__: each for each in (celery, answer, dramatiq, faststream)}[sys.argv[1]](*sys.argv[2:]))
    )
