"""Answers of a cluster whose replicas lag, whose leaders move, and whose nodes are killed, are right or to be repeated.

What is confirmed is never `absent` or `expired`, an intact stream never empty, shorter or another one.
"""

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum.common.ids import fingerprint
from relatum.errors import OffsetNotFound, RelatumError, Transient
from relatum.reading import Agreement, Position, StreamReader, agreement
from relatum.recording import status
from relatum_consumer import Answer, Relations, Status
from tests.contract._faces import FACES, open_face
from tests.support import (
    publish_plain,
    read_plain,
    read_stream,
    record,
    recorded_to,
    recording,
    rows_of,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.cluster import NODES, Cluster
from tests.support.publishing import Load
from tests.support.relations import open_relations

SHARED = 4
"""Messages that share a value."""


def order(number: Any, time_us: int) -> tuple[bytes, dict[str, Any]]:
    return b"order", {"order_id": number, "relatum_time": time_us}


class Publisher(Load):
    """Publishes keyed numbers one by one and again after faults: the last is at `confirmed` or behind it."""

    def __init__(self, cluster: Cluster, stream: str) -> None:
        self._cluster, self._stream, self.confirmed = cluster, stream, -1
        super().__init__()

    def _run(self) -> None:
        while not self._stop.is_set():
            for number in NODES:
                with suppress(pika.exceptions.AMQPError, OSError):
                    self._publish(self._cluster.amqp_url(number))

    def _publish(self, url: str) -> None:
        parameters = pika.URLParameters(url)
        parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = 5.0
        connection = pika.BlockingConnection(parameters)
        try:
            channel = connection.channel()
            channel.confirm_delivery()
            while not self._stop.is_set():
                properties = pika.BasicProperties(headers={"order_id": f"n{self.confirmed + 1}"})
                channel.basic_publish("", self._stream, b"", properties)
                self.confirmed += 1
                self._stop.wait(0.002)  # Three nodes need a processor for it, and the callers need one too.
        finally:
            if connection.is_open:
                connection.close()


@pytest.mark.parametrize("face", FACES)
def test_a_lagging_replica_makes_no_reader_wrong(cluster: Cluster, face: str) -> None:
    """Read through a node that is held back, a stream has all that was confirmed, and is the one that it was."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, [b"0"])
    assert read_plain(cluster.amqp_url(2), stream, 1) == [b"0"]
    cluster.lag(2)
    publish_plain(cluster.amqp_url(1), stream, [b"1", b"2"])
    assert read_plain(cluster.amqp_url(2), stream, 2, more_s=1.0) == [b"0"], "the node is not held back"
    with open_face(face, cluster.stream_url(2)) as reader:
        assert reader.bounds(stream) == (0, 2)
        assert reader.read(stream, 2).body == b"2"
        assert [message.body for message in reader.iterate(stream)] == [b"0", b"1", b"2"]
        assert [found.body for found in reader.read_many([(stream, 2), (stream, 0)])] == [b"2", b"0"]  # type: ignore[list-item]
        with pytest.raises(OffsetNotFound) as ended:
            reader.read(stream, 3)
        assert (ended.value.is_proven, ended.value.last) == (True, 2)
    with StreamReader.open(cluster.stream_url(2)) as blocking:
        assert agreement(blocking, stream, Position(2, fingerprint(None, b"2"), None)) is Agreement.SAME
        assert agreement(blocking, stream, Position(2, fingerprint(None, b"x"), None)) is Agreement.OTHER
        assert agreement(blocking, stream, Position(3, fingerprint(None, b"3"), None)) is Agreement.OTHER


@pytest.mark.parametrize("face", FACES)
def test_a_lagging_replica_makes_no_answer_wrong(cluster: Cluster, engine: sa.Engine, face: str) -> None:
    """All that is recorded is found, by key and by time; what is not is not absent, and found where all is read."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, [order("a", 1_000_000)])
    with open_relations(face, cluster.amqp_url(2), engine.url) as relations:
        wait_until(lambda: relations.read(stream, 0).offset == 0, what="the replica's first message")
        cluster.lag(2)
        publish_plain(cluster.amqp_url(1), stream, [order("b", 2_000_000), order("a", 3_000_000)])
        record(cluster.amqp_url(1), engine, stream, keys=["order_id"])
        first = relations.read(stream, 0)
        assert relations.find("order_id", "b").ids == ((stream, 1),)
        assert relations.find("order_id", "b", complete=True).ids == ((stream, 1),)
        assert relations.related(first).ids == ((stream, 2),)
        assert relations.after(first, stream).ids == ((stream, 1),)
        assert relations.window(first, stream, after_s=60).ids == ((stream, 1), (stream, 2))
        assert relations.around(first, stream, after_s=60).ids == ((stream, 0), (stream, 1), (stream, 2))
        traced = relations.trace(first, by="order_id", complete=True)
        assert ([each.id for each in traced], traced.status) == ([(stream, 0), (stream, 2)], Status.FOUND)
        publish_plain(cluster.amqp_url(1), stream, [order("c", 4_000_000)])
        assert relations.find("order_id", "c").status is Status.NOT_RECORDED_YET
        assert relations.find("order_id", "c", complete=True).ids == ((stream, 3),)
        assert relations.find("order_id", "z", complete=True).status is Status.ABSENT
        assert relations.trace(("order_id", "c")).status is Status.NOT_RECORDED_YET
        assert [each.id for each in relations.trace(("order_id", "c"), complete=True)] == [(stream, 3)]
        moment = datetime.fromtimestamp(3.5, UTC)
        assert relations.around(moment, stream, after_s=60).status is Status.NOT_RECORDED_YET
        assert relations.around(moment, stream, after_s=60, complete=True).ids == ((stream, 3),)
        record(cluster.amqp_url(1), engine, stream)
        assert relations.find("order_id", "z").status is Status.ABSENT


def ended(ask: Callable[[], Answer]) -> str:
    """How a lookup ended: its status, with less than all where a part is missing; `Transient`; or another error."""
    try:
        answer = ask()
    except Transient:
        return "Transient"
    except RelatumError as error:
        return type(error).__name__
    if answer.status is Status.FOUND and len(answer) not in (1, SHARED):
        return f"found {len(answer)}"
    return str(answer.status)


@pytest.mark.parametrize("face", FACES)
def test_what_is_confirmed_is_at_each_node(cluster: Cluster, engine: sa.Engine, face: str, is_long: bool) -> None:
    """Through any node a stream is proven empty at first and ends at no earlier message than one confirmed."""
    stream, seen = unique_name(), Counter[str]()
    cluster.declare(stream, leader=1)
    with ExitStack() as stack:
        readers = [stack.enter_context(open_face(face, cluster.stream_url(node))) for node in NODES]
        asked = [stack.enter_context(open_relations(face, cluster.amqp_url(node), engine.url)) for node in NODES]
        for reader in readers:
            assert (reader.bounds(stream), reader.bounds(stream).is_proven) == ((None, None), True)
        stack.enter_context(recording(cluster.amqp_url(1), engine, stream, keys=["order_id"]))
        it = stack.enter_context(Publisher(cluster, stream))
        wait_until(lambda: it.confirmed > 20 and recorded_to(engine, stream) > 0, what="recorded messages")
        for turn in range(1_000 if is_long else 15):
            for reader, relations in zip(readers, asked, strict=True):
                confirmed = it.confirmed
                bounds = reader.bounds(stream)
                assert (bounds.is_proven, bounds.first) == (True, 0)
                assert bounds.last is not None
                assert bounds.last >= confirmed
                confirmed = it.confirmed
                assert reader.read(stream, confirmed).offset == confirmed
                confirmed = it.confirmed
                (found,) = reader.read_many([(stream, confirmed)])  # type: ignore[list-item]
                assert found.offset == confirmed
                if turn % 5 == 0:
                    confirmed = it.confirmed
                    assert reader.iterate(stream, max(0, confirmed - 50))[-1].offset >= confirmed
                value, complete = f"n{it.confirmed}", turn % 3 > 0
                how = ended(lambda: relations.find("order_id", value, complete=complete))  # noqa: B023
                seen[f"{how}, complete" if complete else how] += 1
    assert set(seen) <= {"found", "found, complete", "not_recorded_yet"}, seen


# Faults that need a node to restart come last.
def test_a_leader_that_moves_or_stands_still(cluster: Cluster) -> None:
    """While and after it moves nothing is said not to be there; while it does not answer, nothing is proven."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, [b"0", b"1"])
    with StreamReader.open(cluster.stream_url(3), timeout_s=3.0) as reader:
        cluster.freeze(1)
        try:
            bounds = reader.bounds(stream)
        except Transient:
            pass
        else:
            assert (bounds, bounds.is_proven) == ((0, 1), False)
        with pytest.raises((Transient, OffsetNotFound)) as unknown:
            reader.read(stream, 2)
        assert not getattr(unknown.value, "is_proven", False)
        cluster.thaw(1)
    with StreamReader.open(cluster.stream_url(3)) as reader:
        assert reader.bounds(stream) == (0, 1)
        cluster.move_leader(stream, 2)
        assert (reader.bounds(stream), reader.bounds(stream).is_proven) == ((0, 1), True)


def test_faults_make_no_answer_wrong(cluster: Cluster, engine: sa.Engine, harm_s: float, chance: random.Random) -> None:
    """While nodes fail or lag, answers are right or to be repeated, and a recorder writes each message once."""
    recorded, written = unique_name(), unique_name()
    for stream in (recorded, written):
        cluster.declare(stream, leader=1)
    values = [f"v{n}" for n in range(25)]
    publish_plain(cluster.amqp_url(1), recorded, [order(value, n) for n in range(SHARED) for value in values])
    record(cluster.amqp_url(1), engine, recorded, keys=["order_id"])
    publish_plain(cluster.amqp_url(1), written, [b"first"])
    known_by = Position(0, fingerprint(None, b"first"), None)
    seen, faults = Counter[str](), Counter[str]()
    wrong: list[Any] = []

    def find(node: int) -> str:
        value, complete = chance.choice(values), chance.random() < 0.5
        try:
            with Relations(cluster.amqp_url(node), engine.url, timeout_s=5) as relations:
                how = ended(lambda: relations.find("order_id", value, complete=complete))
        except Transient:
            how = "Transient"
        seen[how] += 1
        return how

    def read(node: int) -> bool:
        confirmed = it.confirmed
        try:
            with StreamReader.open(cluster.stream_url(node), timeout_s=4.0) as reader:
                bounds, same = reader.bounds(written), agreement(reader, written, known_by)
        except Transient:
            return False
        if bounds.is_proven and (bounds.last is None or bounds.last < confirmed or bounds.first != 0):
            wrong.append((node, confirmed, bounds))
        if same not in (Agreement.SAME, Agreement.UNKNOWN):
            wrong.append((node, confirmed, same))
        return True

    def harm(node: int, ask: Callable[[], Any]) -> None:
        fault = chance.choice(("kill", "freeze", "lag")) if faults else "kill"
        print(time.strftime("%H:%M:%S"), fault, node)
        faults[fault] += 1
        if fault == "kill":
            cluster.stop(node)
            ask()
            cluster.nodes[node].launch()
        elif fault == "freeze":
            cluster.freeze(node)
            ask()
            cluster.thaw(node)
        else:
            cluster.lag(node)
            ask()
            cluster.follow()

    urls = ";".join(cluster.amqp_url(node) for node in NODES)
    with Publisher(cluster, written) as it, recording(urls, engine, written, keys=["order_id"]):
        wait_until(lambda: it.confirmed > 20, what="messages that are confirmed")
        end = time.monotonic() + harm_s
        while not faults or time.monotonic() < end:
            harmed = chance.choice(NODES)
            other = chance.choice([number for number in NODES if number != harmed])
            harm(harmed, lambda: [(find(number), read(number)) for number in (harmed, other)])  # noqa: B023
            until = time.monotonic() + 8.0
            wait_until(
                lambda: (
                    all([read(chance.choice(NODES)), find(harmed) == "found", find(other) == "found"])  # noqa: B023
                    and time.monotonic() > until  # noqa: B023
                ),
                limit_s=240,
                what="answers of the node that was harmed",
            )
            cluster.nodes[harmed].await_answer()
        it.stop()
        # AMQP reads a stream only where it has a replica: its leader has one, other nodes may still be starting theirs.
        wait_until(lambda: cluster.leader_of(written) is not None, what="the leader")
        log = read_stream(cluster.amqp_url(cluster.leader_of(written) or 1), written)
        messages = [(each.headers.get("order_id"), each.offset) for each in log]
        wait_recorded(cluster.amqp_url(1), engine, written)
    assert not wrong
    assert set(seen) <= {"found", "unproven", "Transient"}, seen
    in_table = [(value, offset) for _, value, offset in rows_of(engine, written)]
    assert in_table == messages[1:]
    assert {value for value, _ in in_table} >= {f"n{number}" for number in range(it.confirmed + 1)}
    (found,) = status(cluster.amqp_url(1), engine.url, [written])
    assert (found.events, found.generation, found.gaps) == ([], 1, [])
    print(f"{len(messages)} messages, {dict(faults)}, {dict(seen)}")
