"""A move whose mover is gone is gone on with by a router that waits for it, or by a mover; by one of them."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import aio_pika
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel

from relatum.contexts import (
    AsyncContextRouter,
    ContextOptions,
    ContextRouter,
    MoveProgress,
    MoveState,
    SerializationContexts,
)
from relatum.errors import ContextMoving
from relatum.store import publisher_sessions
from tests.support import broker_connection, wait_until
from tests.support.leases import let_lapse
from tests.support.routing import of_context

PARTITIONS = 2
TAKEN = "is gone on with: its mover is gone"


class Dies(Exception):
    """The mover dies."""


@pytest.fixture
def contexts(super_stream: str, amqp_url: str, stream_url: str, database_url: str) -> Iterator[SerializationContexts]:
    """Its contexts: "c" is in the first partition."""
    with SerializationContexts(super_stream, database_url, broker=amqp_url, stream_url=stream_url) as contexts:
        contexts.assign(["c", "d"], f"{super_stream}-0")
        yield contexts


@pytest.fixture(params=[MoveState.FENCING, MoveState.FENCED])
def move_id(request: pytest.FixtureRequest, contexts: SerializationContexts, engine: sa.Engine) -> int:
    """A move of "c" whose mover died in this state, longer ago than it counts as attended."""
    return leave(contexts, engine, request.param)


def leave(contexts: SerializationContexts, engine: sa.Engine, state: MoveState = MoveState.FENCING) -> int:
    """Begin a move of "c", and die when it has come to a state; gives the move's number."""

    def die(progress: MoveProgress) -> None:
        if progress.move.state is state:
            raise Dies

    with pytest.raises(Dies):
        contexts.move("c", f"{contexts.super_stream}-1", progress=die)
    let_lapse(engine)
    [left] = contexts.moves()
    return left.move_id


def state_of(contexts: SerializationContexts, move_id: int) -> MoveState:
    """How far a move is."""
    return next(each.state for each in contexts.moves(latest=9) if each.move_id == move_id)


def test_a_router_goes_on_with_a_move_its_message_waits_for(
    move_id: int, contexts: SerializationContexts, channel: BlockingChannel, database_url: str
) -> None:
    """Publishing to a context whose mover died ends as if it had not, within the default time-out."""
    with ContextRouter(contexts.super_stream, database_url) as router:
        router.publish(channel, b"c1", of_context("c"))
    assert state_of(contexts, move_id) is MoveState.SWITCHED
    assert contexts.assignment_of("c").partition == f"{contexts.super_stream}-1"


async def test_an_asyncio_router_does_so_too(
    move_id: int, contexts: SerializationContexts, amqp_url: str, database_url: str
) -> None:
    """The asyncio face goes on with it, in a thread: its loop is not held up."""
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        async with AsyncContextRouter(contexts.super_stream, database_url) as router:
            await router.publish(channel, aio_pika.Message(b"c1", headers={"serialization_context": "c"}))
    assert state_of(contexts, move_id) is MoveState.SWITCHED


def test_a_mover_ends_it_before_its_own(move_id: int, contexts: SerializationContexts) -> None:
    """Who moves the same context finds no abandoned move in the way."""
    [back] = contexts.move("c", f"{contexts.super_stream}-0")
    assert state_of(contexts, move_id) is back.state is MoveState.SWITCHED


def test_one_of_many_goes_on_with_it(
    move_id: int, contexts: SerializationContexts, amqp_url: str, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However many wait for a move, one takes it."""

    def publish(_number: int) -> None:
        with (
            broker_connection(amqp_url) as connection,
            ContextRouter(contexts.super_stream, database_url) as router,
        ):
            channel = connection.channel()
            channel.confirm_delivery()
            router.publish(channel, b"c", of_context("c"))

    with caplog.at_level(logging.WARNING, "relatum.contexts"), ThreadPoolExecutor(6) as pool:
        list(pool.map(publish, range(6)))
    assert state_of(contexts, move_id) is MoveState.SWITCHED
    assert [each.getMessage() for each in caplog.records if TAKEN in each.getMessage()] == [f"move {move_id} {TAKEN}"]


def test_a_mover_that_lives_says_so(contexts: SerializationContexts, engine: sa.Engine) -> None:
    """A mover that waits for longer than it counts as heard of says meanwhile that it is there."""
    with engine.begin() as connection:
        ids = sa.text("SELECT super_stream_id, 'dead:1:x', 0, 60, now() + interval '1 hour' FROM relatum.super_streams")
        columns = ["super_stream_id", "holder", "seen", "session_s", "lease_expires_at"]
        connection.execute(sa.insert(publisher_sessions).from_select(columns, ids.columns()))
    mover = threading.Thread(target=contexts.move, args=("c", f"{contexts.super_stream}-1"))
    mover.start()
    wait_until(lambda: any(each.waits_for for each in contexts.moves()), what="the mover waits")
    let_lapse(engine)
    wait_until(lambda: contexts.moves()[0].is_attended, what="it is said that somebody is there")
    with engine.begin() as connection:
        connection.execute(sa.delete(publisher_sessions))
    mover.join()
    assert contexts.moves() == []


def test_a_router_that_may_not_go_on_leaves_it_to_others(
    contexts: SerializationContexts,
    channel: BlockingChannel,
    engine: sa.Engine,
    database_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says so once, however often it looks, and its message ends as any that waits for too long."""
    leave(contexts, engine)
    with engine.begin() as connection:
        connection.execute(sa.text("REVOKE UPDATE ON relatum.context_moves FROM relatum_router"))
    as_router = f"{database_url}?options=-crole%3Drelatum_router"
    with ContextRouter(contexts.super_stream, as_router, ContextOptions(timeout_s=2.5)) as router:
        with pytest.raises(ContextMoving):
            router.publish(channel, b"c1", of_context("c"))
        router.publish(channel, b"d1", of_context("d"))
    assert not contexts.moves()[0].state.is_ended
    assert caplog.text.count("AccessRefused") == 1


def test_going_on_with_a_move_ends_with_the_time_out(
    contexts: SerializationContexts,
    channel: BlockingChannel,
    engine: sa.Engine,
    database_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A move that waits for a publisher that does not answer keeps no message for longer than told; nothing is away."""
    leave(contexts, engine)
    with engine.begin() as connection:
        ids = sa.text("SELECT super_stream_id, 'dead:1:x', 0, 60, now() + interval '1 hour' FROM relatum.super_streams")
        columns = ["super_stream_id", "holder", "seen", "session_s", "lease_expires_at"]
        connection.execute(sa.insert(publisher_sessions).from_select(columns, ids.columns()))
        connection.execute(sa.text("UPDATE relatum.context_moves SET fence_epoch = 0"))
    with ContextRouter(contexts.super_stream, database_url, ContextOptions(timeout_s=4.0)) as router:
        began = time.monotonic()
        with pytest.raises(ContextMoving):
            router.publish(channel, b"c1", of_context("c"))
        assert time.monotonic() - began < 5.5
    assert "is gone on with" in caplog.text
    assert "is away" not in caplog.text
