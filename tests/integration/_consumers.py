"""Other clients' consumers, as their users write them: each passes its delivery to a lookup, and prints the answer.

Arguments: URLs of the broker and the database; and for each client of `CONSUMERS` its name and what it consumes, with
commas between. They have a process of their own, since they leave sockets and threads.
"""

import asyncio
import json
import sys
from typing import Any
from urllib.parse import urlsplit

from relatum_consumer import AsyncRelations, Relations


def told(answer: Any, trace: Any) -> dict[str, Any]:
    return {
        "status": str(answer.status),
        "hits": [list(place) for place in answer.ids],
        "keys": [list(hit.keys) for hit in answer.hits],
        "itself": [list(place) for place in answer.self_ids],
        "missing_keys": [list(each) for each in answer.missing_keys],
        "trace": sorted([*place, hops] for place, hops in trace.hops.items()),
    }


def asked(broker: str, database: str, message: Any) -> dict[str, Any]:
    with Relations(broker, database) as relations:
        return told(relations.related(message), relations.trace(message))


async def asked_async(broker: str, database: str, message: Any) -> dict[str, Any]:
    async with AsyncRelations(broker, database) as relations:
        return told(await relations.related(message), await relations.trace(message))


def pika(broker: str, database: str, queue: str, *arguments: str) -> dict[str, Any]:
    import pika

    answers = []

    def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        answers.append(asked(broker, database, (method, properties, body)))

    with pika.BlockingConnection(pika.URLParameters(broker)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        channel.basic_consume(queue, on_message, arguments=dict.fromkeys(arguments, "first"))
        while not answers:
            connection.process_data_events(time_limit=None)
    return dict(answers[0])


def pika_get(broker: str, database: str, queue: str) -> dict[str, Any]:
    import pika

    with pika.BlockingConnection(pika.URLParameters(broker)) as connection:
        return asked(broker, database, connection.channel().basic_get(queue, auto_ack=True))


def aio_pika(broker: str, database: str, queue: str, *arguments: str) -> dict[str, Any]:
    import aio_pika

    async def consume() -> dict[str, Any]:
        async with await aio_pika.connect_robust(broker) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=1)
            first: asyncio.Future[aio_pika.abc.AbstractIncomingMessage] = asyncio.get_running_loop().create_future()

            async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
                # Each message of a chunk has its own task, regardless of the prefetch: the first is started first.
                if not first.done():
                    first.set_result(message)

            await (await channel.get_queue(queue)).consume(on_message, arguments=dict.fromkeys(arguments, "first"))
            return await asked_async(broker, database, await first)

    return asyncio.run(consume())


def faststream(broker: str, database: str, queue: str) -> dict[str, Any]:
    from faststream import FastStream
    from faststream.rabbit import RabbitBroker, RabbitMessage, RabbitQueue

    rabbit, answers = RabbitBroker(broker, logger=None), []
    app = FastStream(rabbit, logger=None)

    @rabbit.subscriber(RabbitQueue(queue, declare=False))
    async def handle(body: Any, message: RabbitMessage) -> None:
        # Several are handled concurrently.
        if message.message_id == "m-0":
            answers.append(await asked_async(broker, database, message))
            app.exit()

    asyncio.run(app.run())
    return dict(answers[0])


def rstream(broker: str, database: str, stream: str, stream_url: str) -> dict[str, Any]:
    from rstream import AMQPMessage, Consumer, ConsumerOffsetSpecification, MessageContext, OffsetType, amqp_decoder

    answers: list[dict[str, Any]] = []

    async def consume() -> None:
        url = urlsplit(stream_url)
        consumer = Consumer(
            url.hostname or "", url.port or 5552, username=url.username or "guest", password=url.password or "guest"
        )

        async def on_message(message: AMQPMessage, context: MessageContext) -> None:
            if not answers:
                answers.append(await asked_async(broker, database, (message, context)))
                consumer.stop()

        await consumer.start()
        await consumer.subscribe(
            stream, on_message, decoder=amqp_decoder, offset_specification=ConsumerOffsetSpecification(OffsetType.FIRST)
        )
        await consumer.run()
        await consumer.close()

    asyncio.run(consume())
    return answers[0]


CONSUMERS = (pika, pika_get, aio_pika, faststream, rstream)

if __name__ == "__main__":
    by_name = {each.__name__: each for each in CONSUMERS}
    clients = [argument.split(",") for argument in sys.argv[3:]]
    print(json.dumps({name: by_name[name](*sys.argv[1:3], *consumed) for name, *consumed in clients}))
