"""Serialization contexts that move under load: their pause, and that of other contexts."""

import asyncio
import multiprocessing
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any, Final, NamedTuple, Self

import aio_pika

from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import median, milliseconds, percentile
from relatum import AsyncContextRouter, Broker, SerialConsumer
from relatum.contexts import SerializationContexts, verify
from relatum.superstreams import declare_super_stream, delete_super_stream

GROUP: Final = "moving"

RATE: Final = 1_000
"""Messages a second in the super stream."""

PARTITIONS: Final = 4
PUBLISHERS: Final = 2
FEW_CONTEXTS: Final = 50
"""Contexts that move one by one; each has 20 messages a second."""

MANY_CONTEXTS: Final = 1_000
"""Contexts that are moved together by `consolidate`."""

MOVES: Final = 30
QUIET_S: Final = 5.0
"""Seconds before the first move, to measure latency without moves."""

BETWEEN_S: Final = 0.1
"""Seconds between two moves."""

WARM_UP_S: Final = 3.0
LIMIT_S: Final = 120.0
PAUSE_AIM_S: Final = 0.5
OTHERS_AIM: Final = 1.5
"""Maximum ratio of other contexts' p99 latency during a move to that without moves."""


class Sample(NamedTuple):
    """A message's context, and the times when it was due to be published and when it was consumed."""

    context: str
    due: float
    consumed: float

    @property
    def latency_s(self) -> float:
        """Seconds from the due time until the message was consumed."""
        return self.consumed - self.due


@dataclass(frozen=True, slots=True)
class Window:
    """A move as seen by its caller, on the clock of the samples."""

    context: str
    began: float
    ended: float
    pause_s: float
    """Seconds between the two commits, in which nothing could be published to the context."""


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about moving contexts."""
    context.say(f"moving single contexts under {RATE:,} messages/s")
    yield from _single(context)
    context.say(f"consolidating {MANY_CONTEXTS:,} contexts under {RATE:,} messages/s")
    yield _consolidated(context)


# --- single contexts ------------------------------------------------------------------------------------------------


def _single(context: Context) -> Iterator[Row]:
    windows: list[Window] = []
    elsewhere: list[Window] = []
    with _place(context, FEW_CONTEXTS) as place, _place(context, FEW_CONTEXTS) as other, Load(place) as load:
        quiet_from = time.monotonic()
        time.sleep(QUIET_S)
        quiet_to = time.monotonic()
        with place.contexts() as contexts, other.contexts() as others:
            for _ in range(context.rounds(MOVES)):
                windows.append(_move_one(contexts, place))
                time.sleep(BETWEEN_S)
                elsewhere.append(_move_one(others, other))
                time.sleep(BETWEEN_S)
        samples = load.stop()
    pauses = [_felt(window, samples) for window in windows]
    yield Row(
        GROUP,
        f"pause of a context that moves, at {RATE:,} messages/s",
        f"median {milliseconds(median(pauses))}, longest {milliseconds(max(pauses))}",
        aim=f"median ≤ {PAUSE_AIM_S * 1e3:.0f} ms",
        is_met=median(pauses) <= PAUSE_AIM_S,
        note="The longest time from when a message of it was due until it was consumed.",
        figures={
            "pause_median_s": median(pauses),
            "pause_max_s": max(pauses),
            "between_commits_median_s": median([window.pause_s for window in windows]),
            "moves": len(windows),
            "messages": len(samples),
        },
    )
    quiet = [each.latency_s for each in samples if quiet_from <= each.due < quiet_to]
    beside = [each.latency_s for each in samples if _is_beside(each, windows)]
    yield _others("latency of all other contexts meanwhile", beside, quiet, "no move")
    # The control: the same load on the processors, but nothing for which these contexts could wait.
    control = [each.latency_s for each in samples if _is_during(each, elsewhere)]
    yield _others("the same", beside, control, "moves of another super stream")


def _move_one(contexts: SerializationContexts, place: "Place") -> Window:
    chosen = random.choice(place.names)
    source = contexts.assignment_of(chosen).partition
    target = random.choice([stream for stream in place.streams if stream != source])
    began = time.monotonic()
    (move,) = contexts.move(chosen, target)
    return Window(chosen, began, time.monotonic(), move.pause_s or 0.0)


def _felt(window: Window, samples: Sequence[Sample]) -> float:
    """Return the longest latency of the context's messages that were due during its move."""
    return max(
        (
            each.latency_s
            for each in samples
            if each.context == window.context and window.began <= each.due <= window.ended
        ),
        default=window.pause_s,
    )


