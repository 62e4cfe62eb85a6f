"""A move whose mover is gone is gone on with by whoever is there: routers, consumers, movers; by one of them."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import aio_pika
import pytest
import sqlalchemy as sa
from pika import BasicProperties

import relatum
from relatum.contexts import (
    AsyncContextRouter,
    ContextRouter,
    MoveState,
    SerializationContexts,
)
from relatum.contexts.serial.moving import _abandoned as abandoned
from relatum.contexts.serial.moving import _move_steps as moving
from relatum.contexts.serial.moving._controls import ControlStreams
from relatum.contexts.serial.moving._mover import Mover
from relatum.headers import CONTEXT_HEADER
from relatum.processes import new_holder
from relatum.reading import BrokerAddress
from relatum.store import context_moves
from tests.support import broker_connection, wait_until

AGO = sa.func.now() - sa.text("interval '1 s'")
PARTITIONS = 2
TAKEN = "is gone on with: its mover is gone"


@pytest.fixture
def contexts(super_stream: str, amqp_url: str, stream_url: str, database_url: str) -> Iterator[SerializationContexts]:
    """Its contexts: "c" is in the first partition."""
    with SerializationContexts(super_stream, database_url, broker=amqp_url, stream_url=stream_url) as contexts:
        contexts.assign(["c", "d"], f"{super_stream}-0")
        yield contexts


class Dies(Exception):
    """The mover dies."""


@pytest.fixture(params=[3, 5, 7], ids=lambda after: f"after-{after}-steps")
def move_id(
    request: pytest.FixtureRequest, contexts: SerializationContexts, amqp_url: str, stream_url: str, engine: sa.Engine
) -> int:
    """A move of "c" whose mover died, after so many steps, longer ago than it counts as attended."""
    return leave(contexts, amqp_url, stream_url, engine, after=request.param)


def leave(contexts: SerializationContexts, amqp_url: str, stream_url: str, engine: sa.Engine, *, after: int = 5) -> int:
    """Begin a move of "c", and die after so many steps; gives the move's number."""

    def steps() -> moving.Steps:
        whole = moving.move(f"{contexts.super_stream}-0", f"{contexts.super_stream}-1", frozenset("c"), grace_s=0)
        answer = None
        for _ in range(after + 1):
            answer = yield whole.send(answer)
        raise Dies

    with ControlStreams(BrokerAddress.parse(amqp_url, stream_url)) as streams, pytest.raises(Dies):
        Mover(contexts._moves, streams).run(steps())
    [left] = contexts.moves()
    with engine.begin() as connection:
        connection.execute(sa.update(context_moves).values(lease_expires_at=AGO))
    return left.move_id


def test_a_router_goes_on_with_a_move_its_message_waits_for(
    move_id: int, contexts: SerializationContexts, super_stream: str, amqp_url: str, stream_url: str, database_url: str
) -> None:
    """Publishing to a context whose mover died ends as if it had not, within the default time-out."""
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        with ContextRouter(super_stream, database_url, broker=amqp_url, stream_url=stream_url) as router:
            router.publish(channel, b"c1", BasicProperties(headers={CONTEXT_HEADER: "c"}))
    assert contexts._moves.move(move_id).state is MoveState.SWITCHED
    assert contexts.assignment_of("c").partition == f"{super_stream}-1"


async def test_an_asyncio_router_does_so_too(
    contexts: SerializationContexts,
    super_stream: str,
    amqp_url: str,
    stream_url: str,
    database_url: str,
    engine: sa.Engine,
) -> None:
    """The asyncio face goes on with it, in a thread: its loop is not held up."""
    move_id = leave(contexts, amqp_url, stream_url, engine)
    connection = await aio_pika.connect(amqp_url)
    async with connection, AsyncContextRouter(super_stream, database_url, broker=amqp_url) as router:
        channel = await connection.channel(publisher_confirms=True)
        await router.publish(channel, aio_pika.Message(b"c1", headers={CONTEXT_HEADER: "c"}))
    assert contexts._moves.move(move_id).state is MoveState.SWITCHED


def test_a_mover_ends_it_before_its_own(
    contexts: SerializationContexts, super_stream: str, amqp_url: str, stream_url: str, engine: sa.Engine
) -> None:
    """Who moves the same context finds no abandoned move in the way."""
    move_id = leave(contexts, amqp_url, stream_url, engine)
    [back] = contexts.move("c", f"{super_stream}-0")
    assert contexts._moves.move(move_id).state is MoveState.SWITCHED
    assert back.state is MoveState.SWITCHED


def test_one_of_many_goes_on_with_it(
    contexts: SerializationContexts,
    super_stream: str,
    amqp_url: str,
    stream_url: str,
    database_url: str,
    engine: sa.Engine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many wait for a move, one takes it."""
    move_id = leave(contexts, amqp_url, stream_url, engine)
    with ExitStack() as stack, caplog.at_level(logging.WARNING, "relatum.contexts"):
        routers = [
            stack.enter_context(ContextRouter(super_stream, database_url, broker=amqp_url, stream_url=stream_url))
            for _ in range(6)
        ]

        def publish(router: ContextRouter) -> None:
            with broker_connection(amqp_url) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                router.publish(channel, b"c", BasicProperties(headers={CONTEXT_HEADER: "c"}))

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(publish, routers))
    assert contexts._moves.move(move_id).state is MoveState.SWITCHED
    assert [record.getMessage() for record in caplog.records if TAKEN in record.getMessage()] == [
        f"move {move_id} {TAKEN}"
    ]


def test_a_move_that_is_attended_is_left_alone(
    contexts: SerializationContexts, super_stream: str, amqp_url: str, stream_url: str, engine: sa.Engine
) -> None:
    """A mover whose step takes longer than it counts as heard of says meanwhile that it is there."""
    move_id = leave(contexts, amqp_url, stream_url, engine)
    holder = new_holder()
    assert contexts._moves.take_abandoned(holder) == move_id
    assert contexts._moves.take_abandoned("another") is None

    def steps() -> moving.Steps:
        found = yield moving.Look(move_id)
        with engine.begin() as connection:
            connection.execute(sa.update(context_moves).values(lease_expires_at=AGO))
        wait_until(lambda: contexts._moves.move(move_id).is_attended, what="it is said that somebody is there")
        return found

    with ControlStreams(BrokerAddress.parse(amqp_url, stream_url)) as streams:
        Mover(contexts._moves, streams, holder=holder).run(steps())
    assert contexts._moves.take_abandoned("another") is None


def test_looks_are_spread_and_bounded() -> None:
    """However often it is asked, a process looks about once a second, and not again soon where it failed."""
    looked: list[int] = []

    def fail() -> abandoned.Where:
        looked.append(1)
        raise relatum.errors.AccessRefused("no")

    keeper = abandoned.Abandoned(fail)
    keeper.look()
    wait_until(lambda: looked)
    thread = keeper._thread
    assert thread is not None
    thread.join()
    for _ in range(1000):
        keeper.look()
    keeper.close()
    assert len(looked) == 1
