"""What is late, missing and not known, of data that nobody has seen, is what pandas makes of the same data.

A world has two streams, or super streams, in two parts: one that is recorded, and one that came behind. Its messages
have keys of each kind, times of each source, in no order and often the same, and some have neither. What is asked of it
is by chance, too. The rules that the oracle goes by are those of docs/expectations.md, and no others.
"""

import json
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pandas as pd
import pika
import pytest

from relatum.keys import KeyDefinition, moment, timestamp_us
from relatum_consumer import Expectation, MissingReport, Relations, Status
from tests.support import new_streams, recording, wait_recorded
from tests.support.place import Place
from tests.support.relations import open_relations
from tests.support.super_streams import super_stream

SECOND: Final = 1_000_000
KEYS: Final = (
    KeyDefinition("order_id"),
    KeyDefinition("card", masked=True),
    KeyDefinition("number", type="integer"),
    KeyDefinition("item", source="body:$.items[*]"),
    KeyDefinition("order_card", source=("order_id", "card")),
)
ALWAYS: Final = -(1 << 62)
FINDINGS: Final = ("late", "missing", "not_known")


@dataclass
class World:
    """Streams, by the name of what they are partitions of, and what was published to them."""

    names: dict[str, list[str]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)

    def frame(self, name: str) -> pd.DataFrame:
        """What is recorded of a stream or super stream: stream, offset, time, and a list of values for each key."""
        within = self.names.get(name, [name])
        rows = [each for each in self.rows if each["stream"] in within and each["offset"] < self.ends[each["stream"]]]
        return pd.DataFrame(rows, columns=["stream", "offset", "time_us", *(key.name for key in KEYS)])

    def reached(self, name: str) -> int | None:
        """The time up to which what came is recorded; None where all is."""
        behind = []
        for stream in self.names.get(name, [name]):
            own = [each for each in self.rows if each["stream"] == stream]
            if len(own) > self.ends[stream]:
                behind.append(max((each["chunk_us"] for each in own[: self.ends[stream]]), default=ALWAYS))
        return min(behind, default=None)


def message(chance: random.Random, now_us: int) -> tuple[dict[str, Any], pika.BasicProperties]:
    """A message of chance: what is to be known of it, and its properties."""
    order, card, number = (f"o{chance.randrange(40)}", f"c{chance.randrange(40)}", chance.randrange(40))
    items = [f"i{chance.randrange(60)}" for _ in range(chance.randrange(4))]
    headers: dict[str, Any] = {"order_id": order, "card": card, "number": chance.choice([number, str(number)])}
    for name in ("order_id", "card", "number"):
        if chance.random() < 0.1:
            headers.pop(name)
        elif chance.random() < 0.05:
            headers[name] = "x" * 3_000 if name != "number" else "none"
    has = {name: name in headers and len(str(headers[name])) < 10 and headers[name] != "none" for name in headers}
    values = {
        "order_id": [order] if has.get("order_id") else [],
        "card": [card] if has.get("card") else [],
        "number": [str(number)] if has.get("number") else [],
        "item": list(dict.fromkeys(items)),
        "order_card": [(order, card)] if has.get("order_id") and has.get("card") else [],
    }
    # Whole seconds, so that many times are equal; an hour ago, now, or in an hour.
    at = now_us - 3_600 * SECOND + chance.randrange(120) * SECOND
    if chance.random() < 0.2:
        at = now_us + chance.choice([chance.randrange(-3 * SECOND, SECOND), 3_600 * SECOND])
    at += chance.choice([0, 0, chance.randrange(SECOND)])
    source = chance.random()
    if source < 0.1:
        return values | {"time_us": None}, pika.BasicProperties(headers=headers)
    if source < 0.2:
        seconds = at // SECOND
        return values | {"time_us": seconds * SECOND}, pika.BasicProperties(headers=headers, timestamp=seconds)
    return values | {"time_us": at}, pika.BasicProperties(headers=headers | {"relatum_time": at})


def body_of(values: dict[str, Any]) -> bytes:
    return json.dumps({"items": values["item"]}).encode()


