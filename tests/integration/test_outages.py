"""What operators read in an outage: of what is away one line from each component, and one when it is back."""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from relatum.client_logs import own_connection
from relatum.collecting import Bulk, ExecutorOptions, MessageCollector, Outcomes
from relatum.contexts import AsyncSerialConsumer, SerialConsumer
from relatum.local import LocalServers
from relatum.membership import GROUP_KEY
from relatum.reading import BrokerAddress, Message
from relatum.recording import EmbeddedRecorder
from relatum.store import make_engine
from relatum.superstreams import declare_super_stream
from relatum_consumer import Relations
from relatum_migrations import upgrade
from tests.support import declare_stream, make_streams_survive, publish_plain, recorded_to, stream_available, wait_until
from tests.support.collectors import AsyncCollectorFace, a_loop
from tests.support.groups import whole_group

OUTAGE_S = 5.0
LIMIT_S = 120.0
THEIRS = ("pika", "aiormq", "aio_pika", "asyncio")


class Seen:
    """What each component has seen, by its name."""

    def __init__(self) -> None:
        self.by_name: defaultdict[str, set[bytes]] = defaultdict(set)

    def by(self, name: str) -> Callable[[Bulk], None]:
        """Notes a bulk's bodies."""
        return lambda bulk: self.by_name[name].update(each.message.body for each in bulk.messages)


class Components:
    """One of each that runs for ever, with its defaults, on servers that a test stops."""

    def __init__(self, servers: LocalServers, stack: ExitStack) -> None:
        self._servers = servers
        self._seen = Seen()
        self._published = 0
        self.engine = make_engine(servers.database_url)
        stack.callback(self.engine.dispose)
        urls: dict[str, Any] = {"database": servers.database_url, "broker": servers.broker_url}
        self.partitions = [partition.stream for partition in declare_super_stream(servers.broker_url, "serial", 1)]
        self.streams = ["collected", "collected-async", "groups", *self.partitions]
        for name in self.streams[:3]:
            declare_stream(servers.broker_url, name)
        loop = stack.enter_context(a_loop())
        # Of the application's own engine and loop: what is logged is Relatum's all the same.
        collector = MessageCollector("blocking", streams=["collected"], type_of=_any, **urls)
        other = AsyncCollectorFace(loop, name="asyncio", streams=["collected-async"], type_of=_any, **urls)
        for each, name in ((collector, "collected"), (other, "collected-async")):
            each.register_executor("any", self._seen.by(name), ExecutorOptions(max_age_s=0.1))
            stack.enter_context(each)
        address = BrokerAddress.parse(servers.broker_url)
        self.embedded = embedded = EmbeddedRecorder(address, servers.database_url, [GROUP_KEY])
        stack.callback(embedded.close)
        for stream in ("groups", *self.partitions):
            embedded.record(stream)
        self._consume(stack, SerialConsumer("serial", "blocking", **urls))
        self._consume_async(stack, loop, AsyncSerialConsumer("serial", "asyncio", **urls))
        self._give_groups(stack, Relations(servers.broker_url, servers.database_url))
        outcomes = stack.enter_context(Outcomes(servers.database_url))
        outcomes.register_result_handler(lambda outcome: None, "of nobody")

    def _consume(self, stack: ExitStack, consumer: SerialConsumer) -> None:
        stop = threading.Event()
        note = self._seen.by_name["serial"].update
        stack.enter_context(consumer)
        stack.enter_context(
            _thread(lambda: consumer.run(lambda batch: note(each.body for each in batch), stop), stop.set)
        )

    def _consume_async(self, stack: ExitStack, loop: Any, consumer: AsyncSerialConsumer) -> None:
        note = self._seen.by_name["serial-async"].update

        async def handle(batch: Any) -> None:
            note(each.body for each in batch)

        async def start() -> "asyncio.Task[None]":
            await consumer.__aenter__()
            return asyncio.create_task(consumer.run(handle))

        async def end(task: "asyncio.Task[None]") -> None:
            await consumer.__aexit__(None, None, None)
            await task

        task = loop.run(start())
        stack.callback(lambda: loop.run(end(task)))

    def _give_groups(self, stack: ExitStack, relations: Relations) -> None:
        stack.enter_context(relations)
        groups = relations.groups("groups", consumer="billing", follow=True)

        def run() -> None:
            for group in groups:
                self._seen.by_name["groups"].update(message.body for message in group.messages)
                group.acknowledge()

        stack.enter_context(_thread(run, groups.close))

    def publish(self) -> bytes:
        """One more message for each; gives its body."""
        self._published += 1
        body = b"%d" % self._published
        for stream in self.streams:
            headers = whole_group(self._published, 1)[0][1] if stream == "groups" else {}
            publish_plain(self._servers.broker_url, stream, [(body, headers)])
        return body

    def have_seen(self, body: bytes) -> bool:
        """Whether all have it, and it is recorded."""
        names = ("collected", "collected-async", "serial", "serial-async", "groups")
        return all(body in self._seen.by_name[name] for name in names) and all(
            recorded_to(self.engine, stream) >= self._published for stream in self.partitions
        )

    def missing(self) -> dict[str, set[bytes]]:
        """What each has seen, for a test that fails."""
        return dict(self._seen.by_name)


