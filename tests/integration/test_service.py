"""Look-ups in a web service: how many at once, what is refused, whether they are well, and how they are closed."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum.errors import BrokerUnavailable, DatabaseUnavailable, InvalidInput, UsedAfterClose
from relatum_consumer import Health, Relations, Status
from tests.support import in_a_try, publish_plain, record, wait_until
from tests.support.relations import FACES, open_relations

AT_ONCE = 30
LONG_S = 80.0
NOBODY_LISTENS = "amqp://guest:guest@127.0.0.1:129/"
NO_DATABASE = "postgresql://127.0.0.1:9/nobody"


@pytest.fixture
def recorded(amqp_url: str, engine: sa.Engine, stream_name: str) -> str:
    """A stream with one message that is recorded."""
    publish_plain(amqp_url, stream_name, [(b"", {"order_id": "a"})])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    return stream_name


@pytest.fixture
def lock(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A session that has the index locked until it commits: look-ups are under way for as long."""
    with psycopg.connect(database_url) as connection:
        connection.execute("LOCK TABLE relatum.relationships IN ACCESS EXCLUSIVE MODE")
        yield connection


def find(relations: Relations) -> Status:
    """One look-up."""
    return relations.find("order_id", "a").status


def test_no_more_connections_than_allowed_and_each_is_kept(amqp_url: str, database_url: str, recorded: str) -> None:
    """Thirty threads, three sessions: what is opened once is used until the end."""
    opened: list[Any] = []
    with Relations(amqp_url, database_url, max_connections=3) as relations, ThreadPoolExecutor(AT_ONCE) as threads:
        sa.event.listen(relations._database.engine, "connect", lambda *_: opened.append(1))
        together = threading.Barrier(AT_ONCE)

        def ask(_: int) -> list[Status]:
            together.wait(LONG_S)
            return [find(relations) for _ in range(5)]

        answers = list(threads.map(ask, range(AT_ONCE)))
    assert answers == [[Status.FOUND] * 5] * AT_ONCE
    assert len(opened) <= 3


def test_who_waits_for_a_message_takes_nobodys_place(amqp_url: str, database_url: str, recorded: str) -> None:
    """A wait asks now and then, and holds no connection."""
    with (
        ThreadPoolExecutor(1) as threads,
        Relations(amqp_url, database_url, max_connections=1) as relations,
    ):
        message = relations.read(recorded, 0)
        wait = threads.submit(relations.wait_related, message, timeout_s=LONG_S)
        wait_until(lambda: relations.statistics().awaiting == 1, what="the wait")
        assert find(relations) is Status.FOUND
        assert not wait.done()
        relations.close()
        with pytest.raises(UsedAfterClose):
            wait.result(LONG_S)


@pytest.mark.parametrize("face", FACES)
def test_health_names_what_does_not_answer(face: str, amqp_url: str, database_url: str, engine: sa.Engine) -> None:
    """Each server by itself, and in time; it raises nothing."""
    with open_relations(face, amqp_url, database_url) as relations:
        assert relations.health(timeout_s=LONG_S) == Health()
        assert relations.health(timeout_s=LONG_S).is_well
    with open_relations(face, NOBODY_LISTENS, database_url) as relations:
        health = relations.health(timeout_s=LONG_S)
        assert health.database == ""
        assert health.broker.startswith("BrokerUnavailable")
        assert not health.is_well
    with open_relations(face, amqp_url, NO_DATABASE) as relations:
        health = relations.health(timeout_s=LONG_S)
        assert health.database.startswith("DatabaseUnavailable")
        assert health.broker == ""


@pytest.mark.parametrize("face", FACES)
def test_a_database_that_does_not_answer_takes_half_of_a_health_check(
    face: str, amqp_url: str, database_url: str, recorded: str
) -> None:
    """A locked table: the broker is asked all the same."""
    with open_relations(face, amqp_url, database_url) as relations, psycopg.connect(database_url) as connection:
        connection.execute("LOCK TABLE relatum.keys IN ACCESS EXCLUSIVE MODE")

        def is_told_apart() -> bool:
            health = relations.health(timeout_s=1.0)
            assert health.database != ""
            return health.broker == ""

        in_a_try(is_told_apart, what="the broker's answer")


def test_opening_shows_what_is_wrong_at_once(amqp_url: str, database_url: str, engine: sa.Engine) -> None:
    """Before a service takes its first request."""
    with Relations.open(amqp_url, database_url, max_connections=2, timeout_s=LONG_S) as relations:
        assert relations.statistics().opened == 1
    with pytest.raises(BrokerUnavailable):
        Relations.open(NOBODY_LISTENS, database_url)
    with pytest.raises(DatabaseUnavailable):
        Relations.open(amqp_url, NO_DATABASE)
    with pytest.raises(InvalidInput, match="max_connections"):
        Relations.open(amqp_url, database_url, max_connections=0)
