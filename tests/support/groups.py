"""Messages of groups made by hand, and a naive assembly of everything a stream holds, to compare with."""

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from relatum.membership import Membership
from tests.support._streams import all_plain

Plain = tuple[bytes, dict[str, Any]]
At = tuple[str, int]


def group_id(number: int) -> str:
    return f"{number:048x}"


def ids(*numbers: int) -> list[str]:
    return [group_id(number) for number in numbers]


def ids_of(groups: Iterable[Any]) -> list[str]:
    return [each.group_id for each in groups]


def of_group(number: int, sequence: int, *, last: bool = False, time_us: int | None = None) -> Plain:
    headers = Membership(group_id(number), sequence, last).headers
    time = {} if time_us is None else {"relatum_time": time_us}
    return b"%d-%d" % (number, sequence), headers | time


def whole_group(number: int, size: int, **options: Any) -> list[Plain]:
    return [of_group(number, sequence, last=sequence == size, **options) for sequence in range(1, size + 1)]


def shuffled(messages: Iterable[Plain], seed: int) -> list[Plain]:
    mixed = list(messages)
    random.Random(seed).shuffle(mixed)
    return mixed


class Naive:
    """Groups as a naive reader finds them, by bare pika. Times must grow with the offsets of each stream."""

    def __init__(self, amqp_url: str, streams: Iterable[str]) -> None:
        self.groups: dict[str, list[Found]] = defaultdict(list)
        for stream in streams:
            for offset, properties, _ in all_plain(amqp_url, stream):
                headers = properties.headers
                place = headers["relatum_time"], stream, offset
                if "group_id" in headers:
                    found = Found(*place, headers["group_sequence"], headers["group_last"])
                    self.groups[headers["group_id"]].append(found)

    def complete(self, order: str) -> list[list[At]]:
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
        return self.stream, self.offset
