"""Following streams: how many over how few connections, how soon, and how fast beside a reader of one stream."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._results import Row, attempted
from benchmarks._timing import in_turns, median
from relatum.following import CaughtUp, Follower, Records
from relatum.reading import StreamReader

GROUP: Final = "following"

STREAMS: Final = 2_000
QUICK_STREAMS: Final = 200
MESSAGES_EACH: Final = 5
START_S: Final = 30.0
CONNECTIONS_MAX: Final = 8
TAKE_S: Final = 1.0
LIMIT_S: Final = 300.0
ROUNDS: Final = 5
AIM: Final = 0.5


def measure(context: Context) -> Iterator[Row]:
    """The rows about following streams."""
    count = QUICK_STREAMS if context.is_quick else STREAMS
    what = f"{count:,} streams of {MESSAGES_EACH} messages followed from their beginning, until all is taken"
    yield from attempted(GROUP, what, lambda: _many(context, count, what))
    one = f"one stream of {context.messages:,} messages followed"
    yield from attempted(GROUP, one, lambda: _one(context, one))


def _many(context: Context, count: int, what: str) -> Iterator[Row]:
    context.say(f"declaring {count:,} streams")
    names = [context.empty_stream(f"followed-{number}") for number in range(count)]
    with streams.connected(context.broker_url) as connection:
        channel = connection.channel()
        for _ in range(MESSAGES_EACH):
            for name in names:
                channel.basic_publish("", name, streams.body(0))
    context.say(what)
    threads = threading.active_count()
    with Follower(context.address) as follower:
        begun, processor = time.monotonic(), time.process_time()
        for name in names:
            follower.follow(name, 0)
        _take(follower, count * MESSAGES_EACH, caught_up=count)
        seconds, processor_s = time.monotonic() - begun, time.process_time() - processor
        connections = follower.statistics().connections
        threads = threading.active_count() - threads
    figures = {"seconds": seconds, "processor_s": processor_s, "connections": connections, "threads": threads}
    yield Row(
        GROUP,
        what,
        f"{seconds:.1f} s",
        aim=f"≤ {START_S:g} s",
        is_met=seconds <= START_S,
        note=f"{processor_s:.1f} s of this process's time",
        figures=figures,
    )
    yield Row(
        GROUP,
        "the same: connections to the broker, and threads",
        f"{connections}, {threads}",
        f"{count:,}, {count:,}: a reader for each",
        aim=f"≤ {CONNECTIONS_MAX} connections",
        is_met=connections <= CONNECTIONS_MAX,
        figures=figures,
    )


def _take(follower: Follower, messages: int, *, caught_up: int = 0) -> None:
    """Take until so many messages came, and so many streams have no more."""
    taken, streams_done, until = 0, 0, time.monotonic() + LIMIT_S
    while taken < messages or streams_done < caught_up:
        events = follower.take(TAKE_S)
        taken += sum(len(event.batch) for event in events if isinstance(event, Records))
        streams_done += sum(isinstance(event, CaughtUp) for event in events)
        follower.done(*events)
        assert time.monotonic() < until, f"{taken} of {messages} messages came in {LIMIT_S:g} s"


def _one(context: Context, what: str) -> Iterator[Row]:
    name, messages = context.orders(context.messages), context.messages
    context.say(what)

    def follow() -> None:
        with Follower(context.address) as follower:
            follower.follow(name, 0)
            _take(follower, messages)

    def read() -> None:
        with StreamReader.open(context.address) as reader, closing(reader.batches(name)) as batches:  # type: ignore[type-var]
            taken = 0
            while taken < messages:
                taken += len(next(batches) or ())

    ways: dict[str, Callable[[], None]] = {"follower": follow, "reader": read}
    taken = {way: median(values) for way, values in in_turns(ways, context.rounds(ROUNDS)).items()}
    ratio = taken["reader"] / taken["follower"]
    yield Row(
        GROUP,
        what,
        f"{messages / taken['follower']:,.0f} messages/s",
        f"{messages / taken['reader']:,.0f} messages/s: batches of a reader",
        ratio,
        f"≥ {AIM:g} ×",
        ratio >= AIM,
        figures={f"{way}_s": seconds for way, seconds in taken.items()},
    )
