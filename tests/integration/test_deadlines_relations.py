"""Lookups end in their time, whatever PostgreSQL and the broker do, through both faces."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from relatum.errors import DatabaseUnavailable, Transient
from relatum.membership import GROUP_KEY
from relatum.store.catalog import add_keys
from relatum.store.database import Database
from relatum_consumer import AsyncRelations, Expectation, Status
from tests.support import until_answered
from tests.support.place import FailingPlace, Place
from tests.support.raising import raising
from tests.support.relations import FACES, open_relations
from tests.support.standstill import in_time, locked, nobody_waits, silent_database, somebody_waits

KEYS = ["order_id", GROUP_KEY]

TIMEOUT_S = 0.5

LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "find": lambda relations, _: relations.find("order_id", 1),
    "related": lambda relations, message: relations.related(message),
    "after": lambda relations, message: relations.after(message, message.stream),
    "window": lambda relations, message: relations.window(message, message.stream, after_s=1.0),
    "group": lambda relations, _: relations.group("ab" * 24),
    "trace": lambda relations, message: relations.trace(message, by="order_id"),
    "trace a value": lambda relations, _: relations.trace(("order_id", 1)),
    "around": lambda relations, message: relations.around(message, message.stream, after_s=1.0),
    "values": lambda relations, _: relations.values("order_id"),
    "missing": lambda relations, message: relations.missing(paid(message.stream)),
    "find all": lambda relations, _: relations.find("order_id", 2, complete=True),
    "read": lambda relations, message: relations.read(message.stream, 0),
    "trace all": lambda relations, _: relations.trace(("order_id", 1), complete=True),
    "around all": lambda relations, message: relations.around(message, message.stream, after_s=1.0, complete=True),
}

ASK_THE_BROKER = ("find all", "read")
MAY_ASK_THE_BROKER = ("trace a value", "trace all", "around all", "missing")


def paid(stream: str) -> Expectation:
    return Expectation("paid", stream, "order_id", stream, 60)


@pytest.fixture
def recorded(place: Place) -> Place:
    place.put_recorded((b"order", {"order_id": 1}))
    return place


@pytest.mark.parametrize("face", FACES)
def test_look_ups_end_in_their_time_and_go_on(failing: FailingPlace, face: str) -> None:
    """Lookups over open connections end in time while a table is locked, or PostgreSQL or the broker is frozen."""
    failing.place.record()
    of_database = [look for look in LOOKS if look not in (*ASK_THE_BROKER, "trace all", "around all")]
    with open_relations(face, failing.broker, failing.database, timeout_s=TIMEOUT_S) as relations:

        def answered() -> Any:
            assert until_answered(lambda: relations.find("order_id", 1)).status is Status.FOUND
            return until_answered(lambda: relations.read(failing.place.stream, 0))

        message = answered()
        with failing.fault("locked relationships streams time_blocks coverage"):
            for look in of_database:
                with in_time(TIMEOUT_S), raising(DatabaseUnavailable, reason="timeout"):
                    LOOKS[look](relations, message)
            nobody_waits(failing.place.database)
        answered()
        for fault, error, looks in (
            ("database frozen", DatabaseUnavailable, ("find", "find")),
            ("broker frozen", Transient, ASK_THE_BROKER),
        ):
            with failing.fault(fault):
                for look in looks:
                    with in_time(TIMEOUT_S), pytest.raises(error):
                        LOOKS[look](relations, message)
            answered()
        with failing.fault("broker frozen"):
            for look in MAY_ASK_THE_BROKER:
                with in_time(TIMEOUT_S):
                    told(lambda: LOOKS[look](relations, message))  # noqa: B023


def told(look: Callable[[], Any]) -> None:
    """A lookup that either ends as one to repeat, or claims nothing that it cannot know."""
    try:
        found = look()
    except Transient:
        return
    assert getattr(found, "status", None) not in (Status.ABSENT, Status.FOUND)


@pytest.mark.parametrize("face", FACES)
def test_a_listener_that_never_speaks_ends_each_look_up_in_its_time(face: str, amqp_url: str) -> None:
    """A lookup ends within its own time-out while the database does not answer, and closing waits for nothing."""
    with (
        silent_database() as url,
        in_time(2 * TIMEOUT_S),
        open_relations(face, amqp_url, url, timeout_s=TIMEOUT_S) as relations,
        pytest.raises(DatabaseUnavailable),
    ):
        relations.find("order_id", 1)


def test_look_ups_that_hang_let_others_fail_in_time(recorded: Place) -> None:
    """Lookups end in time also when every connection of the pool waits for a lock."""
    with open_relations(
        "blocking", recorded.amqp, recorded.database, timeout_s=TIMEOUT_S, database_connections_max=1
    ) as relations:
        assert until_answered(lambda: relations.find("order_id", 1)).status is Status.FOUND
        with locked(recorded.database, "relationships"), ThreadPoolExecutor(8) as threads, in_time(2 * TIMEOUT_S):
            errors = [each.exception() for each in [threads.submit(relations.find, "order_id", 1) for _ in range(8)]]
        assert {getattr(error, "reason", error) for error in errors} <= {"timeout", "pool"}
        assert until_answered(lambda: relations.find("order_id", 1)).status is Status.FOUND


async def test_closing_does_not_wait_for_a_lookup(recorded: Place) -> None:
    """`close` ends a lookup that waits for a lock."""
    relations = AsyncRelations(recorded.amqp, recorded.database, database_connections_max=1)
    assert (await relations.find("order_id", 1)).status is Status.FOUND
    with locked(recorded.database, "relationships"):
        call = asyncio.create_task(relations.find("order_id", 1))
        await asyncio.to_thread(somebody_waits, recorded.database)
        with in_time(0.5):
            await relations.close()
        with pytest.raises(DatabaseUnavailable):
            await call


@pytest.mark.parametrize("face", FACES)
def test_a_shared_database_is_left_in_time(face: str, amqp_url: str, database_url: str) -> None:
    """Lookups through a shared database end in time, also when its owner uses all of its connections."""
    with (
        closing(Database(database_url, connections_max=1)) as shared,
        open_relations(face, amqp_url, shared, timeout_s=TIMEOUT_S) as relations,  # type: ignore[arg-type]
    ):
        add_keys(shared.engine, ["order_id"])
        with locked(database_url, "keys"), in_time(TIMEOUT_S), pytest.raises(DatabaseUnavailable):
            relations.find("order_id", 1)
        with shared.engine.connect(), in_time(TIMEOUT_S), raising(DatabaseUnavailable, reason="pool"):
            relations.find("order_id", 1)
