"""Connections to PostgreSQL that do not wait for longer than a call may last."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum.common.waiting import Deadline, within
from relatum.errors import DatabaseUnavailable
from relatum.store.database import as_engine, make_engine
from relatum.store.settling import CommitInDoubt, Tokens, joined, settle
from relatum.store.translation import translated_errors
from tests.support import until_answered
from tests.support.proxy import Proxy
from tests.support.standstill import in_time, locked, nobody_waits, silent_database, stopped_sessions

SHORT_S = 0.3
"""Seconds of the deadlines here."""

_read = sa.text("SELECT count(*) FROM relatum.streams")


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    made = make_engine(database_url, pool_size=1, connections_max=1)
    yield made
    made.dispose()


def _ask(engine: sa.Engine) -> int:
    with translated_errors(), engine.connect() as connection:
        return int(connection.execute(_read).scalar_one())


@pytest.mark.parametrize("is_locked", [True, False], ids=["locked table", "busy pool"])
def test_what_is_busy_is_waited_for_until_the_deadline(engine: sa.Engine, database_url: str, is_locked: bool) -> None:
    """A call waits for a table or a connection until its deadline, which another thread may bring forward."""
    busy: Any = locked(database_url, "streams") if is_locked else engine.connect()
    with busy:
        with in_time(SHORT_S), within(SHORT_S), pytest.raises(DatabaseUnavailable, match=r"in time \(0\.3 s\)"):
            _ask(engine)
        with in_time(SHORT_S), within(None) as deadline:
            threading.Timer(SHORT_S, deadline.end_in, (0,)).start()
            with pytest.raises(DatabaseUnavailable, match="the work was ended"):
                _ask(engine)
        nobody_waits(database_url)
    assert _ask(engine) == 0


def test_a_locked_table_is_waited_for_until_the_engines_limit(database_url: str) -> None:
    """A call without a deadline ends by its engine's limit, and leaves no statement that waits."""
    with as_engine(database_url, statement_s=SHORT_S) as limited, locked(database_url, "streams"):
        with in_time(SHORT_S), pytest.raises(DatabaseUnavailable, match=r"in time \(0"):
            _ask(limited)
        nobody_waits(database_url)


@pytest.mark.parametrize(("query", "most_s"), [("", SHORT_S), ("?connect_timeout=2", None)])
def test_a_listener_that_never_speaks_is_waited_for_in_time(query: str, most_s: float | None) -> None:
    """Connecting to a silent server ends at the deadline, and without one by `connect_timeout`."""
    with (
        silent_database() as url,
        as_engine(url + query) as engine,
        in_time(most_s or 2.0),
        within(most_s),
        pytest.raises(DatabaseUnavailable),
    ):
        _ask(engine)


def test_a_stopped_server_holds_nobody(engine: sa.Engine, database_url: str) -> None:
    """With its sessions stopped (SIGSTOP), statements, commits, COPY, rollbacks and `dispose` end in time."""

    def stop_within(step: str) -> None:
        with translated_errors(), engine.begin() as connection:
            connection.execute(_read)
            with stopped_sessions(database_url), within(SHORT_S):
                if step == "statement":
                    connection.execute(_read)
                elif step == "copy":
                    with connection.connection.cursor() as cursor, cursor.copy("COPY relatum.skips FROM STDIN") as copy:
                        for _ in range(100_000):
                            copy.write(b"1\t" * 1000)
                elif step == "rollback":
                    connection.rollback()
                elif step == "commit":
                    connection.commit()
                engine.dispose()

    for step in ("statement", "copy", "commit"):
        with in_time(SHORT_S), pytest.raises(DatabaseUnavailable, match="in time"):
            stop_within(step)
    with in_time(SHORT_S):
        stop_within("rollback")
    token = Tokens.new()
    with ExitStack() as stopped, within(None) as deadline:

        def store(connection: sa.Connection) -> None:
            Tokens().write(connection, token)
            stopped.enter_context(stopped_sessions(database_url))
            deadline.end_in(SHORT_S)

        with in_time(SHORT_S), pytest.raises(CommitInDoubt), joined(engine, token, store):
            pass
    # The sent bytes are in the server's socket, and the server continues with them.
    assert settle(engine, token)
    assert _ask(engine) == 0


def test_a_pool_gives_no_connection_that_was_given_up(database_url: str) -> None:
    """A connection that was closed under a rollback is replaced, and no caller gets an error about it."""
    with Proxy.to(database_url) as proxy:
        engine = make_engine(proxy.url(database_url), pool_size=1, connections_max=1, statement_s=1.0)
        with engine.connect() as connection:
            connection.execute(_read)
            proxy.mode = "frozen"
            connection.rollback()
        proxy.mode = "pass"
        assert until_answered(lambda: _ask(engine)) == 0
        engine.dispose()


def test_an_answer_that_is_there_is_taken(engine: sa.Engine) -> None:
    """What comes as the deadline passes is an answer; nothing begins behind it; an engine's end closes connections."""
    with engine.connect() as connection:
        driver: psycopg.Connection = connection.connection.driver_connection  # type: ignore[assignment]
        with within(Deadline(0.0)), pytest.raises(DatabaseUnavailable), translated_errors():
            driver.execute("SELECT 1")
        assert driver.execute("SELECT 1").fetchone() == (1,)
        began = time.monotonic()
        with within(60.0):
            driver.execute("SELECT pg_sleep(0.05)")
        assert time.monotonic() - began >= 0.05
    with engine.connect() as connection:
        still_used: psycopg.Connection = connection.connection.driver_connection  # type: ignore[assignment]
        engine.dispose()
        assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1
    with engine.connect() as connection:
        opened: psycopg.Connection = connection.connection.driver_connection  # type: ignore[assignment]
    assert still_used.closed
    assert opened.closed
