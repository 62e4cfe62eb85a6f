"""Forks: what was made before one works in the child, or says at once that it does not; the parent notices nothing."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any
from urllib.request import urlopen

import pika
import pytest
import sqlalchemy as sa

import relatum
from relatum.collecting import Outcomes
from relatum.contexts import ContextOptions, SerializationContexts
from relatum.errors import UsedAfterFork
from relatum.publishing._embedded import EmbeddedRecorders
from relatum.reading import AsyncStreamReader, BrokerAddress, StreamReader
from relatum.recording import Recorder
from relatum.store import Database
from relatum.superstreams import Layout
from relatum_consumer import Expectation, Relations
from tests.support import publish_plain, record, rows_of, wait_until
from tests.support.forking import in_child, publish_in_child, publishing, put
from tests.support.ports import free_port

PARTITIONS = 2
"""Of the fixture `layout`."""

VALUES = [f"v{number}" for number in range(10)]


def values_of(engine: sa.Engine, stream: str) -> list[str]:
    """The values of `order_id` that are recorded, sorted."""
    return sorted(value for _, value, _ in rows_of(engine, stream))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_records_what_it_publishes(
    method: str, amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """A child that intercepts a connection of its own has a recorder of its own, whatever its parent did before."""
    urls = (amqp_url, stream_url, database_url)
    with publishing(*urls) as channel:
        put(channel, stream_name, ["parent"])
        wait_until(lambda: values_of(engine, stream_name) == ["parent"], what="the parent's row")
        if method == "fork":
            in_child(lambda: publish_in_child(*urls, stream_name, VALUES))
        else:
            process = multiprocessing.get_context(method).Process(
                target=publish_in_child, args=(*urls, stream_name, VALUES)
            )
            process.start()
            process.join(90)
            assert process.exitcode == 0
        put(channel, stream_name, ["parent again"])
        expected = sorted(["parent", "parent again", *VALUES])
        wait_until(lambda: values_of(engine, stream_name) == expected, what="all rows")


@pytest.mark.parametrize("database", ["url", "shared"])
def test_what_only_asks_works_in_a_child(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str, database: str
) -> None:
    """Readers, relations and outcomes open connections of their own; the parent goes on over its own."""
    publish_plain(amqp_url, stream_name, [(b"0", {"order_id": 1}), (b"1", {"order_id": 1})])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    with ExitStack() as stack:
        named: Any = database_url
        if database == "shared":
            named = Database(database_url)
            stack.callback(named.close)
        over_streams = stack.enter_context(StreamReader.open(stream_url))
        relations = stack.enter_context(Relations(BrokerAddress.parse(amqp_url, stream_url), named))
        outcomes = stack.enter_context(Outcomes(named))
        orders = relatum.SuperStream("orders", partitions=4)
        handle = orders.affinity("hash", name="x")

        def ask() -> list[Any]:
            return [
                over_streams.read(stream_name, 1).body,
                relations.read(stream_name, 0).body,
                relations.around(datetime.now(UTC), stream_name, before_s=60).status,
                relations.values("order_id"),
                relations.times("order_id", 1).count,
                relations.trace(("order_id", 1)).status,
                relations.missing(Expectation("paid", stream_name, "order_id", stream_name, 60)).status,
                outcomes.of("nobody").status.value,
                orders.partition_of("", "k").stream,
            ]

        before = ask()
        streams: Any = over_streams._streams
        idle = streams._connections.idle

        def in_the_child() -> list[Any]:
            found = ask()
            over_streams.close()
            relations.close()
            outcomes.close()
            return found

        assert in_child(in_the_child) == before
        assert in_child(in_the_child) == before
        assert ask() == before
        # The very connections: none was ended by a child.
        assert streams._connections.idle == idle
        assert handle.partition is None


def refused(*uses: Callable[[], Any]) -> Callable[[], list[bool]]:
    """Tells, for each use, whether it is refused at once for the fork."""

    def each(use: Callable[[], Any]) -> bool:
        try:
            use()
        except UsedAfterFork:
            return True
        return False

    return lambda: [each(use) for use in uses]


def test_what_has_an_identity_says_that_it_is_the_parents(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str, layout: Layout
) -> None:
    """Nothing is sent under the parent's numbers or leases; closing it does nothing, and the parent goes on."""
    address = BrokerAddress.parse(amqp_url, stream_url)
    of_context = pika.BasicProperties(headers={"context_id": "x"})
    with ExitStack() as stack:
        channel = stack.enter_context(publishing(amqp_url, stream_url, database_url))
        router = stack.enter_context(
            relatum.ContextRouter(layout.super_stream, database_url, ContextOptions(header="context_id"))
        )
        router.publish(channel, b"1", of_context)
        contexts = stack.enter_context(SerializationContexts(layout.super_stream, database_url, broker=address))
        consumer = relatum.SerialConsumer(layout.super_stream, "c", database=database_url, broker=address)
        stack.enter_context(consumer)
        collector = relatum.MessageCollector("c", database=database_url, broker=address, streams=[stream_name])
        group = relatum.MessageGroup(channel, "", stream_name)
        group.put(b"first")
        recorder = Recorder(address, database_url, [stream_name])
        loop_reader = asyncio.run(_opened(stream_url))
        uses = (
            lambda: put(channel, stream_name, ["never"]),
            lambda: relatum.publish(channel, "", stream_name, b"never"),
            lambda: relatum.intercept(channel.connection, database=database_url, keys=["order_id"]),
            lambda: router.publish(channel, b"never", of_context),
            lambda: contexts.move(["x"], layout.partitions[0].stream),
            lambda: consumer.next_batch(0.1),
            lambda: collector.start(),
            lambda: group.put(b"never"),
            lambda: recorder.run(threading.Event()),
            lambda: asyncio.run(loop_reader.bounds(stream_name)),
        )

        def in_the_child() -> list[bool]:
            found = refused(*uses)()
            for ended in (router, contexts, consumer, collector, group):
                ended.close()
            relatum.release(channel.connection)
            return found

        assert in_child(in_the_child) == [True] * len(uses)
        group.put(b"last", last=True)
        router.publish(channel, b"2", of_context)
        found = [message.body for message in _taken(consumer, 2)]
        assert found == [b"1", b"2"]


