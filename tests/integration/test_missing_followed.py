"""Followers of expectations tell of each message once, as it falls due, whatever happens meanwhile."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from relatum import metrics
from relatum.errors import NotFound, StreamNotFound
from relatum_consumer import AsyncRelations, Expectation, Finding, Relations, Unmet
from relatum_consumer.expectations import _expectation_limits
from tests.support import publish_plain, recording, unique_name, wait_recorded
from tests.support.proxy import Proxy
from tests.support.relations import FACES

SECOND = 1_000_000
BASE_US = (time.time_ns() // 1_000_000_000 - 7_200) * SECOND
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SINCE = EPOCH + timedelta(microseconds=BASE_US)


@pytest.fixture
def payments(other_stream: str) -> str:
    """A second stream, which is to follow the first."""
    return other_stream


@contextmanager
def recorded(amqp_url: str, engine: sa.Engine, *streams: str) -> Iterator[None]:
    """Record streams, from a moment on at which the key is defined."""
    with recording(amqp_url, engine, *streams, keys=["order_id"]):
        for stream in streams:
            wait_recorded(amqp_url, engine, stream)
        yield


@contextmanager
def watching(
    face: str, broker: str, database: str, expectation: str | Expectation, **options: Any
) -> Iterator[Callable[[], Unmet]]:
    """A follower through one of `FACES`: waits for the next message it tells of."""
    options = {"poll_s": 0.02, "since": SINCE} | options
    if face == "blocking":
        with (
            Relations(broker, database) as relations,
            closing(relations.watch_missing(expectation, **options)) as found,
        ):
            yield lambda: next(found)
        return
    with asyncio.Runner() as runner:
        asked = AsyncRelations(broker, database)
        told = asked.watch_missing(expectation, **options)
        try:
            yield lambda: runner.run(_next(told))
        finally:
            runner.run(told.aclose())
            runner.run(asked.close())


async def _next(told: Any) -> Unmet:
    unmet: Unmet = await anext(told)
    return unmet


def publish(amqp_url: str, stream: str, *messages: tuple[str, int]) -> None:
    """Publish values and times to a stream."""
    publish_plain(amqp_url, stream, [(b"", {"order_id": value, "relatum_time": at}) for value, at in messages])


@pytest.mark.parametrize("face", FACES)
def test_each_is_told_of_once_as_it_falls_due(
    amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, payments: str, face: str
) -> None:
    """What was due, what falls due, and what was published long after its time; nothing of it again."""
    expectation = Expectation(unique_name("paid"), stream_name, "order_id", payments, 2)
    with recorded(amqp_url, engine, stream_name, payments):
        publish(amqp_url, payments, ("b", BASE_US + 9 * SECOND), ("c", BASE_US + SECOND))
        publish(amqp_url, stream_name, ("a", BASE_US), ("b", BASE_US + 1), ("c", BASE_US))
        with watching(face, amqp_url, database_url, expectation) as take:
            first, second = take(), take()
            assert [(first.value, first.finding), (second.value, second.finding)] == [
                ("a", Finding.MISSING),
                ("b", Finding.LATE),
            ]
            assert second.came is not None
            publish(amqp_url, stream_name, ("from long ago", BASE_US + 5))
            assert take().value == "from long ago"
            now_us = time.time_ns() // 1_000
            publish(amqp_url, stream_name, ("falls due", now_us), ("is paid", now_us))
            publish(amqp_url, payments, ("is paid", now_us + SECOND))
            due = take()
            assert (due.value, due.finding) == ("falls due", Finding.MISSING)
            assert datetime.now(UTC) > due.due
            # Paid after it was told of: that is not told.
            publish(amqp_url, payments, ("falls due", time.time_ns() // 1_000))
            publish(amqp_url, stream_name, ("last", BASE_US + 7))
            assert take().value == "last"
            page = metrics.exposition()
            told = f'relatum_expectation_unmet_total{{expectation="{expectation.name}",finding="missing"}} 4.0'
            assert told in page
            assert f'relatum_expectation_checked_total{{expectation="{expectation.name}"}}' in page
            assert f'relatum_expectation_lag_seconds{{expectation="{expectation.name}"}}' in page


def test_nothing_is_told_while_clocks_may_differ(
    amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, payments: str
) -> None:
    """One is told of when it is surely due; one that was paid a little before it is none."""
    expectation = Expectation("paid", stream_name, "order_id", payments, 0.2, grace_s=2)
    with recorded(amqp_url, engine, stream_name, payments):
        now_us = time.time_ns() // 1_000
        publish(amqp_url, payments, ("paid", now_us - SECOND))
        publish(amqp_url, stream_name, ("paid", now_us), ("unpaid", now_us + 1))
        with watching("blocking", amqp_url, database_url, expectation) as take:
            due = take()
            assert (due.value, due.finding) == ("unpaid", Finding.MISSING)
            assert datetime.now(UTC) >= due.due + timedelta(seconds=2)


def test_what_is_too_much_for_one_step_is_told_of_in_several(
    amqp_url: str,
    engine: sa.Engine,
    database_url: str,
    stream_name: str,
    payments: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each once, also where many have the same time, and where they come together long after it."""
    monkeypatch.setattr(_expectation_limits, "STEP_MESSAGES", 3)
    expectation = Expectation("paid", stream_name, "order_id", payments, 2)
    early = [(f"e{n}", BASE_US + n * SECOND) for n in range(20)]
    together = [(f"t{n}", BASE_US + 50 * SECOND) for n in range(10)]
    late = [(f"l{n}", BASE_US + n * SECOND + 1) for n in range(20)]
    with recorded(amqp_url, engine, stream_name, payments):
        publish(amqp_url, stream_name, *early, *together)
        with watching("blocking", amqp_url, database_url, expectation) as take:
            assert sorted(take().value for _ in range(30)) == sorted(value for value, _ in early + together)
            publish(amqp_url, stream_name, *late)
            assert sorted(take().value for _ in late) == sorted(value for value, _ in late)
            publish(amqp_url, stream_name, ("last", BASE_US))
            assert take().value == "last"


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("away", ["broker", "database"])
def test_a_server_that_is_away_is_waited_for(
    amqp_url: str,
    stream_url: str,
    engine: sa.Engine,
    database_url: str,
    stream_name: str,
    payments: str,
    face: str,
    away: str,
) -> None:
    """The follower goes on where it was: nothing is passed over, and nothing told of again."""
    expectation = Expectation("paid", stream_name, "order_id", payments, 2)
    broker = stream_url if away == "broker" else amqp_url
    with (
        recorded(amqp_url, engine, stream_name, payments),
        Proxy.to(broker if away == "broker" else database_url) as proxy,
    ):
        publish(amqp_url, stream_name, ("a", BASE_US))
        urls = (proxy.url(broker), database_url) if away == "broker" else (broker, proxy.url(database_url))
        with watching(face, *urls, expectation) as take:
            assert take().value == "a"
            proxy.accepts = False
            proxy.reset()
            publish(amqp_url, stream_name, ("b", BASE_US + 1))
            back = threading.Timer(0.5, setattr, (proxy, "accepts", True))
            back.start()
            assert take().value == "b"
            back.join()


def test_what_a_person_must_mend_is_raised(
    amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """An expectation or a stream that is not there."""
    with recorded(amqp_url, engine, stream_name):
        with watching("blocking", amqp_url, database_url, "nobody-knows-it") as take, pytest.raises(NotFound):
            take()
        lacking = Expectation("paid", stream_name, "order_id", "nobody-knows-it", 2)
        with watching("blocking", amqp_url, database_url, lacking) as take, pytest.raises(StreamNotFound):
            take()
