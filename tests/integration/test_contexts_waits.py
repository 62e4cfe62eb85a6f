"""Moves that wait before their fence: for how long, and which mover continues them when theirs is gone."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import aio_pika
import pika
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel

from relatum import Broker
from relatum.contexts import (
    AsyncContextRouter,
    ContextOptions,
    ContextRouter,
    MoveProgress,
    MoveState,
    SerializationContexts,
)
from relatum.contexts._partition_log import Fence, encode
from relatum.errors import BrokerUnavailable, ContextMoving, MoveConflict
from relatum.superstreams import Layout
from tests.support import wait_until
from tests.support.leases import let_lapse
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.routing import HeldMove, confirming, consumed, of_context, other_than
from tests.support.standstill import in_time
from tests.support.threads import beside

PARTITIONS = 2


@pytest.fixture
def router(layout: Layout, database_url: str, amqp_url: str) -> Iterator[ContextRouter]:
    with ContextRouter(layout.super_stream, database_url, broker=amqp_url) as opened:
        opened.open()
        yield opened


def test_who_publishes_asks_no_more(
    router: ContextRouter, channel: BlockingChannel, layout: Layout, place: Place
) -> None:
    """Publishing asks PostgreSQL nothing while the router looks for changes; without its clock, once a message."""

    def told_by_the_clock() -> bool:
        asked, until = router.statistics().asked, time.monotonic() + 0.5
        while time.monotonic() < until:
            router.publish(channel, b"", of_context("x"))
        return router.statistics().asked == asked

    wait_until(told_by_the_clock, what="messages that ask for nothing")
    options = ContextOptions(trust_clock=False)
    with ContextRouter(layout.super_stream, place.database, options) as asking:
        for _ in range(5):
            asking.publish(channel, b"", of_context("x"))
        assert asking.statistics().asked == 5


def test_moves_go_on_as_soon_as_publishers_know(
    router: ContextRouter, contexts: SerializationContexts, channel: BlockingChannel, layout: Layout, place: Place
) -> None:
    """A context that moves while it is published to, by a router that trusts its clock, stays in order."""
    home = layout.route("x").stream
    bodies = [b"0"]
    router.publish(channel, b"0", of_context("x"))
    with ThreadPoolExecutor(1) as pool:
        moves = pool.submit(lambda: [contexts.move(["x"], to) for to in 3 * [other_than(layout, home), home]])
        while not moves.done():
            bodies.append(b"%d" % len(bodies))
            router.publish(channel, bodies[-1], of_context("x"))
        moves.result()
    assert consumed(layout.super_stream, place.database, place.amqp, len(bodies)) == {"x": bodies}


def test_movers_that_do_not_wait_are_refused(
    router: ContextRouter, contexts: SerializationContexts, channel: BlockingChannel, layout: Layout, place: Place
) -> None:
    """A mover of an earlier release cannot begin a move, and cannot fence one that waits."""
    router.publish(channel, b"1", of_context("x"))
    old = (
        "INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, contexts, fence_epoch, epoch, "
        "scan_from, target_scan_from) SELECT super_stream_id, 1, 2, 1, 9, 9, 0, 0 FROM relatum.super_streams "
        "WHERE name = :name RETURNING move_id"
    )
    with pytest.raises(sa.exc.IntegrityError, match="NotNullViolation"):
        place.sql(old, name=layout.super_stream)
    with HeldMove(contexts, ["x"], other_than(layout, layout.route("x").stream), "fencing", place.engine) as held:
        held.begin()
        (move,) = contexts.moves()
        assert move.fence_epoch == 0
        # They resume it: look, publish the fence under its epoch, find it, and store its offset.
        headers, body = encode(Fence(move.move_id, move.fence_epoch, frozenset("x")))
        channel.basic_publish("", move.source, body, pika.BasicProperties(headers=headers))
        fence = "UPDATE relatum.context_moves SET state = 'fenced', fence_offset = 5 WHERE move_id = :move_id"
        with pytest.raises(sa.exc.IntegrityError, match="context_moves_waited"):
            place.sql(fence, move_id=move.move_id)
        held.go()
    (ended,) = contexts.moves(latest=1)
    assert (ended.state, ended.fence_epoch > 0) == (MoveState.SWITCHED, True)
    router.publish(channel, b"2", of_context("x"))
    assert consumed(layout.super_stream, place.database, place.amqp, 2) == {"x": [b"1", b"2"]}


TAKEN = "its mover no longer renews the lease"


class Dies(Exception):
    """The mover dies."""


@pytest.fixture
def c(contexts: SerializationContexts) -> SerializationContexts:
    """Contexts of which "c" and "d" are in the first partition."""
    contexts.assign(["c", "d"], f"{contexts.super_stream}-0")
    return contexts


@pytest.fixture(params=[MoveState.FENCING, MoveState.FENCED])
def move_id(request: pytest.FixtureRequest, c: SerializationContexts, engine: sa.Engine) -> int:
    """A move of "c" whose mover died in this state, longer ago than it counts as attended."""
    return leave(c, engine, request.param)


def leave(c: SerializationContexts, engine: sa.Engine, state: MoveState = MoveState.FENCING) -> int:
    """Begin a move of "c", and die when it has come to a state; gives the move's number."""

    def die(progress: MoveProgress) -> None:
        if progress.move.state is state:
            raise Dies

    with pytest.raises(Dies):
        c.move("c", f"{c.super_stream}-1", progress=die)
    let_lapse(engine)
    [left] = c.moves()
    return left.move_id


