"""The collector beside replicas that lag: what is not there yet is no other stream, and nothing is collected twice."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum.collecting import Bulk, ExecutorOptions, OutcomeStatus
from tests.support import publish_plain, unique_name, wait_until
from tests.support.cluster import Cluster, on_each_cluster
from tests.support.collectors import COLLECTOR_FACES, collectors_of

pytestmark = on_each_cluster

MESSAGES = 100


@pytest.fixture(params=COLLECTOR_FACES)
def face(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes collectors of each face."""
    with collectors_of(request.param) as make:
        yield make


@pytest.mark.parametrize("joins", [False, True])
def test_a_replica_that_lags_is_no_other_stream(
    cluster: Cluster,
    database_url: str,
    engine: sa.Engine,
    face: Callable[..., Any],
    joins: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A member that starts beside a lagging replica goes on where the collector was: each message is consumed once."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    cluster.lag(2)
    consumed: Counter[bytes] = Counter()

    def execute(bulk: Bulk) -> None:
        consumed.update(each.message.body for each in bulk.messages)

    def collector(node: int) -> Any:
        made = face(name="billing", database=database_url, broker=cluster.amqp_url(node), streams=[stream])
        made.register_executor("order", execute, ExecutorOptions(max_age_s=0.05, joins_transaction=joins))
        return made

    def publish(first: int, stop: int) -> None:
        properties = [pika.BasicProperties(type="order", message_id=str(n)) for n in range(first, stop)]
        bodies = [str(n).encode() for n in range(first, stop)]
        publish_plain(cluster.amqp_url(1), stream, list(zip(bodies, properties, strict=True)))

    publish(0, MESSAGES)
    with collector(1):
        wait_until(lambda: len(consumed) == MESSAGES, what="all consumed")
    publish(MESSAGES, 2 * MESSAGES)
    with ExitStack() as stack:
        lagging = stack.enter_context(collector(2))
        # Whether it waits for its node or reads at the leader: it must not take the stream for another one.
        wait_until(
            lambda: lagging._shared.intake._next or generations(engine) or "cannot be said now" in caplog.text,
            what="followed, or waited with",
        )
        cluster.follow()
        wait_until(lambda: len(consumed) == 2 * MESSAGES, what="the others consumed")
        wait_until(
            lambda: lagging.outcome(str(2 * MESSAGES - 1)).status is OutcomeStatus.SUCCEEDED, what="the last one stored"
        )
    assert set(consumed.values()) == {1}
    assert generations(engine) == 0


def generations(engine: sa.Engine) -> int:
    """How often a stream was taken for another one."""
    with engine.connect() as connection:
        counted = "SELECT count(*) FROM relatum.collector_sources WHERE replaced_at IS NOT NULL"
        return int(connection.execute(sa.text(counted)).scalar_one())
