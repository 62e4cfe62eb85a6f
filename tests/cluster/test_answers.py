"""Look-ups on a cluster: replicas that lag, last chunks that are not committed yet, nodes that are killed and boot.

Whatever goes wrong, an answer is right or an error that says to repeat it: a message that is confirmed is never
`absent` or `expired`, an intact stream never `StreamReplaced`, and an answer never holds a part of what is recorded.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum.errors import RelatumError, Transient
from relatum_consumer import Answer, Relations, Status
from tests.support import (
    broker_connection,
    publish_plain,
    record,
    recorded_to,
    recording,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.cluster import NODES, Cluster, on_each_cluster
from tests.support.publishing import Load
from tests.support.relations import FACES, open_relations

pytestmark = on_each_cluster

SHARED = 4
"""Messages that share a value."""


def order(number: Any, time_us: int) -> tuple[bytes, dict[str, Any]]:
    """A message with a key and a time."""
    return b"order", {"order_id": number, "relatum_time": time_us}


@pytest.fixture(params=FACES)
def on_node(request: pytest.FixtureRequest, cluster: Cluster, database_url: str) -> Callable[..., Any]:
    """Look-ups through a node, by each face."""

    @contextmanager
    def opened(number: int, **options: Any) -> Iterator[Relations]:
        with open_relations(request.param, cluster.amqp_url(number), database_url, **options) as relations:
            yield relations

    return opened


# --- a lagging replica ------------------------------------------------------------------------------------


def test_a_lagging_replica_makes_no_answer_wrong(cluster: Cluster, engine: sa.Engine, on_node: Any) -> None:
    """Through a node that has only the first message: all is found, by key and by time, and only that is absent."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, [order("a", 1_000_000)])
    with on_node(2) as relations, recording(cluster.amqp_url(1), engine, stream, keys=["order_id"]):
        wait_until(lambda: relations.read(stream, 0).offset == 0, what="the replica's first message")
        cluster.lag(2)
        try:
            publish_plain(cluster.amqp_url(1), stream, [order("b", 2_000_000), order("a", 3_000_000)])
            wait_recorded(cluster.amqp_url(1), engine, stream)
            first = relations.read(stream, 0)
            assert relations.find("order_id", "b").ids == ((stream, 1),)
            assert relations.find("order_id", "b", complete=True).ids == ((stream, 1),)
            assert relations.related(first).ids == ((stream, 2),)
            assert relations.after(first, stream).ids == ((stream, 1),)
            assert relations.window(first, stream, after_s=60).ids == ((stream, 1), (stream, 2))
            assert relations.around(first, stream, after_s=60).ids == ((stream, 0), (stream, 1), (stream, 2))
            traced = relations.trace(first, by="order_id", complete=True)
            assert [each.id for each in traced] == [(stream, 0), (stream, 2)]
            assert traced.status is Status.FOUND
            assert relations.find("order_id", "z").status is Status.ABSENT
        finally:
            cluster.follow()