def publish(place: Place, world: World, chance: random.Random, most: int) -> None:
    """Publish up to so many messages to each stream, and take down what they are."""
    for stream in [each for streams in world.names.values() for each in streams]:
        made = [message(chance, time.time_ns() // 1_000) for _ in range(chance.randrange(most + 1))]
        place.put(*[(body_of(values), properties) for values, properties in made], to=stream)
        at = sum(each["stream"] == stream for each in world.rows)
        world.rows += [
            values | {"stream": stream, "offset": at + place, "chunk_us": None}
            for place, (values, _) in enumerate(made)
        ]


def take_down_chunks(place: Place, world: World) -> None:
    """When the broker wrote each message: the time of those that have none."""
    streams = {each["stream"] for each in world.rows}
    written = {each.id: (each.chunk_ms or 0) * 1_000 for stream in streams for each in place.messages(stream)}
    for row in world.rows:
        row["chunk_us"] = written[row["stream"], row["offset"]]
        row["time_us"] = row["chunk_us"] if row["time_us"] is None else row["time_us"]


@contextmanager
def made_world(place: Place, chance: random.Random) -> Iterator[World]:
    """A world: what was recorded, and perhaps what came behind."""
    with ExitStack() as stack:
        names: dict[str, list[str]] = {}
        for _ in range(2):
            if chance.random() < 0.4:
                layout = stack.enter_context(super_stream(place.broker, 2))
                names[layout.super_stream] = [each.stream for each in layout]
            else:
                [name] = stack.enter_context(new_streams(place.amqp, 1))
                names[name] = [name]
        world = World(names)
        streams = [each for within in names.values() for each in within]
        publish(place, world, chance, chance.choice([5, 150, 150]))
        with recording(place.amqp, place.engine, *names, keys=KEYS):
            for stream in streams:
                world.ends[stream] = wait_recorded(place.amqp, place.engine, stream)
        if chance.random() < 0.5:
            publish(place, world, chance, 3)
        take_down_chunks(place, world)
        yield world


def expected_of(world: World, asked: Expectation, low: int, high: int) -> pd.DataFrame:
    """Each message that is to be followed and its first follower, by a plain join on the value."""
    of = world.frame(asked.of)
    of = of[(of.time_us >= low) & (of.time_us < high)]
    of = of[["stream", "offset", "time_us", asked.by]].explode(asked.by).dropna(subset=asked.by)
    came = world.frame(asked.follows)[["stream", "offset", "time_us", asked.by]].explode(asked.by)
    joined = of.merge(came.dropna(subset=asked.by), on=asked.by, suffixes=("", "_came"))
    is_own = joined.stream == joined.stream_came
    joined = joined[joined.time_us_came >= joined.time_us - asked.grace_us * (~is_own).astype("int64")]
    joined = joined[(joined.stream != joined.stream_came) | (joined.offset != joined.offset_came)]
    columns = ["stream", "offset", asked.by]
    first = joined.groupby(columns, as_index=False).time_us_came.min()
    followed = of.merge(first, on=columns, how="left")
    return followed.assign(due=followed.time_us + asked.within_us, by=followed[asked.by])


def found_of(world: World, asked: Expectation, low: int, high: int, now_us: int) -> dict[str, list[Any]]:
    """What is to be found at a moment: by finding, in order of time, stream and offset."""
    reached = world.reached(asked.follows)
    found: dict[str, list[Any]] = {finding: [] for finding in FINDINGS}
    for each in expected_of(world, asked, low, high).itertuples():
        came = None if pd.isna(each.time_us_came) else int(each.time_us_came)
        if came is not None and came <= each.due:
            continue
        known = each.due + asked.grace_us
        why = "not_due" if known >= now_us else "behind" if reached is not None and known >= reached else None
        finding = "not_known" if why else "missing" if came is None else "late"
        found[finding].append((each.time_us, each.stream, each.offset, each.by, why, came))
    return {finding: sorted(rows, key=lambda row: row[:3]) for finding, rows in found.items()}


def status_of(
    world: World, asked: Expectation, found: dict[str, list[Any]], low: int, high: int, now_us: int
) -> Status:
    if found["late"] or found["missing"]:
        return Status.FOUND
    due = min(high - 1, now_us - asked.within_us - asked.grace_us - 1)
    reached = world.reached(asked.of)
    is_behind = due >= low and reached is not None and due + asked.grace_us >= reached
    is_in_doubt = is_behind or any(why == "behind" for *_, why, _ in found["not_known"])
    return Status.NOT_RECORDED_YET if is_in_doubt else Status.ABSENT


def question(chance: random.Random, world: World) -> tuple[Expectation, int, int]:
    """An expectation and a span, by chance: also a stream by itself, and a partition with all of them."""
    names = [*world.names, *(each for within in world.names.values() for each in within)]
    now_us = time.time_ns() // 1_000
    within_s = chance.choice([0.001, 0.3, 1, 2, 10, 60, 600, 7_200])
    grace_s = chance.choice([0, 0.2, 1, 5])
    asked = Expectation("x", chance.choice(names), chance.choice(KEYS).name, chance.choice(names), within_s, grace_s)
    low = now_us - 3_601 * SECOND + chance.randrange(60) * SECOND
    return asked, low, chance.choice([low + chance.randrange(20) * SECOND, now_us + 7_200 * SECOND])


def told(report: MissingReport, finding: str) -> list[Any]:
    return [
        (timestamp_us(each.time), *each.id, each.why and str(each.why), each.came_at and timestamp_us(each.came_at))
        for each in getattr(report, finding)
    ]


def compare(relations: Relations, world: World, asked: Expectation, low: int, high: int, limit: int) -> bool:
    """Whether it could be compared; not where something fell due just then."""
    before_us = time.time_ns() // 1_000
    since, until = moment(low), moment(high)
    report = relations.missing(asked, since=since, until=until, limit=limit)
    after_us = time.time_ns() // 1_000
    found = found_of(world, asked, low, high, before_us)
    if found != found_of(world, asked, low, high, after_us):
        return False
    assert {each: getattr(report, f"{each}_count") for each in FINDINGS} == {
        each: len(found[each]) for each in FINDINGS
    }
    for finding in FINDINGS:
        expected = [(*row[:3], *row[4:]) for row in found[finding]]
        # A message with several values is reported for each; they have the same place.
        assert sorted(told(report, finding), key=str) == sorted(expected[:limit], key=str) or limit < len(expected)
        assert [each[:3] for each in told(report, finding)] == [row[:3] for row in found[finding][:limit]]
    of = world.frame(asked.of)
    of = of[(of.time_us >= low) & (of.time_us < high)]
    has_value = of[asked.by].map(bool)
    assert (report.checked, report.without_value) == (has_value.sum(), (~has_value).sum())
    statuses = {status_of(world, asked, found, low, high, each) for each in (before_us, after_us)}
    assert report.status in statuses
    # No recorder runs, and no key is new.
    behind = {each for each, end in world.ends.items() if sum(row["stream"] == each for row in world.rows) > end}
    assert set(report.unrecorded_streams) <= behind
    assert report.unrecorded_streams or report.status is not Status.NOT_RECORDED_YET
    return True


@pytest.mark.parametrize("number", range(6))
def test_random_data_is_answered_as_pandas_does(
    place: Place, chance: random.Random, is_long: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece and in many, each message has the answer that follows from the data, and no other."""
    for limit, few in {"BATCH": 32, "PIECE": 20}.items() if number % 3 == 0 else ():
        monkeypatch.setattr(f"relatum_consumer._missing.{limit}", few)
    with open_relations(("blocking", "asyncio")[number % 2], place.amqp, place.database, timeout_s=60) as relations:
        for _ in range(10 if is_long else 1):
            seed = chance.getrandbits(64)
            by_seed, compared = random.Random(seed), 0
            with made_world(place, by_seed) as world:
                for _ in range(25):
                    asked, low, high = question(by_seed, world)
                    limit = by_seed.choice([1, 7, 1_000])
                    try:
                        compared += compare(relations, world, asked, low, high, limit)
                    except AssertionError as error:
                        error.add_note(f"seed {seed}: {asked}, {low}, {high}, {limit}")
                        raise
            assert compared