def _any(message: Message) -> str:
    """All are of one type."""
    return "any"


@contextmanager
def _thread(run: Callable[[], object], stop: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_an_outage_is_one_line_of_each_component_and_one_at_its_end(
    private_servers: LocalServers, caplog: pytest.LogCaptureFixture
) -> None:
    """With PostgreSQL, then RabbitMQ, away for five seconds nobody is told more, nor shown a traceback."""
    upgrade(private_servers.database_url)
    make_streams_survive(private_servers.rabbitmq)
    caplog.set_level(logging.INFO, "relatum")
    with ExitStack() as stack:
        running = Components(private_servers, stack)
        expected = {"relatum.collector", "relatum.recorder", "relatum.serial", "relatum.groups"}
        _await(running, running.publish())
        # The recorder beside a publisher tells the same as one that runs alone.
        seen = running.embedded.statistics()
        assert (seen.is_database_up, seen.is_broker_up, seen.streams["groups"].is_recording) == (True, True, True)
        database, broker = private_servers.postgresql, private_servers.rabbitmq
        caplog.clear()
        database.stop()
        until = time.monotonic() + OUTAGE_S
        body = running.publish()
        wait_until(lambda: time.monotonic() >= until, 2 * OUTAGE_S, what="the outage's end")
        database.start()
        running.engine.dispose()  # Its connections are lost: they are the test's.
        _await(running, body)
        _check(caplog, "PostgreSQL", expected)
        caplog.clear()
        broker.kill()
        until = time.monotonic() + OUTAGE_S
        wait_until(lambda: time.monotonic() >= until, 2 * OUTAGE_S, what="the outage's end")
        broker.start()
        for stream in running.streams:
            with own_connection():  # What is logged of this one is not what is tested.
                wait_until(lambda stream=stream: stream_available(private_servers.broker_url, stream), LIMIT_S)  # type: ignore[misc]
        _await(running, running.publish())
        _check(caplog, "RabbitMQ", expected - {"relatum.groups"})


def _await(running: Components, body: bytes) -> None:
    try:
        wait_until(lambda: running.have_seen(body), LIMIT_S, what=f"message {body!r}")
    except AssertionError as error:
        raise AssertionError(running.missing()) from error


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
    away = said(" is away")
    # A consumer of groups that has none to read meets no broker.
    assert expected <= set(away) <= {*expected, "relatum.groups"}, everything
    assert not [record for record in loud if record.exc_info or record.name.partition(".")[0] in THEIRS], everything
    # Of collectors and serial consumers there are two; and whoever waits for outcomes is a collector's, too.
    most = {"relatum.collector": 6, "relatum.serial": 4}
    for name, lines in away.items():
        assert len(lines) <= most.get(name, 2), everything
    assert len(loud) == sum(len(lines) for lines in away.values()), everything
