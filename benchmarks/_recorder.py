"""The recorder as users run it: `relatum record` in a process of its own, measured from outside."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg

COMMAND: Final = [sys.executable, "-c", "from relatum_cli.app import main; main()", "record", "--log-level", "warning"]

POLL_S: Final = 0.01
"""Seconds between two checks of the coverage while a recorder catches up."""

LIMIT_S: Final = 300.0

COVERAGE: Final = (
    "SELECT to_offset FROM relatum.coverage JOIN relatum.streams USING (stream_id) "
    "WHERE name = %s AND replaced_at IS NULL AND is_tail"
)

ROWS: Final = (
    "SELECT count(*), max(stream_offset) FROM relatum.relationships JOIN relatum.streams USING (stream_id) "
    "WHERE name = %s AND replaced_at IS NULL"
)


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The figures of a recorder that caught up with a stream.

    Attributes:
        messages: Messages recorded between the first and the last check.
        seconds: Time between these checks. The first is after the recorder has opened the stream, so the time excludes
            Python's start and the connections.
        rss_bytes: Peak memory of the whole process; 0 if the system does not report it.
    """

    messages: int
    seconds: float
    rss_bytes: int

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds


@contextmanager
def recorder(broker_url: str, stream_url: str, database_url: str, *names: str) -> Iterator[int]:
    """Run `relatum record` on streams, and yield its process id. On exit, end it as a service manager would."""
    environment = os.environ | {
        "RELATUM_BROKER_URL": broker_url,
        "RELATUM_STREAM_URL": stream_url,
        "RELATUM_DATABASE_URL": database_url,
    }
    process = subprocess.Popen([*COMMAND, *names], env=environment)
    try:
        yield process.pid
        assert process.poll() is None, f"the recorder ended with {process.returncode}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def catch_up(
    broker_url: str, stream_url: str, database_url: str, stream: str, messages: int, *, rows_each: int = 2
) -> CatchUp:
    """Record a whole stream in a recorder process, and check that each message has its rows."""
    with (
        psycopg.connect(database_url, autocommit=True) as connection,
        recorder(broker_url, stream_url, database_url, stream) as pid,
    ):
        begun_at, first = _wait_covered(connection, stream, 0)
        ended_at, last = _wait_covered(connection, stream, messages)
        found = CatchUp(last - first, ended_at - begun_at, peak_rss_bytes(pid))
        row = connection.execute(ROWS, [stream]).fetchone()
        assert row == (rows_each * messages, messages - 1), f"the table has {row} for {messages} messages"
    return found


def _wait_covered(connection: psycopg.Connection[tuple[int]], stream: str, end: int) -> tuple[float, int]:
    """Wait until the coverage reaches an offset; return the time, and the coverage's end."""
    limit = time.monotonic() + LIMIT_S
    while True:
        row = connection.execute(COVERAGE, [stream], prepare=True).fetchone()
        if row is not None and row[0] >= end:
            return time.perf_counter(), row[0]
        assert time.monotonic() < limit, f"the recorder of {stream} is at {row} after {LIMIT_S:.0f} s"
        time.sleep(POLL_S)


def peak_rss_bytes(pid: int) -> int:
    """Return the peak memory of a process; 0 if the system does not report it."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0
    lines = (line.split() for line in status.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "VmHWM:"), 0)


def number_of(connection: psycopg.Connection[Any], query: str) -> int:
    """Return the one number that a query selects."""
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])
