"""Look-ups end in their time, whatever PostgreSQL and the broker do, through both faces."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.errors import DatabaseUnavailable, KeyNotDefined, Transient
from relatum.keys import KeyDefinition
from relatum.store import Database, add_keys
from relatum_consumer import AsyncRelations, Expectation, Relations, Status
from tests.support import publish_plain, record, until_answered, wait_until
from tests.support.proxy import Proxy
from tests.support.relations import FACES, open_relations
from tests.support.standstill import in_time, locked, nobody_waits, silent_database

TIMEOUT_S = 0.5
"""Seconds of the calls here."""


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    """Each face."""
    return str(request.param)


@pytest.fixture
def recorded(amqp_url: str, engine: sa.Engine, stream_name: str) -> str:
    """A stream with a recorded message of the order 1."""
    publish_plain(amqp_url, stream_name, [(b"order", {"order_id": 1})])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    return stream_name


def _find(relations: Relations) -> Status:
    return relations.find("order_id", 1).status


def test_a_locked_table_ends_each_look_up_in_its_time(
    face: str, amqp_url: str, database_url: str, recorded: str
) -> None:
    """Look-ups by key, by time and of groups end as `DatabaseUnavailable`, name the option, and work afterwards."""
    with open_relations(face, amqp_url, database_url, timeout_s=TIMEOUT_S) as relations:
        assert until_answered(lambda: _find(relations)) is Status.FOUND
        message = relations.read(recorded, 0)
        with locked(database_url, "relationships", "streams", "time_blocks", "coverage"):
            for look in (
                lambda: relations.find("order_id", 1),
                lambda: relations.related(message),
                lambda: relations.after(message, recorded),
                lambda: relations.window(message, recorded, after_s=1.0),
                lambda: relations.group("ab" * 24),
                lambda: relations.trace(message, by="order_id"),
                lambda: relations.trace(("order_id", 1)),
                lambda: relations.around(message, recorded, after_s=1.0),
                lambda: relations.values("order_id"),
                lambda: relations.times("order_id", 1),
                lambda: relations.missing(Expectation("paid", recorded, "order_id", recorded, 60)),
            ):
                with in_time(TIMEOUT_S), pytest.raises(DatabaseUnavailable, match=r"in time \(0\.5 s\)") as caught:
                    look()
                assert caught.value.reason == "timeout"
            nobody_waits(database_url)
        assert until_answered(lambda: _find(relations)) is Status.FOUND


def test_a_server_that_stands_still_ends_each_look_up_in_its_time(
    face: str, amqp_url: str, database_url: str, recorded: str
) -> None:
    """Also on connections that are open already, and once it goes on, look-ups do, too."""
    with (
        Proxy.to(database_url) as proxy,
        open_relations(face, amqp_url, proxy.url(database_url), timeout_s=TIMEOUT_S) as relations,
    ):
        assert until_answered(lambda: _find(relations)) is Status.FOUND
        proxy.mode = "frozen"
        for _ in range(2):
            with in_time(TIMEOUT_S), pytest.raises(DatabaseUnavailable):
                _find(relations)
        proxy.mode = "pass"
        assert until_answered(lambda: _find(relations)) is Status.FOUND


def test_a_listener_that_never_speaks_ends_each_look_up_in_its_time(face: str, amqp_url: str) -> None:
    """Nobody waits for libpq's `connect_timeout`, which is longer; closing waits for nothing."""
    with (
        silent_database() as url,
        in_time(2 * TIMEOUT_S),
        open_relations(face, amqp_url, url, timeout_s=TIMEOUT_S) as relations,
        pytest.raises(DatabaseUnavailable),
    ):
        _find(relations)


def test_look_ups_that_hang_let_others_fail_in_time(amqp_url: str, database_url: str, recorded: str) -> None:
    """With every connection of the pool waiting for a lock, further look-ups end in their time as well."""
    with open_relations("blocking", amqp_url, database_url, timeout_s=TIMEOUT_S, pool_size=1) as relations:
        assert until_answered(lambda: _find(relations)) is Status.FOUND
        with locked(database_url, "relationships"), ThreadPoolExecutor(8) as threads, in_time(2 * TIMEOUT_S):
            hanging = [threads.submit(_find, relations) for _ in range(8)]
            errors = [each.exception() for each in hanging]
        assert all(isinstance(error, DatabaseUnavailable) for error in errors)
        assert {error.reason for error in errors if isinstance(error, DatabaseUnavailable)} <= {"timeout", "pool"}
        assert until_answered(lambda: _find(relations)) is Status.FOUND


