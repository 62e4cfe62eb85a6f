"""What readers say of streams on three nodes: never that something is not there which was confirmed."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pika
import pytest

from relatum.errors import OffsetNotFound, Transient
from relatum.reading import Agreement, Position, StreamReader, agreement
from relatum.wire._identity import fingerprint
from tests.contract._faces import FACES, open_face
from tests.support import publish_plain, unique_name, wait_until
from tests.support.cluster import NODES, Cluster, on_each_cluster

pytestmark = on_each_cluster


class Publisher:
    """Publishes numbers to a stream, one by one, and counts what was confirmed; goes on after faults.

    A number whose confirm is lost is published again, so the offset of the last one confirmed is at least `confirmed`.
    """

    def __init__(self, cluster: Cluster, stream: str) -> None:
        self._cluster = cluster
        self._stream = stream
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.confirmed = -1

    def _run(self) -> None:
        while not self._ended.is_set():
            for number in NODES:
                try:
                    self._publish(self._cluster.amqp_url(number))
                except (pika.exceptions.AMQPError, OSError):
                    continue

    def _publish(self, url: str) -> None:
        parameters = pika.URLParameters(url)
        parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = 5.0
        connection = pika.BlockingConnection(parameters)
        try:
            channel = connection.channel()
            channel.confirm_delivery()
            while not self._ended.is_set():
                channel.basic_publish("", self._stream, str(self.confirmed + 1).encode())
                self.confirmed += 1
        finally:
            if connection.is_open:
                connection.close()

    @contextmanager
    def running(self) -> Iterator["Publisher"]:
        """Publish meanwhile."""
        self._thread.start()
        try:
            wait_until(lambda: self.confirmed > 20, what="messages that are confirmed")
            yield self
        finally:
            self._ended.set()
            self._thread.join()


@pytest.mark.parametrize("name", FACES)
def test_ends_under_publishing(cluster: Cluster, is_long: bool, name: str) -> None:
    """A stream that is written to is never empty, and never ends before what was confirmed when it was asked."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publisher = Publisher(cluster, stream)
    with publisher.running():
        for number in NODES:
            with open_face(name, cluster.stream_url(number)) as face:
                for turn in range(1_000 if is_long else 60):
                    confirmed = publisher.confirmed
                    bounds = face.bounds(stream)
                    assert bounds.is_proven
                    assert bounds.first == 0
                    assert bounds.last is not None
                    assert bounds.last >= confirmed
                    confirmed = publisher.confirmed
                    assert face.read(stream, confirmed).offset == confirmed
                    confirmed = publisher.confirmed
                    (found,) = face.read_many([(stream, confirmed)])  # type: ignore[list-item]
                    assert found.offset == confirmed
                    if turn % 10 == 0:
                        confirmed = publisher.confirmed
                        messages = face.iterate(stream, max(0, confirmed - 50))
                        assert messages
                        assert messages[-1].offset >= confirmed


@pytest.mark.parametrize("name", FACES)
def test_a_lagging_replica_is_passed_by(cluster: Cluster, name: str) -> None:
    """Read through a node that is held back, a stream has all that was confirmed, and is the one that it was."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, [b"0"])
    cluster.lag(2)
    publish_plain(cluster.amqp_url(1), stream, [b"1", b"2"])
    with open_face(name, cluster.stream_url(2)) as face:
        assert face.bounds(stream) == (0, 2)
        assert face.read(stream, 2).body == b"2"
        assert [message.body for message in face.iterate(stream)] == [b"0", b"1", b"2"]
        assert [found.body for found in face.read_many([(stream, 2), (stream, 0)])] == [b"2", b"0"]  # type: ignore[list-item]
        with pytest.raises(OffsetNotFound) as ended:
            face.read(stream, 3)
        assert ended.value.is_proven
        assert ended.value.last == 2
    with StreamReader.open(cluster.stream_url(2)) as reader:
        assert agreement(reader, stream, Position(2, fingerprint(None, b"2"), None)) is Agreement.SAME
        assert agreement(reader, stream, Position(2, fingerprint(None, b"x"), None)) is Agreement.OTHER
        assert agreement(reader, stream, Position(3, fingerprint(None, b"3"), None)) is Agreement.ENDS_BEFORE


def test_an_empty_stream_is_said_to_be_empty(cluster: Cluster) -> None:
    """Emptiness is said, and proven, through every node; soon."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    for number in NODES:
        with StreamReader.open(cluster.stream_url(number)) as reader:
            bounds = reader.bounds(stream)
            assert bounds == (None, None)
            assert bounds.is_proven


def test_a_leader_that_moves(cluster: Cluster) -> None:
    """While and after a stream gets another leader, nobody says that something is not there."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, [b"0", b"1"])
    with StreamReader.open(cluster.stream_url(3)) as reader:
        assert reader.bounds(stream) == (0, 1)
        cluster.move_leader(stream, 2)
        assert reader.bounds(stream) == (0, 1)
        assert reader.bounds(stream).is_proven


def test_a_frozen_leader(cluster: Cluster) -> None:
    """Where the leader does not answer, the question is unanswered; nobody says that the stream ends, or is empty."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, [b"0", b"1"])
    with StreamReader.open(cluster.stream_url(2), timeout_s=3.0) as reader:
        cluster.freeze(1)
        try:
            bounds = reader.bounds(stream)
        except Transient:
            pass
        else:
            assert bounds == (0, 1)
            assert not bounds.is_proven
        with pytest.raises((Transient, OffsetNotFound)) as unknown:
            reader.read(stream, 2)
        assert not getattr(unknown.value, "is_proven", False)
        cluster.thaw(1)


def test_kills_under_questions(cluster: Cluster, is_long: bool) -> None:
    """While nodes are killed and start, no stream is empty, shorter than what was confirmed, missing, or another."""
    random.seed(14)
    stream, answers, wrong = unique_name(), 0, []
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, [b"first"])
    known_by = Position(0, fingerprint(None, b"first"), None)
    publisher = Publisher(cluster, stream)
    publisher.confirmed = 0
    with publisher.running():
        for _ in range(50 if is_long else 2):
            victim = random.choice(NODES)
            cluster.stop(victim)
            cluster.nodes[victim].launch()
            end = time.monotonic() + 12.0
            while time.monotonic() < end:
                number = random.choice(NODES)
                confirmed = publisher.confirmed
                try:
                    with StreamReader.open(cluster.stream_url(number), timeout_s=4.0) as reader:
                        bounds = reader.bounds(stream)
                        same = agreement(reader, stream, known_by)
                except Transient:
                    continue
                answers += 1
                if bounds.is_proven and (bounds.last is None or bounds.last < confirmed or bounds.first != 0):
                    wrong.append((victim, number, confirmed, bounds))
                if same not in (Agreement.SAME, Agreement.UNKNOWN):
                    wrong.append((victim, number, confirmed, same))
            cluster.nodes[victim].await_answer()
    print(f"{answers} answers, {len(wrong)} wrong")
    assert not wrong
    assert answers