def _is_beside(sample: Sample, windows: Sequence[Window]) -> bool:
    """Whether a message was due while another context moved, and its own did not."""
    during = [window for window in windows if window.began <= sample.due <= window.ended]
    return bool(during) and all(window.context != sample.context for window in during)


def _is_during(sample: Sample, windows: Sequence[Window]) -> bool:
    """Whether a message was due during one of these moves."""
    return any(window.began <= sample.due <= window.ended for window in windows)


def _others(what: str, beside: Sequence[float], quiet: Sequence[float], quiet_is: str) -> Row:
    """Compare latency during moves with latency without moves, or during unrelated moves."""
    late, late_quiet = percentile(beside, 0.99), percentile(quiet, 0.99)
    return Row(
        GROUP,
        what,
        f"median {milliseconds(median(beside))}, p99 {milliseconds(late)}",
        f"{quiet_is}: median {milliseconds(median(quiet))}, p99 {milliseconds(late_quiet)}",
        ratio=late / late_quiet,
        aim=f"no pause: p99 ≤ {OTHERS_AIM} x",
        is_met=late <= OTHERS_AIM * late_quiet,
        note="From when a message was due until it was consumed.",
        figures={
            "median_s": median(beside),
            "p99_s": late,
            "max_s": max(beside),
            "quiet_median_s": median(quiet),
            "quiet_p99_s": late_quiet,
            "quiet_max_s": max(quiet),
        },
    )


# --- all of them ----------------------------------------------------------------------------------------------------


def _consolidated(context: Context) -> Row:
    with _place(context, MANY_CONTEXTS) as place, Load(place) as load:
        time.sleep(QUIET_S)
        with place.contexts() as contexts:
            *sources, target = place.streams
            began = time.monotonic()
            moves = contexts.consolidate(sources, target)
            took = time.monotonic() - began
            moved = sum(move.contexts for move in moves)
            assert {each.partition for each in contexts.assignments()} == {target}
        samples = load.stop()
    pauses = [move.pause_s or 0.0 for move in moves]
    felt = max((each.latency_s for each in samples if began <= each.due <= began + took), default=max(pauses))
    return Row(
        GROUP,
        f"{MANY_CONTEXTS:,} contexts of {PARTITIONS} partitions onto one, at {RATE:,} messages/s",
        f"{milliseconds(took)}, longest pause {milliseconds(felt)}",
        note=f"{len(moves)} moves side by side; the pause is the longest time until a message was consumed.",
        figures={
            "seconds": took,
            "moved": moved,
            "moves": len(moves),
            "pause_max_s": felt,
            "between_commits_max_s": max(pauses),
            "messages": len(samples),
        },
    )


# --- the load -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A super stream and its database."""

    super_stream: str
    broker: Broker
    database: str
    names: list[str] = field(default_factory=list)

    @property
    def streams(self) -> list[str]:
        """The super stream's partitions."""
        return [f"{self.super_stream}-{place}" for place in range(PARTITIONS)]

    def contexts(self) -> SerializationContexts:
        """Open the super stream's contexts."""
        return SerializationContexts(self.super_stream, self.database, broker=self.broker)


