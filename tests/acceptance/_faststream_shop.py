"""A shop with FastStream and RPC, as its users write it: `SHOP_BROKER` is a URL, `SHOP_EXCHANGE` the exchange's name.

Run as a program it asks for prices and prints what it was told. Chairs have a price; what a sofa costs nobody says.
"""

import asyncio
import json
import os
from contextlib import suppress
from typing import Any

from faststream import FastStream
from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange, RabbitQueue

broker = RabbitBroker(os.environ["SHOP_BROKER"], logger=None)
app = FastStream(broker, logger=None)
shop = RabbitExchange(os.environ["SHOP_EXCHANGE"], type=ExchangeType.TOPIC, durable=True)
prices = RabbitQueue("", routing_key="asked.*", exclusive=True)


@broker.subscriber(prices, shop)
@broker.publisher(exchange=shop, routing_key="answered.price")
async def price(order: dict[str, Any]) -> dict[str, Any]:
    """What a chair costs: the reply of the request, published to the exchange, too."""
    if order["item"] != "chair":
        raise ValueError(order["item"])
    return {"id": order["id"], "cents": 4900}


async def main() -> None:
    """Ask for three prices, of which two come."""
    async with broker:
        await broker.start()
        told = []
        for number, item in enumerate(["chair", "sofa", "chair"]):
            order = {"id": f"o{number}", "item": item}
            patience_s = 1 if item == "sofa" else 120
            with suppress(TimeoutError):
                reply = await broker.request(
                    order,
                    exchange=shop,
                    routing_key="asked.price",
                    correlation_id=f"{item}-{number}",
                    timeout=patience_s,
                )
                told.append({"correlation": reply.correlation_id, **await reply.decode()})
        print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
