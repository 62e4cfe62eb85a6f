"""Sessions of publishers on a real broker and a real database: who is waited for, for how long, and by whom."""

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum.contexts import ContextOptions, SerializationContexts
from relatum.superstreams import Layout
from tests.support import wait_until
from tests.support.routing import HeldMove, consumed, of_context

PARTITIONS = 2
"""Of the fixture `layout`."""

SESSION_S = 60.0
"""Longer than a move may take here: one that ends was told by its publisher."""


@pytest.fixture
def router(layout: Layout, database_url: str, amqp_url: str) -> Iterator[relatum.ContextRouter]:
    """A router whose session holds for long."""
    options = ContextOptions(session_s=SESSION_S)
    with relatum.ContextRouter(layout.super_stream, database_url, options, broker=amqp_url) as opened:
        opened.open()
        yield opened


@pytest.fixture
def contexts(layout: Layout, database_url: str, amqp_url: str, router: relatum.ContextRouter) -> Iterator[Any]:
    """The one who moves contexts."""
    with SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as opened:
        yield opened


def rows(database_url: str, query: str, *values: object) -> list[tuple[Any, ...]]:
    """The rows of a query, or of a statement that gives some."""
    with psycopg.connect(database_url) as connection:
        return connection.execute(query.encode(), values).fetchall()


def sessions(database_url: str, layout: Layout) -> list[str]:
    """Who has a session."""
    query = "SELECT holder FROM relatum.publisher_sessions JOIN relatum.super_streams USING (super_stream_id)"
    return [row[0] for row in rows(database_url, f"{query} WHERE name = %s", layout.super_stream)]


def add_dead(database_url: str, layout: Layout, session_s: float) -> str:
    """The session of a publisher that died."""
    query = (
        "INSERT INTO relatum.publisher_sessions (super_stream_id, holder, seen, session_s, lease_expires_at) "
        "SELECT super_stream_id, 'dead:1:x', 0, %s, now() + interval '1 year' FROM relatum.super_streams "
        "WHERE name = %s RETURNING holder"
    )
    return str(rows(database_url, query, session_s, layout.super_stream)[0][0])


def other_than(layout: Layout, name: str) -> str:
    """The partition a context is not placed in."""
    return next(each.stream for each in layout if each.stream != layout.route(name).stream)


def test_who_publishes_has_a_session_and_asks_no_more(
    router: relatum.ContextRouter, channel: BlockingChannel, layout: Layout, database_url: str
) -> None:
    """While messages go out the session is there, and they ask for nothing; a moment after the last it is gone."""

    def told_by_a_session() -> bool:
        asked = router.statistics().asked
        for _ in range(5):
            router.publish(channel, b"", of_context("x"))
        return router.statistics().asked == asked

    wait_until(told_by_a_session, what="messages that ask for nothing")
    assert len(sessions(database_url, layout)) == 1
    wait_until(lambda: not sessions(database_url, layout), what="the session's end")


def test_moves_go_on_as_soon_as_publishers_know(
    router: relatum.ContextRouter,
    contexts: SerializationContexts,
    channel: BlockingChannel,
    layout: Layout,
    amqp_url: str,
    database_url: str,
) -> None:
    """Contexts move to and fro under a publisher whose sessions no move could wait for, and each stays in order."""
    stop, published = threading.Event(), [0]

    def move_to_and_fro() -> None:
        for target in 3 * [other_than(layout, "x"), layout.route("x").stream]:
            contexts.move(["x"], target)
        stop.set()

    router.publish(channel, b"0", of_context("x"))
    mover = threading.Thread(target=move_to_and_fro)
    mover.start()
    while not stop.is_set():
        published[0] += 1
        router.publish(channel, b"%d" % published[0], of_context("x"))
    mover.join()
    count = published[0] + 1
    assert consumed(layout.super_stream, database_url, amqp_url, count) == {
        "x": [b"%d" % each for each in range(count)]
    }


def test_a_dead_publisher_is_named_and_waited_for_once(
    router: relatum.ContextRouter,
    contexts: SerializationContexts,
    channel: BlockingChannel,
    layout: Layout,
    database_url: str,
) -> None:
    """The move says for whom it waits, for as long as the session holds and no less; then it is forgotten."""
    router.publish(channel, b"", of_context("x"))
    wait_until(lambda: not sessions(database_url, layout), what="the session's end")
    holder = add_dead(database_url, layout, 1.0)
    seen: list[tuple[str, ...]] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            seen.extend(each.waits_for for each in contexts.moves())

    looker = threading.Thread(target=look)
    looker.start()
    (moved,) = contexts.move(["x"], other_than(layout, "x"))
    done.set()
    looker.join()
    assert (holder,) in seen
    assert moved.pause_s is not None
    assert moved.pause_s > 1.0
    assert (moved.waits_for, sessions(database_url, layout)) == ((), [])


def test_closing_a_router_ends_its_session(channel: BlockingChannel, layout: Layout, database_url: str) -> None:
    """No move waits for one that was closed amid its messages."""
    options = ContextOptions(session_s=SESSION_S)
    with relatum.ContextRouter(layout.super_stream, database_url, options) as router:

        def publish() -> bool:
            router.publish(channel, b"", of_context("x"))
            return bool(sessions(database_url, layout))

        wait_until(publish, what="a session")
    assert sessions(database_url, layout) == []


def test_movers_that_do_not_wait_are_refused(
    router: relatum.ContextRouter,
    contexts: SerializationContexts,
    channel: BlockingChannel,
    layout: Layout,
    database_url: str,
    engine: sa.Engine,
) -> None:
    """Those of an earlier release cannot begin a move, and where they fence one that waits, it is not stored."""
    router.publish(channel, b"", of_context("x"))
    old = (
        "INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, contexts, fence_epoch, epoch, "
        "scan_from, target_scan_from) SELECT super_stream_id, 1, 2, 1, 9, 9, 0, 0 FROM relatum.super_streams "
        "WHERE name = %s RETURNING move_id"
    )
    with pytest.raises(psycopg.errors.NotNullViolation):
        rows(database_url, old, layout.super_stream)
    add_dead(database_url, layout, 1.0)
    with HeldMove(contexts, ["x"], other_than(layout, "x"), "fencing", engine) as held:
        held.begin()
        (move,) = contexts.moves()
        assert move.fence_epoch == 0
        with pytest.raises(psycopg.errors.CheckViolation, match="context_moves_waited"):
            rows(
                database_url,
                "UPDATE relatum.context_moves SET state = 'fenced', fence_offset = 5 WHERE move_id = %s RETURNING 1",
                move.move_id,
            )
        held.go()