@contextmanager
def _place(context: Context, contexts: int) -> Iterator[Place]:
    """Declare a super stream; `verify` checks it before it is deleted."""
    name, database = f"relatum-bench-moving-{uuid.uuid4().hex[:8]}", context.new_database()
    declare_super_stream(context.broker, name, PARTITIONS)
    try:
        place = Place(name, context.broker, database, [f"plane-{n}" for n in range(contexts)])
        with place.contexts() as made:
            # Place the contexts now, so that the load includes no first messages of contexts.
            for number, stream in enumerate(place.streams):
                made.assign(place.names[number::PARTITIONS], stream)
        yield place
        report = verify(name, broker=place.broker, database=database)
        assert report.ok, report.findings[:5]
    finally:
        context.drop_database(database)
        delete_super_stream(context.broker, name)


class Load:
    """Publishers at a steady rate and a consumer that keeps up, each in a process. A context manager.

    Args:
        place: The super stream and its database.
    """

    def __init__(self, place: Place) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._stop, self._stop_consumer = spawn.Event(), spawn.Event()
        self._receivers: list[Connection] = []
        self._processes: list[Any] = []
        parts = [place.names[number::PUBLISHERS] for number in range(PUBLISHERS)]
        starts: list[tuple[Any, tuple[Any, ...]]] = [(_consume, (place, self._stop_consumer))]
        starts += [(_publish, (place, part, number, self._stop)) for number, part in enumerate(parts)]
        for target, arguments in starts:
            receiver, sender = multiprocessing.Pipe(duplex=False)
            self._receivers.append(receiver)
            self._processes.append(spawn.Process(target=target, args=(*arguments, sender)))

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        for receiver in self._receivers:
            assert receiver.poll(LIMIT_S), "a process of the load did not begin"
            assert receiver.recv() == "begun"
        time.sleep(WARM_UP_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._stop_consumer.set()
        for process in self._processes:
            process.join(10)
            process.kill()

    def stop(self) -> list[Sample]:
        """Stop publishers and consumer, and return the samples."""
        self._stop.set()
        due: dict[str, tuple[str, float]] = {}
        for receiver in self._receivers[1:]:
            assert receiver.poll(LIMIT_S), "a publisher did not end"
            due |= receiver.recv()
        # The consumer ends when no more messages arrive.
        self._stop_consumer.set()
        assert self._receivers[0].poll(LIMIT_S), "the consumer did not end"
        consumed: dict[str, float] = self._receivers[0].recv()
        missing = due.keys() - consumed.keys()
        assert not missing, f"{len(missing)} of {len(due)} messages were not consumed"
        return [Sample(name, at, consumed[number]) for number, (name, at) in due.items()]


def _publish(place: Place, names: Sequence[str], number: int, stop: Event, sender: Connection) -> None:
    """Publish at a steady rate until `stop`, in a process; send back the messages with their due times."""
    sender.send(asyncio.run(_publish_paced(place, names, number, stop, sender)))


async def _publish_paced(
    place: Place, names: Sequence[str], number: int, stop: Event, sender: Connection
) -> dict[str, tuple[str, float]]:
    due: dict[str, tuple[str, float]] = {}
    running: set[asyncio.Task[Any]] = set()
    connection = await aio_pika.connect(place.broker.url)
    async with connection, AsyncContextRouter(place.super_stream, place.database, broker=place.broker) as router:
        channel = await connection.channel()
        sender.send("begun")
        at = time.monotonic()
        while not stop.is_set():
            at += PUBLISHERS / RATE
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            name, body = names[len(due) % len(names)], f"{number}-{len(due)}"
            due[body] = (name, at)
            message = aio_pika.Message(body.encode(), headers={"serialization_context": name})
            # A moving context delays only its own messages.
            task = asyncio.create_task(router.publish(channel, message))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    return due


def _consume(place: Place, stop: Event, sender: Connection) -> None:
    """Consume until `stop` and no more messages arrive, in a process; send back the time of each message."""
    consumed: dict[str, float] = {}
    with SerialConsumer(place.super_stream, "bench", broker=place.broker, database=place.database) as consumer:
        sender.send("begun")
        while True:
            was_told = stop.is_set()
            for batch in consumer.batches(timeout_s=1.0):
                now = time.monotonic()
                for message in batch.messages:
                    consumed[message.body.decode()] = now
                batch.acknowledge()
            if was_told:
                break
    sender.send(consumed)
