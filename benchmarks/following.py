"""Following streams: the time and connections for many streams, and the rate compared with a reader of one."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Final

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._results import Row, attempted
from benchmarks._timing import in_turns, median
from relatum.following import CaughtUp, Event, Records, StreamFollower
from relatum.reading import StreamReader
from relatum.waiting import ComponentLoop

GROUP: Final = "following"

STREAMS: Final = 2_000
QUICK_STREAMS: Final = 200
MESSAGES_EACH: Final = 5
START_S: Final = 30.0
CONNECTIONS_MAX: Final = 8
LIMIT_S: Final = 300.0
CLOSE_S: Final = 10.0
ROUNDS: Final = 5
AIM: Final = 0.5


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about following streams."""
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
    begun, processor = time.monotonic(), time.process_time()
    connections, threads = _follow(context, names, count * MESSAGES_EACH, caught_up=count)
    seconds, processor_s = time.monotonic() - begun, time.process_time() - processor
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


def _follow(context: Context, names: Sequence[str], messages: int, *, caught_up: int = 0) -> tuple[int, int]:
    """Follow streams until so many messages and ends of streams arrived; return connections and threads."""
    threads, came, streams_done, has_all = threading.active_count(), 0, 0, threading.Event()

    def take(event: Event) -> None:
        nonlocal came, streams_done
        came += len(event.batch) if isinstance(event, Records) else 0
        streams_done += isinstance(event, CaughtUp)
        follower.done(event)
        if came >= messages and streams_done >= caught_up:
            has_all.set()

    loop = ComponentLoop("relatum-bench-follower", logging.getLogger("relatum.bench"))
    follower = StreamFollower(loop, context.broker, take)
    loop.start()
    for name in names:
        loop.call(follower.follow, name, 0)
    assert has_all.wait(LIMIT_S), f"{came} of {messages} messages came in {LIMIT_S:g} s"
    found = follower.statistics().connections, threading.active_count() - threads
    ended = loop.run(follower.close)
    assert ended is not None, "it runs"
    ended.result(CLOSE_S)
    loop.stop(CLOSE_S)
    return found


def _one(context: Context, what: str) -> Iterator[Row]:
    name, messages = context.orders(context.messages), context.messages
    context.say(what)

    def follow() -> None:
        _follow(context, [name], messages)

    def read() -> None:
        with StreamReader.open(context.broker) as reader, closing(reader.batches(name)) as batches:  # type: ignore[type-var]
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
