"""The firehose's carrier is killed, cut off and held up, and its broker dies: what docs/tap.md promises then."""

import multiprocessing
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pika import BasicProperties

from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader
from relatum.superstreams import StreamOptions, _connections
from relatum.tapping import Firehose, tap_firehose
from relatum.tapping._firehose import PENDING_MAX
from tests.support import broker_connection, unique_name, wait_until
from tests.support.proxy import Proxy
from tests.support.publishing import Load
from tests.support.rabbitmq_tools import evaluate
from tests.support.tapped import carrying

SMALL = StreamOptions(max_length_bytes=100_000_000)
A_TURN = 20
"""Messages that are published between two looks."""


@pytest.fixture
def server(traced_broker: LocalRabbitMQ) -> LocalRabbitMQ:
    """A broker of this module, whose firehose is on."""
    return traced_broker


@pytest.fixture
def url(server: LocalRabbitMQ) -> str:
    """The broker's URL."""
    return server.broker_url


@pytest.fixture
def stream(url: str, database_url: str) -> str:
    """A stream of the firehose."""
    name = unique_name("hose")
    tap_firehose(url, database_url, stream=name, options=SMALL)
    return name


class Publishing(Load):
    """Publishes numbers to the default exchange, each with a confirm."""

    def __init__(self, url: str) -> None:
        self._url = url
        super().__init__()

    def _run(self) -> None:
        with broker_connection(self._url) as connection:
            channel = connection.channel()
            while not self._stop.wait(0.02):
                for _ in range(A_TURN):
                    headers = {"number": self.published}
                    channel.basic_publish("", "nowhere", b"", BasicProperties(headers=headers))
                    self.published += 1


def numbers(server: LocalRabbitMQ, stream: str) -> list[int]:
    """What lies in a stream."""
    with StreamReader.open(server.stream_url) as reader:
        return [int(str(message.headers["number"])) for message in reader.iterate(stream)]


def carry(url: str, stream: str) -> None:
    """The whole life of a carrier, in a process of its own."""
    Firehose(url, stream).run(threading.Event())


@contextmanager
def carrier(url: str, stream: str) -> Iterator[None]:
    """A carrier that is killed at the end."""
    process = multiprocessing.get_context("spawn").Process(target=carry, args=(url, stream))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def first_seen(found: list[int]) -> list[int]:
    """Each number where it came first."""
    return list(dict.fromkeys(found))


def test_nothing_is_lost_where_the_carrier_is_killed_and_little_is_there_twice(
    server: LocalRabbitMQ, url: str, stream: str, kills: int, chance: random.Random
) -> None:
    """All that was published, in its order; so many at most come again for each death."""
    with StreamReader.open(server.stream_url) as reader:

        def last() -> int:
            return reader.bounds(stream).last or 0

        with Publishing(url) as load:
            for _ in range(kills):
                with carrier(url, stream):
                    until = last() + chance.randrange(1, 500)
                    wait_until(lambda until=until: last() >= until, what="messages carried")
        with carrying(url, stream):
            wait_until(lambda: numbers(server, stream)[-1] == load.published - 1, what="the last of them", every_s=0.5)
    found = numbers(server, stream)
    assert first_seen(found) == list(range(load.published))
    assert len(found) - load.published <= kills * PENDING_MAX


def test_a_link_that_is_silent_for_longer_than_heartbeats_loses_nothing(
    server: LocalRabbitMQ, url: str, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is for a carrier that stands still, too: the broker gives it up, and it begins anew."""
    monkeypatch.setattr(_connections, "HEARTBEAT_S", 1)
    with Publishing(url) as load, Proxy.to(url) as proxy, carrying(proxy.url(url), stream) as firehose:

        def carried() -> int:
            return firehose.counts().carried

        for mode in ("blackhole", "frozen", "pass"):
            before = carried()
            wait_until(lambda before=before: carried() > before, what="carrying")
            opened, proxy.mode = proxy.opened, mode
            if mode == "frozen":
                wait_until(lambda: not consumers(url, stream), what="the broker giving it up")
                proxy.mode = "pass"
            if mode != "pass":
                wait_until(lambda opened=opened: proxy.opened > opened, what="another connection")
                proxy.mode = "pass"
    with carrying(url, stream):
        wait_until(lambda: numbers(server, stream)[-1] == load.published - 1, what="the last of them", every_s=0.5)
    assert first_seen(numbers(server, stream)) == list(range(load.published))


def consumers(url: str, stream: str) -> int:
    """Who carries."""
    with broker_connection(url) as connection:
        count: int = connection.channel().queue_declare(f"{stream}.firehose", passive=True).method.consumer_count
        return count


def test_no_message_is_blamed_for_a_stream_that_confirms_nothing(
    server: LocalRabbitMQ, url: str, database_url: str
) -> None:
    """A broker ends channels that do not acknowledge for long, in the words of a refusal; all is carried afterwards."""
    named = "{{consumer_timeout, {0}}}, {{channel_tick_interval, {1}}}"
    limits = f"[application:set_env(rabbit, N, V) || {{{{N, V}}}} <- [{named}]]"
    writers = "[sys:{0}(P) || {{_, P, _, _}} <- supervisor:which_children(osiris_server_sup), is_pid(P)]"
    evaluate(server, limits.format(500, 500))
    stream = unique_name("hose")
    tap_firehose(url, database_url, stream=stream, options=SMALL)
    try:
        with broker_connection(url) as connection:
            for number in range(3):
                connection.channel().basic_publish("", "nowhere", b"", BasicProperties(headers={"number": number}))
        evaluate(server, writers.format("suspend"))
        ways: set[object] = set()
        with carrying(url, stream) as firehose:

            def ended() -> int:
                ways.add(firehose._way)
                return len(ways)

            wait_until(lambda: ended() > 4, what="channels that were ended")
            evaluate(server, writers.format("resume"))
            wait_until(lambda: firehose.counts().carried >= 3, what="all of them")
            assert firehose.counts().refused == 0
    finally:
        evaluate(server, limits.format(1_800_000, 60_000))
    assert first_seen(numbers(server, stream)) == [0, 1, 2]


def test_a_broker_that_stops_takes_the_waiting_copies_with_it(server: LocalRabbitMQ, url: str, stream: str) -> None:
    """The firehose publishes transient messages; what was carried stays, and the carrier goes on by itself."""
    with carrying(url, stream), Publishing(url) as load:
        wait_until(lambda: len(numbers(server, stream)) > A_TURN, what="copies", every_s=0.5)
    with carrying(url, stream):
        wait_until(lambda: numbers(server, stream)[-1] == load.published - 1, what="the last of them", every_s=0.5)
    with Publishing(url) as waits:
        wait_until(lambda: waits.published, what="copies that wait")
    before = numbers(server, stream)
    with carrying(url, stream):
        server.restart()
        wait_until(lambda: consumers(url, stream), what="the carrier")
        evaluate(server, 'rabbit_trace:start(<<"/">>)')
        with broker_connection(url) as connection:
            connection.channel().basic_publish("", "nowhere", b"", BasicProperties(headers={"number": -1}))
        wait_until(lambda: numbers(server, stream)[-1] == -1, what="what comes afterwards")
    assert numbers(server, stream)[: len(before)] == before
