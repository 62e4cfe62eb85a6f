"""Reading message groups from real streams and a real database, through both faces."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa

from relatum import MessageId
from relatum.errors import GroupConflict, IncompleteGroup, InvalidGroup, InvalidInput, KeyNotDefined, StreamNotFound
from relatum.grouping import GROUP_KEY, Anomaly, GroupStatus
from relatum.store import make_engine
from relatum_consumer import AsyncRelations, Relations, Status
from tests.support import declare_stream, delete_stream, publish_plain, recording, unique_name, wait_recorded
from tests.support.groups import Naive, group_id, of_group, shuffled, whole_group
from tests.support.relations import FACES, open_relations

KEYS = [GROUP_KEY]


@pytest.fixture(params=FACES)
def relations(request: pytest.FixtureRequest, amqp_url: str, database_url: str) -> Iterator[Relations]:
    """Look-ups through each face."""
    with open_relations(request.param, amqp_url, database_url) as relations:
        yield relations


@pytest.fixture
def streams(amqp_url: str) -> Iterator[list[str]]:
    """The names of three new streams, ascending."""
    names = sorted(unique_name() for _ in range(3))
    for name in names:
        declare_stream(amqp_url, name)
    yield names
    for name in names:
        delete_stream(amqp_url, name)


Record = Callable[..., None]


@pytest.fixture
def record(amqp_url: str, engine: sa.Engine) -> Record:
    """Records all that is in streams by now."""

    def run(*streams: str) -> None:
        with recording(amqp_url, engine, *streams, keys=KEYS):
            for stream in streams:
                wait_recorded(amqp_url, engine, stream)

    return run


def places(groups: Any) -> list[list[tuple[str, int]]]:
    """Where the messages of groups lie."""
    return [[tuple(message.id) for message in group] for group in groups]


def bodies(groups: Any) -> list[list[bytes]]:
    """The messages' bodies of groups."""
    return [[message.body for message in group] for group in groups]


# --- against a naive assembly of everything ---------------------------------------------------------------


def scattered(seed: int, streams: list[str]) -> dict[str, list[Any]]:
    """Groups whose messages lie anywhere: some incomplete, some with duplicates, between messages in no group."""
    chooser = random.Random(seed)
    messages: list[Any] = []
    for number in range(60):
        group = whole_group(number, chooser.choice([1, 2, 5, 17]))
        if chooser.random() < 0.2:
            del group[chooser.randrange(len(group))]
        if group and chooser.random() < 0.3:
            group.append(chooser.choice(group))
        messages += group
    messages += [(b"alone", {"other": number}) for number in range(30)]
    chooser.shuffle(messages)
    spread: dict[str, list[Any]] = {stream: [] for stream in streams}
    for time_us, (body, headers) in enumerate(messages):
        # Equal times, too: two messages in each microsecond.
        spread[chooser.choice(streams)].append((body, headers | {"relatum_time": 1_000_000 + time_us // 2}))
    return spread


@pytest.mark.parametrize("count", [1, 3])
def test_groups_are_what_a_naive_reader_of_everything_finds(
    amqp_url: str, streams: list[str], record: Record, relations: Relations, count: int
) -> None:
    """Complete groups, each once, in order, members in order, whatever of it is recorded."""
    messages = scattered(count, streams[:count])
    half = {stream: len(each) // 2 for stream, each in messages.items()}
    for stream, each in messages.items():
        publish_plain(amqp_url, stream, each[: half[stream]])
    record(*messages)
    for stream, each in messages.items():
        publish_plain(amqp_url, stream, each[half[stream] :])
    naive = Naive(amqp_url, {stream: len(each) for stream, each in messages.items()})
    for recorded in ("in part", "altogether"):
        for order in ("logical", "physical"):
            assert places(relations.groups(list(messages), order=order)) == naive.complete(order), recorded
            found = relations.groups(list(messages), order=order, ungrouped=True)
            assert places(found) == naive.complete(order, ungrouped=True)
        record(*messages)
