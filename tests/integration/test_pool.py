"""The one pool of connections: who gets one and when, and how it is returned, closed and replaced."""

import inspect
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum.common.waiting import Deadline, within
from relatum.errors import AccessRefused, DatabaseUnavailable
from relatum.store.connection import TimedConnection
from relatum.store.database import Database, at_one_moment, sql
from tests.support import wait_until
from tests.support.fake_postgresql import answering, refusal
from tests.support.proxy import Proxy
from tests.support.standstill import in_time, locked

ONE = sql("SELECT 1")
SLEEP = sql("SELECT pg_sleep(:s::float8)")
PID = sql("SELECT pg_backend_pid()")


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with closing(Database(database_url, connections_max=2)) as made:
        yield made


def sessions(url: str) -> int:
    query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'relatum'"
    with psycopg.connect(url) as connection:
        return connection.execute(query).rowcount


def test_many_threads_share_few_connections_in_turn(database: Database, database_url: str) -> None:
    """Statements and transactions of many threads share two connections, and none waits long behind later ones."""
    latest, begun = 0.0, time.monotonic()

    def ask(number: int) -> None:
        nonlocal latest
        for _ in range(20):
            began = time.monotonic()
            if number % 2:
                database.rows(SLEEP, {"s": 0.002})
            else:
                database.run(lambda connection: connection.execute(SLEEP, {"s": 0.002}))
            latest = max(latest, time.monotonic() - began)

    with ThreadPoolExecutor(16) as threads:
        running = [threads.submit(ask, number) for number in range(16)]
        wait_until(lambda: database.pool.in_use == 2, what="all connections are in use")
        assert sessions(database_url) <= 2
        for each in running:
            each.result(240)
    # Each thread asks twenty times; on a busy machine all of that takes long, but no single answer takes a third of it.
    assert latest < max(10.0, (time.monotonic() - begun) / 3)
    assert (database.pool.in_use, database.pool.idle) == (0, 2)


def test_a_refused_login_is_one_error_at_once_and_one_login() -> None:
    """A refused login is an error at once, and nobody logs in again without being asked."""
    with (
        answering(refusal("28P01", 'password authentication failed for user "user"')) as url,
        Proxy.to(url) as proxy,
        closing(Database(proxy.url(url), connections_max=1)) as database,
    ):
        for number in (1, 2):
            with in_time(1.0), pytest.raises(AccessRefused, match="authentication failed"):
                database.rows(ONE, {})
            assert (proxy.opened, database.pool.in_use) == (number, 0)


def test_who_waits_is_let_in_where_another_could_not_connect(database_url: str) -> None:
    """A caller that waits for room gets it once another's connection has failed."""
    with Proxy.to(database_url) as proxy, closing(Database(proxy.url(database_url), connections_max=1)) as database:
        proxy.mode = "frozen"

        def ask(seconds: float) -> int:
            with within(seconds):
                return len(database.rows(ONE, {}))

        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(ask, 1.0)
            wait_until(lambda: database.pool.in_use == 1, what="one connects")
            second = threads.submit(ask, 60.0)
            with pytest.raises(DatabaseUnavailable, match="in time"):
                first.result(60)
            proxy.mode = "pass"
            assert second.result(60) == 1
        wait_until(lambda: sessions(database_url) == 1, what="what came too late is closed")


def test_a_component_that_ends_ends_its_own_waits(database: Database, database_url: str) -> None:
    """A component that ends ends its own waits, and others of the same `Database` get their answer."""
    ending = Deadline(None)
    component = Database(database, ending=ending)
    with locked(database_url, "streams") as holding, ThreadPoolExecutor(2) as threads:
        read = sql("SELECT count(*) AS count FROM relatum.streams")
        ended, other = threads.submit(component.rows, read, {}), threads.submit(database.rows, read, {})
        wait_until(lambda: database.pool.in_use == 2, what="both wait")
        ending.end_in(0)
        component.close()
        with in_time(0.2), pytest.raises(DatabaseUnavailable, match="the work was ended"):
            ended.result(60)
        assert not other.done()
        holding.rollback()
        assert other.result(60) == [(0,)]
    assert database.rows(ONE, {}) == [(1,)]


