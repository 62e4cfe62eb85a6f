"""`related` compared with RabbitMQ's Bloom filter of each chunk, read by rstream with one filter value."""

import asyncio
import random
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import rstream

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import median, milliseconds
from benchmarks.lookups import cases, take_turns

GROUP: Final = "bloom"

NEEDS: Final = (3, 13)
HOW_TO: Final = "needs RabbitMQ 3.13+, named by RELATUM_TEST_AMQP_URL and RELATUM_TEST_STREAM_URL"
TRIES: Final = 9
LOOKUPS: Final = 200
LIMIT_S: Final = 120.0


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about the Bloom filter."""
    for messages in sorted({context.messages // 10, context.messages}):
        what = f"`related` against the broker's Bloom filter, {messages:,} messages"
        if context.broker_numbers < NEEDS:
            yield Row(GROUP, what, "", aim="measured", note=f"{HOW_TO}; this is {context.broker_version}")
        else:
            yield _compare(context, what, messages)


def _compare(context: Context, what: str, messages: int) -> Row:
    stream = context.stream(
        f"filtered-{messages}",
        lambda name: asyncio.run(_write(context.stream_url, name, messages)),
        messages,
        is_filtered=True,
    )
    context.say(f"looking up in {messages:,} messages by the Bloom filter")
    wanted = random.Random(2).sample(range(messages), context.rounds(TRIES))
    with cases(context, [messages]) as [case]:
        take_turns([case], LOOKUPS // 2)
        filtered = [asyncio.run(_find(context.stream_url, stream, number)) for number in wanted]
        take_turns([case], LOOKUPS // 2)
        ours = median(case.ours)
    by_filter = median([seconds for seconds, _ in filtered])
    return Row(
        GROUP,
        what,
        milliseconds(ours),
        f"{milliseconds(by_filter)}: rstream with one filter value, up to the message sought",
        by_filter / ours,
        "measured",
        note="The filter has no end: it is timed until the message came, not until there are no more.",
        figures={
            "ours_s": ours,
            "filtered_s": by_filter,
            "all_filtered_s": [seconds for seconds, _ in filtered],
            "messages_received": [count for _, count in filtered],
        },
    )


async def _write(stream_url: str, stream: str, messages: int) -> None:
    """Write orders in batches, with the order id as filter value."""

    async def filter_value(message: Any) -> str:
        return streams.order_id(int(bytes(message)[-streams.BODY_BYTES :]))

    numbers = iter(range(messages))
    options = streams.rstream_options(stream_url)
    async with rstream.Producer(**options, filter_value_extractor=filter_value) as producer:
        while part := list(islice(numbers, streams.BATCH_RECORDS)):
            await producer.send_batch(stream, [streams.encoded(number) for number in part])


async def _find(stream_url: str, stream: str, number: int) -> tuple[float, int]:
    """Return the seconds until the filter delivered an order's message, and the number of messages received."""
    wanted = streams.order_id(number)
    received = 0
    done = asyncio.Event()

    def is_wanted(message: rstream.AMQPMessage) -> bool:
        nonlocal received
        received += 1
        return bool((message.application_properties or {}).get(b"order_id") == wanted.encode())

    def take(message: Any, context: Any) -> None:
        assert context.offset == number
        done.set()

    async with rstream.Consumer(**streams.rstream_options(stream_url)) as consumer:
        start = time.perf_counter()
        await consumer.subscribe(
            stream,
            take,
            decoder=rstream.amqp_decoder,
            offset_specification=rstream.ConsumerOffsetSpecification(rstream.OffsetType.FIRST, None),
            filter_input=rstream.FilterConfiguration([wanted], is_wanted),
        )
        await asyncio.wait_for(done.wait(), LIMIT_S)
        return time.perf_counter() - start, received
