"""A naive source, written in an afternoon: rstream, its decoder, a tuple for each message."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import rstream
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from benchmarks._streams import rstream_options

Row = tuple[str, int, datetime, bytes, dict[str, str]]

BATCH_MESSAGES = 10_000
"""Messages passed from rstream's event loop to Spark at once."""


class Naive(DataSource):
    """`format("naive")`: options `streamUrl`, `stream`, `messages`, `partitions`."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "naive"

    def schema(self) -> str:
        """Return the columns of Relatum's source, without the properties."""
        return "stream string, offset long, timestamp timestamp, value binary, headers map<string,string>"

    def reader(self, schema: Any) -> "NaiveReader":
        """Return a reader."""
        return NaiveReader(dict(self.options))


class NaiveReader(DataSourceReader):
    """Reads equal shares of a stream of known length."""

    def __init__(self, options: dict[str, str]) -> None:
        self._stream_url = options["streamurl"]
        self._stream = options["stream"]
        self._messages = int(options["messages"])
        self._partitions = int(options["partitions"])

    def partitions(self) -> list[InputPartition]:
        """Return shares of the offsets."""
        edges = [self._messages * number // self._partitions for number in range(self._partitions + 1)]
        return [InputPartition(pair) for pair in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[Row]:
        """Yield the messages of a share."""
        start, stop = partition.value
        loop = asyncio.new_event_loop()
        received: asyncio.Queue[list[Row]] = asyncio.Queue(maxsize=4)
        reading = loop.create_task(self._consume(start, stop, received))
        given = 0
        while given < stop - start:
            rows = loop.run_until_complete(received.get())
            given += len(rows)
            yield from rows
        reading.cancel()
        loop.run_until_complete(asyncio.gather(reading, return_exceptions=True))
        loop.close()

    async def _consume(self, start: int, stop: int, received: "asyncio.Queue[list[Row]]") -> None:
        rows: list[Row] = []

        async def take(message: rstream.AMQPMessage, context: rstream.MessageContext) -> None:
            nonlocal rows
            if not start <= context.offset < stop:
                return
            moment = datetime.fromtimestamp(context.timestamp / 1000, UTC)
            body = message.body
            headers = {_text(name): _text(value) for name, value in (message.application_properties or {}).items()}
            rows.append((self._stream, context.offset, moment, body, headers))
            if len(rows) == BATCH_MESSAGES or context.offset == stop - 1:
                await received.put(rows)
                rows = []

        consumer = rstream.Consumer(**rstream_options(self._stream_url))
        async with consumer:
            await consumer.subscribe(
                self._stream,
                take,
                decoder=rstream.amqp_decoder,
                offset_specification=rstream.ConsumerOffsetSpecification(rstream.OffsetType.OFFSET, start),
            )
            await consumer.run()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
