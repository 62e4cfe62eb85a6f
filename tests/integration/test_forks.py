"""Forks: what was made before one works in the child, or says at once that it does not; the parent notices nothing."""

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from typing import Any
from urllib.request import urlopen

import pika
import pytest

import relatum
from relatum.collecting import Outcomes
from relatum.contexts import ContextOptions, SerializationContexts, SerialOptions
from relatum.errors import UsedAfterFork
from relatum.publishing import _embedded
from relatum.reading import AsyncStreamReader, StreamReader
from relatum.recording import Recorder
from relatum.store.database import Database
from relatum.superstreams import Layout
from relatum_consumer import Expectation, Relations
from tests.support import in_a_try, publish_plain, run_python, wait_until
from tests.support.forking import in_child, publish_in_child, publishing, put
from tests.support.leases import LEASE_S
from tests.support.place import Place
from tests.support.ports import free_port
from tests.support.serial_consuming import consume
from tests.support.threads import beside

PARTITIONS = 2

VALUES = [f"v{number}" for number in range(10)]


def wait_for(place: Place, *values: str) -> None:
    wait_until(lambda: sorted(place.values()) == sorted(values), what="all rows")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_records_what_it_publishes(method: str, place: Place) -> None:
    """A child that intercepts its own connection records what it publishes, and so does its parent."""
    servers = (place.broker, place.database)
    with publishing(*servers) as channel:
        put(channel, place.stream, ["parent"])
        wait_for(place, "parent")
        if method == "fork":
            in_child(lambda: publish_in_child(*servers, place.stream, VALUES))
        else:
            arguments = (*servers, place.stream, VALUES)
            process = multiprocessing.get_context(method).Process(target=publish_in_child, args=arguments)
            process.start()
            process.join(90)
            assert process.exitcode == 0
        put(channel, place.stream, ["parent again"])
        wait_for(place, "parent", "parent again", *VALUES)


@pytest.mark.parametrize("database", ["url", "shared"])
def test_what_only_asks_works_in_a_child(place: Place, database: str) -> None:
    """Readers, lookups and outcomes open new connections in a child; the parent keeps its own."""
    stream_name = place.stream
    place.put_recorded((b"0", {"order_id": 1}), (b"1", {"order_id": 1}), keys=["order_id"])
    with ExitStack() as stack:
        is_shared = database == "shared"
        named: Any = stack.enter_context(closing(Database(place.database))) if is_shared else place.database
        over_streams = stack.enter_context(StreamReader.open(place.stream_url))
        relations = stack.enter_context(Relations(place.broker, named))
        outcomes = stack.enter_context(Outcomes(named))
        orders = relatum.SuperStream("orders", partitions=4)
        handle = orders.affinity("hash", name="x")

        def ask() -> list[Any]:
            return [
                over_streams.read(stream_name, 1).body,
                relations.read(stream_name, 0).body,
                relations.around(datetime.now(UTC), stream_name, before_s=60).status,
                relations.values("order_id"),
                relations.trace(("order_id", 1)).status,
                relations.missing(Expectation("paid", stream_name, "order_id", stream_name, 60)).status,
                outcomes.of("nobody").status.value,
                orders.partition_of("", "k").stream,
            ]

        before = ask()
        streams: Any = over_streams._nodes
        idle = list(streams.pool._idle)

        def in_the_child() -> list[Any]:
            found = ask()
            over_streams.close()
            relations.close()
            outcomes.close()
            return found

        assert in_child(in_the_child) == before
        assert in_child(in_the_child) == before
        assert ask() == before
        # The same connections as before: no child has ended one.
        assert streams.pool._idle == idle
        assert handle.partition is None


def test_what_has_an_identity_says_that_it_is_the_parents(place: Place, layout: Layout) -> None:
    """Nothing is sent under the parent's numbers or leases; closing it does nothing, and the parent continues."""
    address = place.broker
    of_context = pika.BasicProperties(headers={"context_id": "x"})
    with ExitStack() as stack:
        channel = stack.enter_context(publishing(place.broker, place.database))
        router = stack.enter_context(
            relatum.ContextRouter(layout.super_stream, place.database, ContextOptions(header="context_id"))
        )
        router.publish(channel, b"1", of_context)
        contexts = stack.enter_context(SerializationContexts(layout.super_stream, place.database, broker=address))
        options = SerialOptions(lease_s=LEASE_S)
        consumer = relatum.SerialConsumer(layout.super_stream, "c", options, database=place.database, broker=address)
        stack.enter_context(consumer)
        collector = relatum.MessageCollector("c", database=place.database, broker=address, streams=[place.stream])
        group = relatum.MessageGroup(channel, "", place.stream)
        group.put(b"first")
        recorder = Recorder(address, place.database, [place.stream])
        loop_reader = asyncio.run(_opened(place.stream_url))
        uses = (
            lambda: put(channel, place.stream, ["never"]),
            lambda: relatum.publish(channel, "", place.stream, b"never"),
            lambda: relatum.intercept(channel.connection, database=place.database, keys=["order_id"]),
            lambda: router.publish(channel, b"never", of_context),
            lambda: contexts.move(["x"], layout.partitions[0].stream),
            lambda: consumer.next_batch(0.1),
            lambda: collector.start(),
            lambda: group.put(b"never"),
            lambda: recorder.run(threading.Event()),
            lambda: asyncio.run(loop_reader.bounds(place.stream)),
        )

        def in_the_child() -> None:
            for use in uses:
                with pytest.raises(UsedAfterFork):
                    use()
            for ended in (router, contexts, consumer, collector, group):
                ended.close()
            relatum.release(channel.connection)

        in_child(in_the_child)
        group.put(b"last", last=True)
        router.publish(channel, b"2", of_context)
        assert consume(consumer, 2) == ["1", "2"]


