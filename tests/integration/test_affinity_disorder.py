"""Affinity sets with publishers, ends, moves and broken connections: what was reported is in the partitions."""

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import relatum
from relatum import Broker, errors
from relatum.contexts._partition_log import Placed
from relatum.reading import StreamReader
from relatum.superstreams import Layout
from tests.support.affinity import Face, Faces
from tests.support.place import Place
from tests.support.routing import confirming
from tests.support.standstill import end_sessions

MESSAGES: Final = 200
"""Messages of each publisher, at least: it continues until sets were moved."""

SHARED: Final = 4
OWN: Final = 3
"""Names of sets that all publish to, and that each publisher has for itself."""

SETTLE_S: Final = 20.0

NOT_SENT: Final = (errors.ContextMoving, errors.DatabaseUnavailable)


@dataclass
class Publisher:
    """Chooses what one publisher sends, and keeps the sets of its messages, those refused, and which sets it ended."""

    who: str
    chance: random.Random
    told: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    ended: dict[str, bool] = field(default_factory=dict)

    def next(self, number: int) -> tuple[str, str, dict[str, Any]]:
        """A message's id, the name of its set, and its headers."""
        name = f"own {self.who} {self.chance.randrange(OWN)}"
        if self.chance.random() < 0.3:
            name = f"shared {self.chance.randrange(SHARED)}"
        headers: dict[str, Any] = {"affinity_set": name}
        earlier = [each for each, set_name in self.told.items() if set_name.startswith("own")]
        if earlier and self.chance.random() < 0.15:
            predecessor = self.chance.choice(earlier)
            name = self.told[predecessor]
            headers = {"affinity_predecessor": predecessor}
        if self.chance.random() < 0.15:
            headers["affinity_last"] = True
        return f"{self.who}-{number}", name, headers

    def told_of(self, message_id: str, name: str, headers: dict[str, Any]) -> None:
        self.told[message_id] = name
        self.ended[name] = "affinity_last" in headers


def publish(face: Face, publisher: Publisher, may_end: Callable[[], bool]) -> None:
    for number in count():
        if number >= MESSAGES and may_end():
            return
        message_id, name, headers = publisher.next(number)
        try:
            face.publish(message_id.encode(), message_id=message_id, **headers)
        except NOT_SENT:
            publisher.refused.add(message_id)
            continue
        except errors.PublishOutcomeUnknown as error:
            face.settle(error, SETTLE_S)
        publisher.told_of(message_id, name, headers)


def disturb(
    super_stream: str,
    database_url: str,
    amqp_url: str,
    chance: random.Random,
    moved: threading.Event,
    done: threading.Event,
) -> None:
    """Move sets, and end the publishers' connections to PostgreSQL, until they are done."""
    while not done.wait(chance.random() * 0.3):
        if chance.random() < 0.3:
            end_sessions(database_url)
            continue
        with (
            suppress(
                errors.PlacementNotFound, errors.SuperStreamNotFound, errors.MoveConflict, errors.DatabaseUnavailable
            ),
            relatum.AffinitySets(super_stream, database_url, broker=amqp_url) as sets,
        ):
            found = sets.list()
            if found:
                some = chance.sample(found, min(len(found), 5))
                sets.move([each.name for each in some], chance.choice(list(sets.count())))
                moved.set()


OPEN_SETS = "SELECT name FROM relatum.placements WHERE state <> 'released'"

WRONG_COUNTS = """
SELECT stream FROM relatum.super_stream_partitions AS partition WHERE open_sets <> (
  SELECT count(*) FROM relatum.placements
  WHERE partition_id = partition.partition_id AND placements.state <> 'released'
)
"""


def test_sets_hold_together_in_disorder(layout: Layout, place: Place) -> None:
    """Each set stays in one partition and in order, no message is lost or doubled, and partitions count their sets."""
    name, database_url, amqp_url = layout.super_stream, place.database, place.amqp
    publishers = [Publisher(f"p{number}", random.Random(f"1 {number}")) for number in range(5)]
    moved, done = threading.Event(), threading.Event()

    def may_end() -> bool:
        return moved.is_set() or done.is_set()

    with (
        ExitStack() as stack,
        ThreadPoolExecutor(6) as threads,
        Faces("blocking", amqp_url, layout, database_url).opened() as one,
        Faces("asyncio", amqp_url, layout, database_url).opened(trust_clock=False) as other,
    ):
        # Threads share a router; each has its own channel.
        shared = [stack.enter_context(confirming(amqp_url)) for _ in range(3)]
        faces = [one, other, *(Face(one.router, channel) for channel in shared)]
        under_way = [threads.submit(publish, face, each, may_end) for face, each in zip(faces, publishers, strict=True)]
        disturbed = threads.submit(disturb, name, database_url, amqp_url, random.Random(1), moved, done)
        try:
            for each in under_way:
                each.result(90)
        finally:
            done.set()
        disturbed.result(90)
    assert moved.is_set()
    names = {name for (name,) in place.sql(OPEN_SETS)}
    assert place.sql(WRONG_COUNTS) == []
    ended = {each for publisher in publishers for each, is_over in publisher.ended.items() if is_over}
    assert not {each for each in ended & names if each.startswith("own")}
    _check(layout, publishers, place.broker)


def _check(layout: Layout, publishers: list[Publisher], address: Broker) -> None:
    found: dict[str, tuple[str, int, str]] = {}
    partitions: dict[tuple[str, int], set[str]] = defaultdict(set)
    with StreamReader.open(address) as reader:
        for partition in layout:
            for message in reader.iterate(partition.stream):
                placed = Placed.parse(message.headers.get("relatum_placed"))
                if placed is None:
                    continue  # One of a move.
                message_id, set_name = bytes(message.body).decode(), message.headers["affinity_set"]
                assert message_id not in found, "no message is there twice"
                found[message_id] = partition.stream, placed.epoch, set_name
                partitions[set_name, placed.epoch].add(partition.stream)
    assert all(len(streams) == 1 for streams in partitions.values())
    for publisher in publishers:
        assert publisher.refused.isdisjoint(found)
        epochs: dict[str, int] = defaultdict(int)
        for message_id, set_name in publisher.told.items():
            _, epoch, lies_in = found[message_id]
            assert lies_in == set_name
            assert epoch >= epochs[set_name], "a publisher's own messages are never behind later placements"
            epochs[set_name] = epoch
