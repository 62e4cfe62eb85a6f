"""The alerts of the page on operations, on a real recorder, whose broker and database are really away."""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relatum.local import LocalServers
from relatum_migrations import upgrade
from tests.acceptance._command import LIMIT_S, Relatum
from tests.support import declare_stream, publish_plain, wait_until
from tests.support.alerts import documented_alerts, fires
from tests.support.ports import free_port

STREAM = "orders"
OUTAGE_S = 5.0
ANSWER_S = 20.0
BEHIND_S = 300


class Watched:
    """A recorder as a service: its page of metrics, its log, and the alerts."""

    def __init__(self, port: int, log: Path) -> None:
        self._port, self._log, self._seen = port, log, 0

    def page(self) -> str:
        """The metrics; empty while nothing answers. One that is slow is an error: the page asks nobody."""
        began = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=LIMIT_S) as answer:
                text: str = answer.read().decode()
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            return ""
        assert time.monotonic() - began < ANSWER_S, "the page waits for nobody"
        return text

    def tells(self, metric: str, value: float) -> bool:
        return f'relatum_{metric}{{stream="{STREAM}"}} {value}' in self.page()

    def alerts(self) -> set[str]:
        """The alerts that fire; that of the lag after three seconds, so that the test need not wait for minutes."""
        page, expressions = self.page(), documented_alerts()
        assert f"> {BEHIND_S}" in expressions["RelatumBehind"]
        expressions["RelatumBehind"] = expressions["RelatumBehind"].replace(f"> {BEHIND_S}", "> 3")
        return {name for name, expression in expressions.items() if fires(expression, page)}

    def becomes(self, *names: str) -> None:
        try:
            wait_until(lambda: self.alerts() == set(names), LIMIT_S, what=f"alerts {names}", every_s=0.1)
        except AssertionError as error:
            error.add_note(f"{self.alerts()} fire:\n{self.page()}\n{self.log()}")
            raise

    def log(self) -> str:
        return self._log.read_text()

    def complaints(self) -> list[str]:
        """The lines that were logged since the last call, but for those that only inform."""
        lines = self.log().splitlines()
        new, self._seen = lines[self._seen :], len(lines)
        return [line for line in new if not re.match(r"\S+ info ", line)]


@contextmanager
def recorder(relatum: Relatum, log: Path) -> Iterator[Watched]:
    port = free_port((0,))
    process = relatum.start("record", STREAM, "--metrics-port", str(port), stderr=log)
    try:
        yield Watched(port, log)
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


@pytest.fixture
def relatum(private_servers: LocalServers) -> Relatum:
    """The command on servers that the test may stop, with a stream of three messages."""
    upgrade(private_servers.database_url)
    declare_stream(private_servers.broker_url, STREAM)
    publish_plain(private_servers.broker_url, STREAM, [b"1", b"2", b"3"])
    return Relatum(private_servers.broker_url, private_servers.stream_url, private_servers.database_url)


def test_documented_alerts_fire_in_outages(private_servers: LocalServers, relatum: Relatum, tmp_path: Path) -> None:
    """An alert fires in its outage, also of a recorder that was started in it, and ends with it; nothing else fires."""
    database, broker = private_servers.postgresql, private_servers.rabbitmq
    assert fires(documented_alerts()["RelatumGone"], ""), "no recorder at all"

    def publish() -> None:
        publish_plain(private_servers.broker_url, STREAM, [b"4"])

    with recorder(relatum, tmp_path / "first.log") as first:
        first.becomes()
        # Not at once on a busy machine: messages that are read and not yet written still count as lag.
        wait_until(lambda: first.tells("lag_seconds", 0.0), LIMIT_S, what="no lag")
        assert first.tells("hole_offsets", 0.0)
        assert first.complaints() == []

        database.stop()
        until = time.monotonic() + OUTAGE_S
        publish()
        first.becomes("RelatumDatabaseAway", "RelatumNotRecording", "RelatumBehind")
        assert first.tells("lag_offsets", 1.0)
        wait_until(lambda: time.monotonic() >= until, 2 * OUTAGE_S, what="the outage's end")
        database.start()
        first.becomes()
        assert _said_once(first.complaints(), "PostgreSQL"), first.log()
        broker.kill()
        first.becomes("RelatumBrokerAway", "RelatumNotRecording", "RelatumBehind")
        database.stop()
        with recorder(relatum, tmp_path / "second.log") as second:
            # Both servers are down from the start: the series exist nevertheless.
            wait_until(second.page, LIMIT_S, what="metrics from the start")
            assert second.tells("recording", 0.0)
            second.becomes("RelatumBrokerAway", "RelatumDatabaseAway", "RelatumNotRecording", "RelatumBehind")
            broker.start()
            second.becomes("RelatumDatabaseAway", "RelatumNotRecording", "RelatumBehind")
            database.start()
            _one_of(first, second)
            assert _said_once(second.complaints(), "PostgreSQL", "RabbitMQ"), second.log()
        first.becomes()
        assert _said_once(first.complaints(), "RabbitMQ", "PostgreSQL"), first.log()
        database.freeze()
        try:
            first.becomes("RelatumDatabaseAway")
            publish()
            first.becomes("RelatumDatabaseAway", "RelatumBehind")
        finally:
            database.thaw()
        first.becomes()


def _one_of(first: Watched, second: Watched) -> None:
    """Wait until both have their servers, one records, and the standby reports no lag."""

    def is_so() -> bool:
        pages = [first.page(), second.page()]
        recording = [each.tells("recording", 1.0) for each in (first, second)]
        telling = [f'relatum_lag_seconds{{stream="{STREAM}"}}' in page for page in pages]
        return sorted(recording) == [False, True] and telling == recording

    wait_until(is_so, LIMIT_S, what="one that records and one that stands by")
    joined = first.page() + second.page()
    assert not {name for name, expression in documented_alerts().items() if fires(expression, joined)}


def _said_once(complaints: list[str], *servers: str) -> bool:
    """Whether of each server one line says that it is away, two at most, and nothing else was complained of."""
    said = {server: [line for line in complaints if f"{server} " in line and "retrying" in line] for server in servers}
    lines = sum(len(each) for each in said.values())
    return lines == len(complaints) and all(1 <= len(each) <= 2 for each in said.values())