def state_of(c: SerializationContexts, move_id: int) -> MoveState:
    return next(each.state for each in c.moves(latest=9) if each.move_id == move_id)


async def test_an_asyncio_router_goes_on_with_a_move_its_message_waits_for(
    move_id: int, c: SerializationContexts, amqp_url: str, database_url: str
) -> None:
    """An asyncio router that publishes to a context whose mover died ends the move."""
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        async with AsyncContextRouter(c.super_stream, database_url) as router:
            await router.publish(channel, aio_pika.Message(b"c1", headers={"serialization_context": "c"}))
    assert state_of(c, move_id) is MoveState.SWITCHED


def test_a_mover_ends_it_before_its_own(move_id: int, c: SerializationContexts) -> None:
    """Moving a context ends an abandoned move of it first."""
    [back] = c.move("c", f"{c.super_stream}-0")
    assert state_of(c, move_id) is back.state is MoveState.SWITCHED


def test_one_of_many_goes_on_with_it(
    move_id: int, c: SerializationContexts, amqp_url: str, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One of several publishers that wait for an abandoned move ends it."""

    def publish(_number: int) -> None:
        with confirming(amqp_url) as channel, ContextRouter(c.super_stream, database_url) as router:
            router.publish(channel, b"c", of_context("c"))

    with caplog.at_level(logging.WARNING, "relatum.contexts"), ThreadPoolExecutor(6) as pool:
        list(pool.map(publish, range(6)))
    assert state_of(c, move_id) is MoveState.SWITCHED
    said = [each.getMessage() for each in caplog.records if TAKEN in each.getMessage()]
    assert said == [f"resuming move {move_id}: {TAKEN}"]


def test_a_mover_that_lives_says_so(c: SerializationContexts, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover that waits keeps its move attended."""
    monkeypatch.setattr("relatum.contexts._mover.MOVE_WAIT_S", 90.0)
    with beside(c.move, "c", f"{c.super_stream}-1", stop=monkeypatch.undo):
        wait_until(lambda: bool(c.moves()), what="the mover waits")
        let_lapse(place.engine)
        wait_until(lambda: c.moves()[0].is_attended, what="it is said that somebody is there")
    assert c.moves() == []


def test_a_router_that_may_not_go_on_leaves_it_to_others(
    c: SerializationContexts, channel: BlockingChannel, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A router without the right to end a move logs that once, and its message fails with `ContextMoving`."""
    leave(c, place.engine)
    place.sql("REVOKE UPDATE ON relatum.context_moves FROM relatum_router")
    as_router = f"{place.database}?options=-crole%3Drelatum_router"
    with ContextRouter(c.super_stream, as_router, ContextOptions(timeout_s=2.5)) as router:
        with pytest.raises(ContextMoving):
            router.publish(channel, b"c1", of_context("c"))
        router.publish(channel, b"d1", of_context("d"))
    assert not c.moves()[0].state.is_ended
    assert caplog.text.count("AccessRefused") == 1


def test_going_on_with_a_move_ends_with_the_time_out(
    c: SerializationContexts, channel: BlockingChannel, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A router that ends a move waits for a row lock no longer than its time-out, and does not call PostgreSQL away."""
    leave(c, place.engine)
    options = ContextOptions(timeout_s=4.0)
    with place.engine.begin() as connection, ContextRouter(c.super_stream, place.database, options) as router:
        connection.execute(sa.text("SELECT FROM relatum.placements WHERE name = 'c' FOR UPDATE"))
        with in_time(4.0), pytest.raises(ContextMoving):
            router.publish(channel, b"c1", of_context("c"))
    assert TAKEN in caplog.text
    assert "is unavailable; retrying" not in caplog.text


def test_an_abandoned_move_is_retried_no_longer_than_others(
    c: SerializationContexts, engine: sa.Engine, amqp_url: str, stream_url: str, database_url: str
) -> None:
    """A mover retries the steps of an abandoned move for `retry_s`, as those of its own."""
    leave(c, engine)
    with Proxy.to(amqp_url) as proxy:
        broker = Broker(proxy.url(amqp_url), stream_url=stream_url)
        with SerializationContexts(c.super_stream, database_url, broker=broker, retry_s=0.1) as others:
            proxy.accepts = False
            began = time.monotonic()
            with pytest.raises(MoveConflict):
                others.move("c", f"{c.super_stream}-0")
            assert time.monotonic() - began < 20


def test_without_a_broker_no_move_begins(c: SerializationContexts, database_url: str) -> None:
    """Only the steps of a move that has begun are retried."""
    nowhere = Broker("amqp://127.0.0.1:1", stream_url="rabbitmq-stream://127.0.0.1:1")
    others = SerializationContexts(c.super_stream, database_url, broker=nowhere)
    with others, in_time(2), pytest.raises(BrokerUnavailable):
        others.move("c", f"{c.super_stream}-0")
    assert not c.moves(latest=1)


def test_a_move_to_a_deleted_stream_is_not_called_ended(
    c: SerializationContexts, channel: BlockingChannel, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A router that cannot end an abandoned move logs why: its target's stream is gone."""
    leave(c, place.engine, MoveState.FENCED)
    channel.queue_delete(f"{c.super_stream}-1")
    options = ContextOptions(timeout_s=2.5)
    caplog.set_level(logging.INFO)
    with ContextRouter(c.super_stream, place.database, options) as router, pytest.raises(ContextMoving):
        router.publish(channel, b"c1", of_context("c"))
    assert "another mover" not in caplog.text
    assert f"there is no stream '{c.super_stream}-1'".lower() in caplog.text.lower()
