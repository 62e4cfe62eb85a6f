"""`relatum demo --contexts`: each plane's flights stay in order while partitions are added and planes move.

The flights go to a super stream, and a plane's tail number is their serialization context. Publishers publish and
consumers consume all the while; an operator spreads the planes over more partitions, consolidates them onto one, and
spreads them out again.
"""

import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Self

import pika

from relatum import ContextRouter, SerialConsumer
from relatum.contexts import ContextOptions, Move, SerializationContexts, SerialReport, verify
from relatum.reading import Message, StreamReader
from relatum.superstreams import declare_super_stream
from relatum_consumer.demo._data import FLIGHTS, Dataset, Outgoing
from relatum_consumer.demo._publish import Servers

SUPER_STREAM: Final = "flights-by-plane"
HEADER: Final = "tailnum"
"""The header that names contexts: the plane."""

CONSUMER: Final = "tower"
PARTITIONS: Final = 3
ADDED: Final = 2
"""Partitions added while the demo runs."""

PUBLISHERS: Final = 4
MEMBERS: Final = 2
POLL_S: Final = 0.05
CONSUME_S: Final = 120.0
"""Seconds to wait for the consumers at the end."""

Tell = Callable[[str], None]
"""Told what was done, in a sentence."""

Progress = Callable[[int], None]
"""Told how many more flights are published."""


@dataclass
class Tower:
    """What the consumers saw. Threads share it."""

    flights: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The flights of each plane, in the order in which they were consumed."""
    ids: Counter[str] = field(default_factory=Counter)
    """How often each flight was consumed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def see(self, flight: Message, plane: str | None) -> None:
        """Note a flight."""
        message_id = flight.properties.message_id or ""
        with self.lock:
            self.ids[message_id] += 1
            if plane is not None:
                self.flights[plane].append(message_id)


@dataclass(frozen=True, slots=True)
class Difference:
    """A plane whose flights were not consumed as they were published."""

    plane: str
    expected: list[str]
    consumed: list[str]


@dataclass
class Result:
    """What was done, and what came of it."""

    flights: int
    planes: int
    seconds: float
    moves: list[Move]
    planes_in: dict[str, int]
    differences: list[Difference]
    missing: int
    doubled: int
    report: SerialReport

    @property
    def ok(self) -> bool:
        """Whether all was as it must be."""
        return not (self.differences or self.missing or self.doubled) and self.report.ok


def run(servers: Servers, data: Dataset, say: Tell, progress: Progress) -> Result:
    """Publish, move, consume, and compare with the data frame."""
    super_stream = servers.stream(SUPER_STREAM)
    _declare(servers, super_stream)
    began = time.perf_counter()
    tower, publishing = Tower(), Publishing(servers, super_stream, list(data.messages(FLIGHTS)), progress)
    with (
        SerializationContexts(
            super_stream, servers.database, broker=servers.broker, stream_url=servers.stream_url, header=HEADER
        ) as contexts,
        _consuming(servers, super_stream, tower),
    ):
        with publishing:
            moves = _operate(contexts, publishing, say)
        _wait_consumed(tower, len(publishing.messages))
        seconds = time.perf_counter() - began
        planes_in = Counter(each.partition for each in contexts.assignments())
    say(f"The consumers have them all {seconds:.1f} s after the first. Now all partitions are read.")
    report = verify(
        super_stream, broker=servers.broker, database=servers.database, stream_url=servers.stream_url, header=HEADER
    )
    expected = _expected(publishing.messages)
    return Result(
        flights=len(publishing.messages),
        planes=len(expected),
        seconds=seconds,
        moves=moves,
        planes_in=dict(sorted(planes_in.items())),
        differences=[
            Difference(plane, flights, tower.flights[plane])
            for plane, flights in expected.items()
            if tower.flights[plane] != flights
        ],
        missing=sum(message.message_id not in tower.ids for message in publishing.messages),
        doubled=sum(count > 1 for count in tower.ids.values()),
        report=report,
    )


def _declare(servers: Servers, super_stream: str) -> None:
    with StreamReader.open(servers.address) as reader:
        if reader.bound(super_stream):
            raise servers.taken(f"a super stream {super_stream!r}")
    declare_super_stream(servers.broker, super_stream, PARTITIONS)


def _expected(messages: Sequence[Outgoing]) -> dict[str, list[str]]:
    """The flights of each plane in the order in which they were published."""
    expected: defaultdict[str, list[str]] = defaultdict(list)
    for message in messages:
        if HEADER in message.headers:
            expected[message.headers[HEADER]].append(message.message_id)
    return dict(expected)