def test_what_a_lagging_replica_does_not_show_is_not_absent(cluster: Cluster, engine: sa.Engine, on_node: Any) -> None:
    """A message that is neither recorded nor on the node: not recorded yet, and found where all is to be read."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, [order("a", 1_000_000)])
    record(cluster.amqp_url(1), engine, stream, keys=["order_id"])
    cluster.lag(2)
    try:
        publish_plain(cluster.amqp_url(1), stream, [order("b", 2_000_000)])
        with on_node(2) as relations:
            assert relations.find("order_id", "b").status is Status.NOT_RECORDED_YET
            assert relations.find("order_id", "b", complete=True).ids == ((stream, 1),)
            assert relations.find("order_id", "z", complete=True).status is Status.ABSENT
            assert relations.trace(("order_id", "b")).status is Status.NOT_RECORDED_YET
            assert [each.id for each in relations.trace(("order_id", "b"), complete=True)] == [(stream, 1)]
            moment = datetime.fromtimestamp(1.5, UTC)
            assert relations.around(moment, stream, after_s=60).status is Status.NOT_RECORDED_YET
            assert relations.around(moment, stream, after_s=60, complete=True).ids == ((stream, 1),)
    finally:
        cluster.follow()


# --- publishing meanwhile ---------------------------------------------------------------------------------


def ended(ask: Callable[[], Answer]) -> str:
    """How a look-up ended: its status, with less than all where a part is missing; `Transient`; or another error."""
    try:
        answer = ask()
    except Transient:
        return "Transient"
    except RelatumError as error:
        return type(error).__name__
    if answer.status is Status.FOUND and len(answer) not in (1, SHARED):
        return f"found {len(answer)}"
    return str(answer.status)


class Publisher(Load):
    """Publishes values one after the other, each confirmed."""

    def __init__(self, url: str, stream: str) -> None:
        self._url, self._stream = url, stream
        super().__init__()

    def _run(self) -> None:
        with broker_connection(self._url) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            while not self._stop.is_set():
                headers = {"order_id": f"n{self.published}"}
                channel.basic_publish("", self._stream, b"", pika.BasicProperties(headers=headers))
                self.published += 1


def test_what_is_confirmed_is_found_while_more_is_published(
    cluster: Cluster, engine: sa.Engine, on_node: Any, is_long: bool
) -> None:
    """Nothing fails here: through any node, the message confirmed last is found or not recorded yet, never absent."""
    stream, chance = unique_name(), random.Random(14)
    cluster.declare(stream, leader=1)
    told: Counter[str] = Counter()
    with (
        recording(cluster.amqp_url(1), engine, stream, keys=["order_id"]),
        Publisher(cluster.amqp_url(1), stream) as it,
    ):
        wait_until(lambda: it.published > 10 and recorded_to(engine, stream) > 0, what="recorded messages")
        with on_node(1) as first, on_node(2) as second, on_node(3) as third:
            for number in range(5_000 if is_long else 150):
                relations, value = chance.choice([first, second, third]), f"n{it.published - 1}"
                complete = number % 3 > 0
                how = ended(lambda: relations.find("order_id", value, complete=complete))  # noqa: B023
                told[f"{how}, complete" if complete else how] += 1
    print(f"\n{dict(told)}, {it.published} published")
    assert set(told) <= {"found", "found, complete", "not_recorded_yet"}, told


# --- kills ------------------------------------------------------------------------------------------------


def test_kills_under_questions_make_no_answer_wrong(cluster: Cluster, engine: sa.Engine, is_long: bool) -> None:
    """While nodes are killed and boot, asked through that node and others: right, or to be repeated."""
    stream, chance = unique_name(), random.Random(50)
    cluster.declare(stream, leader=1)
    values = [f"v{n}" for n in range(25)]
    publish_plain(cluster.amqp_url(1), stream, [order(value, n) for n in range(SHARED) for value in values])
    record(cluster.amqp_url(1), engine, stream, keys=["order_id"])
    told: Counter[str] = Counter()

    def ask(number: int) -> str:
        value, complete = chance.choice(values), chance.random() < 0.5
        try:
            with Relations(cluster.amqp_url(number), engine.url, timeout_s=5) as relations:
                how = ended(lambda: relations.find("order_id", value, complete=complete))
        except Transient:
            how = "Transient"
        told[how] += 1
        return how

    for _ in range(50 if is_long else 3):
        killed = chance.choice(NODES)
        other = chance.choice([number for number in NODES if number != killed])
        cluster.stop(killed)
        for number in (killed, other):
            ask(number)
        cluster.nodes[killed].launch()
        wait_until(
            lambda: ask(killed) == "found" and ask(other) == "found",  # noqa: B023
            limit_s=240,
            what="answers of the node that was killed",
        )
        cluster.nodes[killed].await_answer()
    print(f"\n{dict(told)}")
    wrong = {how: count for how, count in told.items() if how not in {"found", "unproven", "Transient"}}
    assert not wrong, told
