"""Which port readers use that may choose, and what the choice costs the broker."""

import asyncio
from dataclasses import replace
from urllib.parse import urlsplit

from relatum.reading import AsyncStreamReader, BrokerAddress, StreamReader
from tests.support.proxy import Proxy


async def opened_async(address: BrokerAddress) -> str:
    """The transport a reader for asyncio chooses."""
    async with await AsyncStreamReader.open(address) as reader:
        return reader.transport


def test_brokers_are_compared_once(amqp_url: str, stream_url: str) -> None:
    """The AMQP port is asked once whether the stream port is the same broker's, however many readers open."""
    amqp, stream = urlsplit(amqp_url), urlsplit(stream_url)
    with Proxy(amqp.hostname or "", amqp.port or 0) as proxy:
        address = replace(
            BrokerAddress.parse(amqp_url, stream_url),
            host="127.0.0.1",
            amqp_port=proxy.port,
            stream_host=stream.hostname or "",
            stream_port_guessed=True,
        )
        for _ in range(3):
            with StreamReader.open(address) as reader:
                assert reader.transport == "stream"
            assert asyncio.run(opened_async(address)) == "stream"
        assert proxy.opened == 1