async def _opened(stream_url: str) -> AsyncStreamReader:
    reader = await AsyncStreamReader.open(stream_url)
    await reader.close()
    return reader


def _taken(consumer: Any, count: int) -> list[Any]:
    taken: list[Any] = []
    wait_until(lambda: taken.extend(consumer.messages(0.5)) or len(taken) >= count, what="all messages")
    return taken


def test_locks_held_at_the_fork_do_not_stop_the_child(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Whatever another thread was about to do when the process forked, the child does not wait for it."""
    publish_plain(amqp_url, stream_name, [b"0"])
    with ExitStack() as stack:
        reader = stack.enter_context(StreamReader.open(stream_url))
        relations = stack.enter_context(Relations(BrokerAddress.parse(amqp_url, stream_url), database_url))
        relations.read(stream_name, 0)
        orders = relatum.SuperStream("orders", partitions=4)
        streams: Any = reader._streams
        locks = [
            EmbeddedRecorders._lock,
            streams._lock,
            streams._connections._lock,
            *[each._sending for each in streams._connections.idle],
            relations._lock,
            orders._lock,
            orders.placing._lock,
        ]
        held, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            with ExitStack() as holding:
                for lock in locks:
                    holding.enter_context(lock)
                held.set()
                let_go.wait(120)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(90)

        def use() -> list[Any]:
            publish_in_child(amqp_url, stream_url, database_url, stream_name, ["child"])
            orders.placing.place(orders.layout(""), "round_robin", None, {})
            return [reader.read(stream_name, 0).body, relations.read(stream_name, 0).body]

        try:
            assert in_child(use) == [b"0", b"0"]
        finally:
            let_go.set()
            holder.join()
    wait_until(lambda: values_of(engine, stream_name) == ["child"], what="the child's row")


def test_a_child_that_ends_in_order_leaves_the_parents_connections(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """At a child's end its interpreter runs finalisers and exit handlers: none of them closes what is the parent's."""
    script = """
import os, sys, pika, relatum
from relatum.reading import StreamReader
from relatum_consumer import Relations
amqp, streams, database, stream = sys.argv[1:]
connection = pika.BlockingConnection(pika.URLParameters(amqp))
relatum.intercept(connection, database=database, keys=["order_id"], stream_url=streams)
channel = connection.channel()
place, = relatum.publish(channel, "", stream, b"before").wait(90)
reader = StreamReader.open(streams)
reader.read(stream, place.offset)
relations = Relations(streams, database)
relations.find("order_id", "x")
idle = reader._streams._connections.idle
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
place, = relatum.publish(channel, "", stream, b"after").wait(90)
assert reader.read(stream, place.offset).body == b"after"
relations.find("order_id", "x")
assert reader._streams._connections.idle == idle, "the parent had to connect again"
"""
    arguments = [amqp_url, stream_url, database_url, stream_name]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_all_workers_of_a_pre_fork_server_record(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Gunicorn with --preload: the master publishes before it forks, and each worker's messages are all recorded."""
    port = free_port((0,))
    environment = os.environ | {
        "APP_AMQP": amqp_url,
        "APP_STREAM": stream_url,
        "APP_DATABASE": database_url,
        "APP_NAME": stream_name,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "3", "--bind", f"127.0.0.1:{port}"]
    command += ["--no-control-socket"] if "control-socket" in _help() else []
    server = subprocess.Popen(
        [*command, "--log-level", "warning", "tests.support.prefork_app:app"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        workers: set[str] = set()
        published = ["master"]

        def ask() -> bool:
            assert server.poll() is None, server.stdout and server.stdout.read()
            try:
                with urlopen(f"http://127.0.0.1:{port}/?r{len(published)}", timeout=90) as answer:
                    workers.add(answer.read().decode())
            except OSError:
                return False
            published.append(f"r{len(published)}")
            return len(workers) == 3 and len(published) > 30

        wait_until(ask, 120, what="answers of three workers")
        wait_until(lambda: values_of(engine, stream_name) == sorted(published), what="all rows")
    finally:
        server.send_signal(signal.SIGTERM)
        output = server.communicate(timeout=90)[0]
    assert b"Traceback" not in output, output.decode()


def _help() -> str:
    return subprocess.run(
        [sys.executable, "-m", "gunicorn", "--help"], capture_output=True, text=True, check=False
    ).stdout
