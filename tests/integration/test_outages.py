"""Logs of an outage: each component logs one line about an unavailable server, and one when it is back."""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import pytest

from relatum.collecting import ExecutorOptions, MessageCollector, Outcomes
from relatum.common.client_logs import own_connection
from relatum.contexts import AsyncSerialConsumer
from relatum.local import LocalServers
from relatum.membership import GROUP_KEY
from relatum.recording.embedded import EmbeddedRecorder
from relatum.store.database import make_engine
from relatum.superstreams import declare_super_stream
from relatum_consumer import Relations
from relatum_migrations import upgrade
from tests.support import declare_stream, publish_plain, recorded_to, stream_available, wait_until
from tests.support.groups import whole_group
from tests.support.threads import beside

OUTAGE_S = 5.0
LIMIT_S = 120.0
THEIRS = ("pika", "aiormq", "aio_pika", "asyncio")


class Components:
    """One of each that runs forever, with its defaults, on servers that a test stops."""

    def __init__(self, servers: LocalServers, stack: ExitStack) -> None:
        self._servers = servers
        self._published = 0
        self.seen: defaultdict[str, set[bytes]] = defaultdict(set)
        self.engine = make_engine(servers.database_url)
        stack.callback(self.engine.dispose)
        urls: dict[str, Any] = {"database": servers.database_url, "broker": servers.broker_url}
        self.partitions = [partition.stream for partition in declare_super_stream(servers.broker_url, "serial", 1)]
        self.streams = ["collected", "groups", *self.partitions]
        for name in self.streams[:2]:
            declare_stream(servers.broker_url, name)
        collector = MessageCollector("blocking", streams=["collected"], type_of=lambda _: "any", **urls)
        note = self.seen["collected"].update
        collector.register_executor(
            "any", lambda bulk: note(each.message.body for each in bulk.messages), ExecutorOptions(max_age_s=0.1)
        )
        stack.enter_context(collector)
        self.embedded = embedded = EmbeddedRecorder(servers.broker_url, servers.database_url, [GROUP_KEY])
        stack.callback(embedded.close)
        for stream in ("groups", *self.partitions):
            embedded.watch("", stream)
        # It defines the key that finds groups.
        wait_until(lambda: any(each.is_recording for each in embedded.statistics().streams.values()), what="a recorder")
        self._consume(stack, AsyncSerialConsumer("serial", "asyncio", **urls))
        self._give_groups(stack, Relations(servers.broker_url, servers.database_url))
        outcomes = stack.enter_context(Outcomes(servers.database_url))
        outcomes.register_result_handler(lambda outcome: None, "of nobody")

    def _consume(self, stack: ExitStack, consumer: AsyncSerialConsumer) -> None:
        stop, note = threading.Event(), self.seen["serial"].update

        async def handle(batch: Any) -> None:
            note(each.body for each in batch)

        async def run() -> None:
            ended = asyncio.Event()
            async with consumer:
                running = asyncio.create_task(consumer.run(handle, ended))
                await asyncio.to_thread(stop.wait)
                ended.set()
                await running

        stack.enter_context(beside(lambda: asyncio.run(run()), stop=stop.set))

    def _give_groups(self, stack: ExitStack, relations: Relations) -> None:
        stack.enter_context(relations)
        groups = relations.groups("groups", consumer="billing", follow=True)

        def run() -> None:
            for group in groups:
                self.seen["groups"].update(message.body for message in group.messages)
                group.acknowledge()

        stack.enter_context(beside(run, stop=groups.close))

    def publish(self) -> bytes:
        """One more message for each; gives its body."""
        self._published += 1
        body = b"%d" % self._published
        for stream in self.streams:
            headers = whole_group(self._published, 1)[0][1] if stream == "groups" else {}
            publish_plain(self._servers.broker_url, stream, [(body, headers)])
        return body

    def await_seen(self, body: bytes) -> None:
        """Wait until all have it, and it is recorded."""

        def have_seen() -> bool:
            return all(body in self.seen[name] for name in ("collected", "serial", "groups")) and all(
                recorded_to(self.engine, stream) >= self._published for stream in self.partitions
            )

        wait_until(have_seen, LIMIT_S, what=f"message {body!r}, of all")


def test_an_outage_is_one_line_of_each_component_and_one_at_its_end(
    private_servers: LocalServers, caplog: pytest.LogCaptureFixture
) -> None:
    """With PostgreSQL, then RabbitMQ, down for five seconds, there are no other lines and no traceback."""
    upgrade(private_servers.database_url)
    caplog.set_level(logging.INFO, "relatum")
    with ExitStack() as stack:
        running = Components(private_servers, stack)
        expected = {"relatum.collector", "relatum.recorder", "relatum.serial", "relatum.groups"}
        running.await_seen(running.publish())
        # The recorder inside a publisher logs the same as one that runs alone.
        seen = running.embedded.statistics()
        assert (seen.is_database_up, seen.is_broker_up, seen.streams["groups"].is_recording) == (True, True, True)
        database, broker = private_servers.postgresql, private_servers.rabbitmq
        caplog.clear()
        database.stop()
        body = running.publish()
        _last()
        database.start()
        running.engine.dispose()  # Its connections are lost; the test owns them.
        running.await_seen(body)
        _check(caplog, "PostgreSQL", expected)
        caplog.clear()
        broker.kill()
        _last()
        broker.start()
        for stream in running.streams:
            with own_connection():  # The log lines of this connection are not under test.
                wait_until(lambda stream=stream: stream_available(private_servers.broker_url, stream), LIMIT_S)  # type: ignore[misc]
        running.await_seen(running.publish())
        _check(caplog, "RabbitMQ", expected - {"relatum.groups"})


def _last() -> None:
    until = time.monotonic() + OUTAGE_S
    wait_until(lambda: time.monotonic() >= until, 2 * OUTAGE_S, what="the outage's end")


def _check(caplog: pytest.LogCaptureFixture, server: str, expected: set[str]) -> None:
    """Each component has said that the server is away, twice at most, and that it is back; and nothing else."""

    def records() -> list[logging.LogRecord]:
        return list(caplog.records)

    def said(text: str) -> dict[str, list[str]]:
        lines: dict[str, list[str]] = defaultdict(list)
        for record in records():
            if record.getMessage().startswith(server) and text in record.getMessage():
                lines[record.name].append(record.getMessage())
        return lines

    wait_until(lambda: set(said(" is back")) >= expected, LIMIT_S, what=f"all say that {server} is back")
    everything = "\n".join(f"{each.levelname} {each.name} {each.getMessage()}" for each in records())
    loud = [record for record in records() if record.levelno >= logging.WARNING]
    away = said(" is unavailable; retrying")
    # A group consumer that has no groups to read uses no broker.
    assert expected <= set(away) <= {*expected, "relatum.groups"}, everything
    assert not [record for record in loud if record.exc_info or record.name.partition(".")[0] in THEIRS], everything
    # A collector also waits for outcomes.
    most = {"relatum.collector": 4}
    for name, lines in away.items():
        assert len(lines) <= most.get(name, 2), everything
    assert len(loud) == sum(len(lines) for lines in away.values()), everything