# --- publishing ----------------------------------------------------------------------------------------------------


class Publishing:
    """Publishes flights from several threads; a plane's all from the same. Leaving waits for the last."""

    def __init__(self, servers: Servers, super_stream: str, messages: list[Outgoing], progress: Progress) -> None:
        self.messages = messages
        self._servers = servers
        self._router = ContextRouter(
            super_stream,
            servers.database,
            ContextOptions(header=HEADER),
            broker=servers.broker,
            stream_url=servers.stream_url,
        )
        self._progress = progress
        self._lock = threading.Lock()
        self._published = 0
        self._threads = ThreadPoolExecutor(PUBLISHERS, thread_name_prefix="publisher")
        self._running: list[Future[None]] = []

    def __enter__(self) -> Self:
        parts: list[list[Outgoing]] = [[] for _ in range(PUBLISHERS)]
        for message in self.messages:
            parts[zlib.crc32(message.headers.get(HEADER, "").encode()) % PUBLISHERS].append(message)
        self._running = [self._threads.submit(self._publish, part) for part in parts]
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        with self._router:
            for each in self._running:
                each.result()

    def wait_for(self, share: float) -> None:
        """Wait until a share of all is published, or a publisher has failed."""
        while self._published < share * len(self.messages) and not any(
            each.done() and each.exception() for each in self._running
        ):
            time.sleep(POLL_S)

    def _publish(self, messages: list[Outgoing]) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(self._servers.broker))
        try:
            channel = connection.channel()
            channel.confirm_delivery()
            for message in messages:
                properties = pika.BasicProperties(message_id=message.message_id, headers=message.headers)
                self._router.publish(channel, message.body, properties)
                with self._lock:
                    self._published += 1
                    self._progress(1)
        finally:
            connection.close()


# --- consuming -----------------------------------------------------------------------------------------------------


@contextmanager
def _consuming(servers: Servers, super_stream: str, tower: Tower) -> Iterator[None]:
    """Consume with several members; leaving ends them."""
    stop = threading.Event()
    with ThreadPoolExecutor(MEMBERS, thread_name_prefix="member") as threads:
        running = [threads.submit(_consume, servers, super_stream, tower, stop) for _ in range(MEMBERS)]
        try:
            yield
        finally:
            stop.set()
    for each in running:
        each.result()


def _consume(servers: Servers, super_stream: str, tower: Tower, stop: threading.Event) -> None:
    with SerialConsumer(
        super_stream, CONSUMER, database=servers.database, broker=servers.broker, stream_url=servers.stream_url
    ) as consumer:
        while not stop.is_set():
            for batch in consumer.batches(timeout_s=POLL_S):
                for message in batch.messages:
                    tower.see(message, batch.context_of(message))
                batch.acknowledge()


def _wait_consumed(tower: Tower, count: int) -> None:
    limit = time.monotonic() + CONSUME_S
    while len(tower.ids) < count and time.monotonic() < limit:
        time.sleep(POLL_S)


# --- moving --------------------------------------------------------------------------------------------------------


def _operate(contexts: SerializationContexts, publishing: Publishing, say: Tell) -> list[Move]:
    """Move planes about while they are published and consumed."""
    publishing.wait_for(0.2)
    added = contexts.add_partitions(ADDED)
    moves = contexts.rebalance()
    say(f"{len(added)} partitions are added, and the planes spread over all: {_words(moves)}.")
    publishing.wait_for(0.5)
    *sources, target = sorted({each.partition for each in contexts.assignments()})
    consolidated = contexts.consolidate(sources, target)
    say(f"All planes are consolidated onto {target}: {_words(consolidated)}.")
    publishing.wait_for(0.8)
    spread = contexts.rebalance()
    say(f"They are spread out again: {_words(spread)}.")
    return [*moves, *consolidated, *spread]


def _words(moves: Sequence[Move]) -> str:
    """What some moves did, and how long their contexts stood still."""
    if not moves:
        return "none had to move"
    pauses = [move.pause_s * 1e3 for move in moves if move.pause_s is not None]
    planes = sum(move.contexts for move in moves)
    return (
        f"{planes:,} planes in {len(moves)} moves; pauses: median {median(pauses):,.0f} ms, "
        f"longest {max(pauses):,.0f} ms"
    )