def test_nothing_that_a_child_closes_or_drops_is_the_parents(place: Place, layout: Layout) -> None:
    """Calls in the parent's threads continue, whatever a child does with its copies of them."""
    address = place.broker
    collector = relatum.MessageCollector("c", database=place.database, broker=address, streams=[place.stream])
    collected: list[str] = []
    collector.register_executor("order", lambda bulk: collected.extend(each.message_id for each in bulk.messages))
    with ExitStack() as stack:
        recorder = stack.enter_context(place.recording(keys=["order_id"]))
        stack.enter_context(collector)
        consumer = relatum.SerialConsumer(layout.super_stream, "c", database=place.database, broker=address)
        stack.enter_context(consumer)
        channel = stack.enter_context(publishing(place.broker, place.database))
        mine: list[Any] = [collector, consumer, channel, recorder, Relations(address, place.database)]

        def drop() -> None:
            for each in mine:
                if each is not channel and hasattr(each, "close"):
                    each.close()
            mine.clear()
            gc.collect()

        in_child(drop)
        in_child(mine.clear)

        def is_recorded_at_once() -> bool:
            # A loop that loses wake-ups is woken by its next timer.
            began, before = time.monotonic(), place.recorded_to()
            place.put(b"at once")
            wait_until(lambda: place.recorded_to() > before, what="the parent's recorder goes on")
            return time.monotonic() - began < 1.0

        in_a_try(is_recorded_at_once, 3, what="recording within a second")
        order = pika.BasicProperties(type="order", message_id="m", headers={"order_id": "after"})
        channel.basic_publish("", place.stream, b"after", order)
        publish_plain(place.amqp, layout.partitions[0].stream, [b"context"])
        wait_for(place, "after")
        wait_until(lambda: collected == ["m"], what="the collector goes on")
        assert consume(consumer, 1) == ["context"]
        mine.pop().close()


async def _opened(stream_url: str) -> AsyncStreamReader:
    reader = await AsyncStreamReader.open(stream_url)
    await reader.close()
    return reader


def test_locks_held_at_the_fork_do_not_stop_the_child(place: Place) -> None:
    """A child works although another thread held locks when the process forked."""
    place.put(b"0")
    with ExitStack() as stack:
        reader = stack.enter_context(StreamReader.open(place.stream_url))
        relations = stack.enter_context(Relations(place.broker, place.database))
        relations.read(place.stream, 0)
        orders = relatum.SuperStream("orders", partitions=4)
        pools = [each._nodes.pool._turns.lock for each in (reader, relations._reader)]
        locks: list[Any] = [_embedded._lock, *pools, orders._lock]
        held, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            with ExitStack() as holding:
                for lock in locks:
                    holding.enter_context(lock)
                held.set()
                let_go.wait(120)

        def use() -> list[Any]:
            publish_in_child(place.broker, place.database, place.stream, ["child"])
            orders.affinity().destination("", b"", None, "")
            return [reader.read(place.stream, 0).body, relations.read(place.stream, 0).body]

        with beside(hold, stop=let_go.set):
            assert held.wait(90)
            assert in_child(use) == [b"0", b"0"]
    wait_for(place, "child")


def test_a_child_that_ends_in_order_leaves_the_parents_connections(place: Place) -> None:
    """At a child's end its interpreter runs finalisers and exit handlers: none of them closes what is the parent's."""
    script = """
import os, sys, relatum
from relatum.reading import StreamReader
from relatum_consumer import Relations
from tests.support.forking import opened
amqp, streams, database, stream = sys.argv[1:]
channel = opened(relatum.Broker(amqp, stream_url=streams), database)
place, = relatum.publish(channel, "", stream, b"before").wait(90)
reader, relations = StreamReader.open(streams), Relations(streams, database)
reader.read(stream, place.offset)
relations.find("order_id", "x")
idle = list(reader._nodes.pool._idle)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
place, = relatum.publish(channel, "", stream, b"after").wait(90)
assert reader.read(stream, place.offset).body == b"after"
relations.find("order_id", "x")
assert reader._nodes.pool._idle == idle, "the parent had to connect again"
"""
    done = run_python("-c", script, place.amqp, place.stream_url, place.database, place.stream)
    assert "Traceback" not in done.stderr, done.stderr


def test_all_workers_of_a_pre_fork_server_record(place: Place) -> None:
    """Gunicorn with --preload: the master publishes before it forks, and each worker's messages are all recorded."""
    port = free_port((0,))
    environment = os.environ | {
        "APP_AMQP": place.amqp,
        "APP_STREAM": place.stream_url,
        "APP_DATABASE": place.database,
        "APP_NAME": place.stream,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "3", "--bind", f"127.0.0.1:{port}"]
    helped = subprocess.run([*command[:3], "--help"], capture_output=True, text=True, check=False).stdout
    command += ["--no-control-socket"] if "control-socket" in helped else []
    command += ["--log-level", "warning", "tests.support.prefork_app:app"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
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
        wait_for(place, *published)
    finally:
        server.send_signal(signal.SIGTERM)
        output = server.communicate(timeout=90)[0]
    assert b"Traceback" not in output, output.decode()
