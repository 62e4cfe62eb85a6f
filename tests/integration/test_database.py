"""The one way to run SQL: statements by themselves, transactions, and what is repeated."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime
from threading import Barrier
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa

from relatum.common.waiting import Threads, in_thread
from relatum.errors import DatabaseUnavailable, RowRefused, UsedAfterClose
from relatum.store.database import Database, as_engine, sql
from relatum.store.translation import translated_errors
from tests.support import cancel, until_answered
from tests.support.standstill import end_sessions, locked

ADD = sql("INSERT INTO relatum.keys (name, sources, type) VALUES (:named::text, '{}', 'text') RETURNING key_id, name")
NAMES = sql("SELECT name FROM relatum.keys ORDER BY key_id")
SLOW = sql("SELECT pg_sleep(0.05)")
LIMIT = sql("SELECT current_setting('idle_in_transaction_session_timeout')")
PID = sql("SELECT pg_backend_pid() AS pid")


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = Database(database_url, pool_size=4)
    yield made
    made.close()


def test_a_statement_by_itself_is_kept_or_rolled_back(database: Database) -> None:
    """Its rows are kept, and a refused value is an error at once that leaves its connection in use."""
    ((_, name),) = database.rows(ADD, {"named": "b"})
    assert [row.name for row in database.rows(NAMES, {})] == [name] == ["b"]
    database.rows(ADD, {"named": "a"})
    (before,) = database.rows(PID, {})
    with pytest.raises(RowRefused):
        database.rows(ADD, {"named": "a"})
    assert database.rows(PID, {}) == [before]


def test_no_way_to_a_connection_leaves_a_row_of_a_transaction_that_was_rolled_back(database_url: str) -> None:
    """Though the connection carried a statement out by itself before, which is kept at once."""
    database = Database(database_url, pool_size=1)
    ways: list[Callable[[Callable[[sa.Connection], None]], None]] = [
        database.run,
        lambda work: _within(database.transaction(), work),
        lambda work: _within(database.engine.begin(), work),
        lambda work: _within(opened.begin(), work),
    ]

    def write(connection: sa.Connection) -> None:
        connection.execute(ADD, {"named": "lost"})
        raise KeyError("of the caller")

    with closing(database), as_engine(database) as opened:
        for number, way in enumerate(ways):
            database.rows(ADD, {"named": f"kept {number}"})
            with pytest.raises(KeyError):
                way(write)
        assert [row.name for row in database.rows(NAMES, {})] == [f"kept {number}" for number in range(len(ways))]


LOCK = sql("SELECT FROM relatum.keys FOR UPDATE")


@pytest.mark.parametrize("level", [None, "REPEATABLE READ"])
def test_a_transaction_that_stands_still_lets_go_of_its_locks(database_url: str, level: str | None) -> None:
    """As that of a process that is frozen: others continue, and its writes are gone. The next one works."""
    with closing(Database(database_url, idle_s=0.5)) as frozen, closing(Database(database_url)) as other:
        other.rows(ADD, {"named": "a"})
        engine = frozen.engine.execution_options(isolation_level=level) if level else frozen.engine

        def stand_still() -> None:
            with translated_errors(), engine.begin() as standing:
                standing.execute(ADD, {"named": "b"})
                standing.execute(LOCK)
                with other.transaction() as waiting:
                    waiting.execute(LOCK)
                standing.execute(NAMES)

        with pytest.raises(DatabaseUnavailable):
            stand_still()

        def names_and_limit() -> tuple[list[str], str]:
            with translated_errors(), frozen.transaction() as connection:
                return list(connection.execute(NAMES).scalars()), connection.execute(LIMIT).scalar_one()

        assert until_answered(names_and_limit) == (["a"], "500ms")
        with other.transaction() as connection:
            assert connection.scalar(LIMIT) == "0", "it is told of none"


def test_the_longest_limit_of_an_idle_transaction_is_postgresqls(database_url: str) -> None:
    """A lease of months limits idle transactions to as long as PostgreSQL can count, 24 days."""
    with closing(Database(database_url, idle_s=1e7)) as database, database.transaction() as connection:
        setting = "SELECT setting FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'"
        assert connection.scalar(sql(setting)) == "2147483647"


def _within(transaction: AbstractContextManager[sa.Connection], work: Callable[[sa.Connection], None]) -> None:
    with transaction as connection:
        work(connection)


def test_what_was_dead_in_the_pool_is_replaced(database: Database, database_url: str) -> None:
    """Of many connections, too, by one more try; but not where the caller finds out what became of it."""
    barrier = Barrier(4)

    def use(_: int) -> None:
        barrier.wait()
        database.rows(SLOW, {})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    with database.transaction() as connection:
        connection.execute(NAMES)
    end_sessions(database_url)
    with pytest.raises(DatabaseUnavailable):
        database.rows(ADD, {"named": "a"}, once=True)
    assert database.rows(ADD, {"named": "b"})
    end_sessions(database_url)
    assert database.run(lambda connection: connection.scalars(NAMES).all()) == ["b"]


def test_a_transaction_that_timed_out_is_not_repeated(database_url: str) -> None:
    """A transaction whose statement gets no answer in time is an error after one time limit, like a statement."""
    tries: list[int] = []

    def work(connection: sa.Connection) -> None:
        tries.append(1)
        connection.execute(NAMES)

    with (
        closing(Database(database_url, statement_s=0.2)) as database,
        locked(database_url, "keys"),
        pytest.raises(DatabaseUnavailable),
    ):
        database.run(work)
    assert len(tries) == 1


def test_a_dead_connection_that_only_transactions_used_is_replaced(database: Database, database_url: str) -> None:
    """A statement over a connection that was dead in the pool is repeated, whatever used the connection before."""
    with database.transaction() as connection:
        connection.execute(NAMES)
    end_sessions(database_url)
    assert database.rows(ADD, {"named": "a"})


def test_a_shared_database_is_as_it_was(database_url: str) -> None:
    """None of its connections is kept, and each is left as ever; a closed one fails with its `refusing` text."""
    shared = Database(database_url)
    engine, database = shared.engine, Database(shared)
    database.rows(ADD, {"named": "a"})
    assert shared.pool.in_use == 0
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        assert not driver.autocommit
        assert type(driver.execute("SELECT 1").fetchone()) is tuple
    database.close()
    with engine.connect() as connection:
        assert connection.scalars(NAMES).all() == ["a"]
    with pytest.raises(UsedAfterClose):
        database.rows(NAMES, {})
    shared.close()
    with closing(Database(database_url, refusing="closed; go home")) as refusing:
        refusing.rows(NAMES, {})
    for use in (lambda: refusing.rows(NAMES, {}), lambda: refusing.run(lambda connection: connection.execute(NAMES))):
        with pytest.raises(UsedAfterClose, match="go home"):
            use()


async def test_a_task_that_waits_for_a_connection_no_more_leaves_it_to_others(database_url: str) -> None:
    """Cancelled while a thread waits for the only one of the pool."""
    database, threads = Database(database_url, connections_max=1), Threads(2, "asking")
    with database.engine.connect():
        task = asyncio.create_task(in_thread(threads, database.rows, NAMES, {}))
        await asyncio.sleep(0.2)  # a thread waits for a connection
        await cancel(task)
    assert await in_thread(threads, database.rows, NAMES, {}) == []
    assert database.pool.in_use == 0
    threads.shutdown()
    database.close()


@pytest.mark.parametrize("style", ["German", "SQL, DMY"])
def test_moments_are_read_whatever_style_the_database_has(database_url: str, style: str) -> None:
    """Times are read correctly in sessions with any `DateStyle`, as `ALTER DATABASE … SET DateStyle` sets it."""
    url = f"{database_url}?options={quote(f'-cDateStyle={style}'.replace(' ', ''))}"
    with as_engine(url) as engine, engine.connect() as connection:
        found = connection.execute(sa.text("SELECT timestamptz '2026-11-23 18:00:00.5+00'")).scalar_one()
    assert found == datetime(2026, 11, 23, 18, 0, 0, 500_000, UTC)