def test_a_notice_is_logged_once(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """A notice is logged once, however often the connection was used before."""
    for _ in range(10):
        database.run(lambda connection: connection.execute(ONE))
    with caplog.at_level(logging.INFO, logger="sqlalchemy.dialects.postgresql"):
        database.run(lambda connection: connection.execute(sa.text("DO $$ BEGIN RAISE NOTICE 'here'; END $$")))
    assert sum("here" in record.getMessage() for record in caplog.records) == 1


def test_a_connection_of_which_work_is_left_open_is_the_next_ones_as_new(database: Database) -> None:
    """A connection that was dropped in a transaction comes back without a trace of it."""
    connection = database.engine.connect()
    connection.execute(sa.text("CREATE TEMPORARY TABLE left_open (n int) ON COMMIT PRESERVE ROWS"))
    driver = connection.connection.driver_connection
    assert driver is not None
    for _ in range(2):
        driver.close()  # as if the garbage collector closed it
    assert (database.pool.in_use, database.pool.idle) == (0, 1)
    with database.engine.connect() as other:
        assert other.connection.driver_connection is driver
        assert other.scalar(sa.text("SELECT to_regclass('left_open')")) is None


def test_a_statement_that_no_thread_can_cancel_ends_in_time(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement that gets no answer ends with its own error also where no thread can start, as at a program's end."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with closing(Database(database_url, statement_s=0.3)) as database, locked(database_url, "streams"):
        database.rows(ONE, {})
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(DatabaseUnavailable):
                database.rows(sql("SELECT FROM relatum.streams"), {})
        assert database.pool.in_use == 0


def test_an_interrupted_rollback_leaves_no_connection_behind(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection whose rollback is interrupted is closed, and the pool has room for another one."""

    def interrupted(_: TimedConnection) -> None:
        raise KeyboardInterrupt

    connection = database.pool.take(autocommit=False)
    connection.begin()
    monkeypatch.setattr(TimedConnection, "rollback", interrupted)
    with pytest.raises(KeyboardInterrupt):
        connection.close()
    assert (database.pool.in_use, database.pool.idle, connection.closed) == (0, 0, True)


def test_threads_that_are_interrupted_leave_no_connection_behind(database: Database) -> None:
    """A thread whose deadline is brought forward while it waits, connects or asks leaves no connection in use."""

    def ask(number: int) -> None:
        with within(None) as deadline:
            timer = threading.Timer(number % 23 / 400, deadline.end_in, (0,))
            timer.start()
            with suppress(DatabaseUnavailable):
                database.rows(SLEEP, {"s": 0.01})
            timer.cancel()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(200)))
    assert database.pool.in_use == 0
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: database.rows(ONE, {}), range(8))) == [[(1,)]] * 8


@pytest.mark.parametrize("answered", range(4))
@pytest.mark.parametrize("is_hung_up", [False, True])
def test_a_call_that_ends_amid_the_first_questions_about_a_server_gives_its_connection_back(
    database_url: str, monkeypatch: pytest.MonkeyPatch, answered: int, is_hung_up: bool
) -> None:
    """A call that ends during SQLAlchemy's first questions about the server gives its connection back."""
    ending, left = Deadline(None), [answered]
    wait = TimedConnection.wait

    def waiting(self: TimedConnection, *args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and is_hung_up:
            with socket.socket(fileno=os.dup(self.pgconn.socket)) as line:
                line.shutdown(socket.SHUT_RDWR)
        elif left[0] < 0:
            ending.end_in(0)
        return wait(self, *args, **options)

    with closing(Database(database_url, ending=ending)) as database:
        begin = partial(monkeypatch.setattr, TimedConnection, "wait", waiting)
        sa.event.listen(database.engine, "connect", lambda *_: begin(), insert=True)
        with pytest.raises(DatabaseUnavailable), database.transaction():
            raise AssertionError("not reached")
        assert database.pool.in_use == 0


def test_a_transaction_that_has_no_time_to_begin_leaves_its_connection_as_it_was(database_url: str) -> None:
    """A transaction without time to begin asks nothing over its connection, which the next one gets."""
    ending = Deadline(None)
    with closing(Database(database_url, ending=ending, connections_max=1, idle_s=1.0)) as database:
        with database.transaction() as connection:
            (before,) = connection.execute(PID)
        sa.event.listen(database.engine, "begin", lambda _: ending.end_in(0), once=True)
        with pytest.raises(DatabaseUnavailable), database.transaction():
            raise AssertionError("not reached")
        ending.restart()
        with database.transaction() as connection:
            assert connection.execute(PID).all() == [before]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_transaction_of_another_isolation_gives_its_connection_back_as_its_time_ends(
    database_url: str, level: str
) -> None:
    """A transaction of another isolation level gives its connection back though its time ends within it."""
    ending = Deadline(None)
    with closing(Database(database_url, ending=ending)) as database:
        engine = database.engine.execution_options(isolation_level=level)
        with pytest.raises(sa.exc.OperationalError), engine.begin():
            ending.end_in(0)
        assert database.pool.in_use == 0


def test_the_isolation_of_one_transaction_is_not_that_of_the_next(database_url: str) -> None:
    """A transaction has its own isolation level, not that of the last one over the same connection."""
    isolation = sql("SELECT current_setting('transaction_isolation') AS level, pg_backend_pid() AS session")
    with closing(Database(database_url, connections_max=1)) as database:
        with at_one_moment(database.engine) as connection:
            before = connection.execute(isolation).one()
        with database.transaction() as connection:
            after = connection.execute(isolation).one()
    assert (before.level, after.level) == ("repeatable read", "read committed")
    assert before.session == after.session


def test_no_private_name_of_psycopg_is_ours(database: Database) -> None:
    """A connection overrides and calls only documented names of psycopg, which the next release keeps."""
    with database.engine.connect() as connection:
        kind = type(connection.connection.driver_connection)
    assert issubclass(kind, psycopg.Connection)
    theirs = {name for name in dir(psycopg.Connection) if re.match("_[a-z]", name)}
    assert not theirs.intersection(re.findall(r"\b_[a-z]\w*", inspect.getsource(kind)))
