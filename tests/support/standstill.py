"""PostgreSQL that is there and says nothing: a locked table, a line that is suspended, a listener that never speaks."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest

from relatum.reading import StreamReader
from tests.support._waiting import wait_until

SLACK_S = 15.0
"""Seconds by which a busy machine may be late; waits without an end, or with a default of 30 s, may be later."""


@contextmanager
def locked(database_url: str, *tables: str) -> Iterator[psycopg.Connection]:
    """Nobody reads or writes these tables of the schema `relatum` in the meantime."""
    with psycopg.connect(database_url) as session:
        for table in tables:
            session.execute(f"LOCK TABLE relatum.{table} IN ACCESS EXCLUSIVE MODE")  # type: ignore[arg-type]
        yield session
        session.rollback()


@contextmanager
def silent_database() -> Iterator[str]:
    """The URL of a server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"postgresql://relatum@127.0.0.1:{listener.getsockname()[1]}/relatum"


@contextmanager
def stopped_sessions(database_url: str, name: str = "relatum") -> Iterator[None]:
    """The server's processes of one application's sessions are stopped (SIGSTOP). On this machine alone."""
    with psycopg.connect(database_url) as session:
        found = session.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s", [name]
        ).fetchall()
    pids = [int(row[0]) for row in found]
    assert pids, "there is a session to be stopped"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def in_time(most_s: float) -> Iterator[None]:
    """What is in the block ends within its time-out, but for a busy machine's slack."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < most_s + SLACK_S, f"{took:.1f} s and not {most_s} s"


def end_first_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next scan of a stream ends at once, as at a node that lags."""
    scan, scans = StreamReader.batches, []

    def lagging(*given: Any, **options: Any) -> Any:
        scans.append(given)
        return (each for each in ()) if len(scans) == 1 else scan(*given, **options)

    monkeypatch.setattr(StreamReader, "batches", lagging)


def end_sessions(database_url: str) -> None:
    """End all sessions of the database but one's own."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        others = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(f"SELECT pg_terminate_backend(pid) FROM ({others}) AS others".encode())


def nobody_waits(database_url: str) -> None:
    """Wait until no session waits for a lock any more: the server has received that nobody wants the answer."""
    _wait_for(False, database_url)


def somebody_waits(database_url: str) -> None:
    _wait_for(True, database_url)


def _wait_for(is_waiting: bool, database_url: str) -> None:
    query = "SELECT FROM pg_locks WHERE NOT granted"
    with psycopg.connect(database_url, autocommit=True) as session:
        wait_until(lambda: bool(session.execute(query).fetchall()) is is_waiting, what="as many wait for a lock")
