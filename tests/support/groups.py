"""Messages of groups made by hand, and a naive assembly of everything a stream holds, to compare with."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import sqlalchemy as sa

from relatum.keys import KeyDefinition
from relatum.membership import GROUP_KEY, Membership
from tests.support._streams import broker_connection
from tests.support._waiting import LIMIT_S
from tests.support.place import Place

Plain = tuple[bytes, dict[str, Any]]
At = tuple[str, int]


class GroupPlace(Place):
    """A place whose streams are recorded with the key of groups."""

    def record(self, *streams: str, keys: Iterable[str | KeyDefinition] = (GROUP_KEY,)) -> None:
        """Record all that is in the stream, or in others, now."""
        super().record(*streams, keys=keys)

    def put_recorded(self, *messages: Plain, to: str | None = None) -> None:
        """Publish messages, and have them recorded."""
        self.put(*messages, to=to)
        self.record(to or self.stream)

    def states(self) -> dict[int, str]:
        """The state of each group a consumer has seen, by the group's number."""
        with self.engine.connect() as connection:
            rows = connection.execute(sa.text("SELECT group_id, state FROM relatum.group_states"))
            return {int(id_, 16): state for id_, state in rows}


def group_id(number: int) -> str:
    """A group id that says which one it is."""
    return f"{number:048x}"


def ids(*numbers: int) -> list[str]:
    """The ids of groups."""
    return [group_id(number) for number in numbers]


def ids_of(groups: Iterable[Any]) -> list[str]:
    """The ids of groups, or of what is told of them."""
    return [each.group_id for each in groups]


def of_group(number: int, sequence: int, *, last: bool = False, time_us: int | None = None) -> Plain:
    """A message of a group, as a bare publisher sends it."""
    headers = Membership(group_id(number), sequence, last).headers
    time = {} if time_us is None else {"relatum_time": time_us}
    return b"%d-%d" % (number, sequence), headers | time


def whole_group(number: int, size: int, **options: Any) -> list[Plain]:
    """All messages of a group in order."""
    return [of_group(number, sequence, last=sequence == size, **options) for sequence in range(1, size + 1)]


def shuffled(messages: Iterable[Plain], seed: int) -> list[Plain]:
    """The messages in another order, the same for one seed."""
    mixed = list(messages)
    random.Random(seed).shuffle(mixed)
    return mixed


class Naive:
    """Groups as a naive reader finds them: everything read by bare pika, and sorted by hand.

    Times must grow with the offsets of each stream.

    Args:
        amqp_url: The broker.
        streams: Each stream with how many messages it has.
    """

    def __init__(self, amqp_url: str, streams: Mapping[str, int]) -> None:
        self.groups: dict[str, list[Found]] = defaultdict(list)
        for stream, count in streams.items():
            for offset, headers in _headers_of(amqp_url, stream, count):
                place = headers["relatum_time"], stream, offset
                if "group_id" in headers:
                    found = Found(*place, headers["group_sequence"], headers["group_last"])
                    self.groups[headers["group_id"]].append(found)

    def complete(self, order: str) -> list[list[At]]:
        """Where the messages of each complete group lie, groups and messages in order."""
        whole = []
        for members in self.groups.values():
            first: dict[int, Found] = {}
            for member in sorted(members):
                first.setdefault(member.sequence, member)
            lasts = [number for number, member in first.items() if member.last]
            if lasts and set(first) == set(range(1, lasts[0] + 1)):
                whole.append((first[1] if order == "logical" else min(first.values()), first))
        whole.sort(key=lambda each: each[0])
        by_number = order == "logical"
        return [
            [each.place for each in sorted(first.values(), key=lambda each: each.sequence if by_number else each)]
            for _, first in whole
        ]


class Found(NamedTuple):
    """A message that the naive reader found; they compare by arrival."""

    time_us: int
    stream: str
    offset: int
    sequence: int
    last: bool

    @property
    def place(self) -> At:
        """Where it lies."""
        return self.stream, self.offset


def _headers_of(amqp_url: str, stream: str, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1_000)
        deliveries = channel.consume(stream, arguments={"x-stream-offset": "first"}, inactivity_timeout=LIMIT_S)
        for method, properties, _ in islice(deliveries, count):
            assert method is not None, "the stream has as many messages as were published"
            channel.basic_ack(method.delivery_tag)
            yield properties.headers["x-stream-offset"], properties.headers