async def test_a_cancelled_look_up_gives_its_thread_and_connection_back(
    amqp_url: str, database_url: str, recorded: str
) -> None:
    """With the default time-out, a cancelled call leaves no thread, no connection and no statement behind."""
    async with AsyncRelations(amqp_url, database_url, max_connections=1) as relations:
        assert (await relations.find("order_id", 1)).status is Status.FOUND
        with locked(database_url, "relationships"):
            with in_time(0.2), pytest.raises(TimeoutError):
                await asyncio.wait_for(relations.find("order_id", 1), 0.2)
            with in_time(0.5), pytest.raises(KeyNotDefined):
                await relations.find("nobody_defined_it", 1)
            await asyncio.to_thread(nobody_waits, database_url)
        assert (await relations.find("order_id", 1)).status is Status.FOUND


async def test_closing_ends_what_waits_for_the_database(amqp_url: str, database_url: str, recorded: str) -> None:
    """`close` does not wait for look-ups on a locked table, which end as `DatabaseUnavailable`."""
    relations = AsyncRelations(amqp_url, database_url)
    assert (await relations.find("order_id", 1)).status is Status.FOUND
    with locked(database_url, "relationships") as session:
        call = asyncio.create_task(relations.find("order_id", 1))
        await asyncio.to_thread(wait_until, lambda: _is_waited_for(session), what="the look-up waits")
        with in_time(0.5):
            await relations.close()
        with pytest.raises(DatabaseUnavailable):
            await call


def _is_waited_for(session: object) -> bool:
    row = session.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()  # type: ignore[attr-defined]
    return bool(row[0])


def test_a_shared_database_is_left_in_time(face: str, amqp_url: str, database_url: str) -> None:
    """Look-ups through a database of the caller's end in their time, also where he uses all of its connections."""
    shared = Database(database_url, connections_max=1)
    engine = shared.engine
    add_keys(engine, [KeyDefinition("order_id")])
    with open_relations(face, amqp_url, shared, timeout_s=TIMEOUT_S) as relations:  # type: ignore[arg-type]
        with locked(database_url, "keys"), in_time(TIMEOUT_S), pytest.raises(DatabaseUnavailable):
            _find(relations)
        with engine.connect(), in_time(TIMEOUT_S), pytest.raises(DatabaseUnavailable) as caught:
            _find(relations)
        assert caught.value.reason == "pool"
    shared.close()


def told(look: Callable[[], Any]) -> None:
    """A look-up that either ends as one to repeat, or claims nothing that it cannot know."""
    try:
        found = look()
    except Transient:
        return
    status = getattr(found, "status", None)
    assert status not in (Status.ABSENT, Status.FOUND)


def test_a_broker_that_stands_still_has_no_more_than_the_calls_time(
    face: str, stream_url: str, database_url: str, recorded: str
) -> None:
    """Database and broker have one time together: a look-up of many questions to the broker takes it once."""
    with (
        Proxy.to(stream_url) as proxy,
        open_relations(face, proxy.url(stream_url), database_url, timeout_s=TIMEOUT_S) as relations,
    ):
        assert until_answered(lambda: _find(relations)) is Status.FOUND
        message = until_answered(lambda: relations.read(recorded, 0))
        proxy.mode = "frozen"
        with in_time(TIMEOUT_S), pytest.raises(Transient):
            relations.find("order_id", 2, complete=True)
        with in_time(TIMEOUT_S), pytest.raises(Transient):
            relations.read(recorded, 0)
        for look in (
            lambda: relations.trace(("order_id", 1)),
            lambda: relations.trace(("order_id", 1), complete=True),
            lambda: relations.around(message, recorded, after_s=1.0, complete=True),
            lambda: relations.missing(Expectation("paid", recorded, "order_id", recorded, 60)),
        ):
            with in_time(TIMEOUT_S):
                told(look)
        proxy.mode = "pass"
