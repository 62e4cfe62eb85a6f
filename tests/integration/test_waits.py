"""Waits end when they were asked to, and running out of time is an answer: what is known, and never more than that."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.errors import BrokerUnavailable, OffsetNotFound, ReadTimeout
from relatum.reading import BrokerAddress, Message
from relatum.waiting import within
from relatum_consumer import Relations, Status
from tests.contract._faces import FACES as READERS
from tests.contract._faces import open_face
from tests.support import LIMIT_S, in_a_try, publish_plain, record, wait_until
from tests.support.proxy import Proxy
from tests.support.relations import FACES, open_relations
from tests.support.standstill import in_time

LARGE = 300_000
SLOW = 60_000
WAIT_S = 1.0
AT_MOST_S = 1.6
"""What is asked for, a quarter of a second for the last look, and some for a busy machine."""


@pytest.fixture
def proxy(stream_url: str) -> Iterator[Proxy]:
    """The line to the broker."""
    with Proxy.to(stream_url) as proxy:
        yield proxy


@pytest.fixture(params=FACES)
def relations(
    request: pytest.FixtureRequest, amqp_url: str, stream_url: str, database_url: str, proxy: Proxy
) -> Iterator[Relations]:
    """Look-ups by way of the proxy, through each face."""
    with open_relations(request.param, BrokerAddress.parse(amqp_url, proxy.url(stream_url)), database_url) as relations:
        yield relations


@pytest.fixture
def message(amqp_url: str, engine: sa.Engine, stream_name: str, relations: Relations) -> Message:
    """A message without relata, in a stream of large bodies that is recorded."""
    for number in range(3):
        publish_plain(amqp_url, stream_name, [(b"x" * LARGE, {"order_id": str(number)})])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    return relations.read(stream_name, 0)


def waited(relations: Relations, message: Message, timeout_s: float = WAIT_S) -> tuple[Any, float]:
    """The answer of a wait, and how long it took."""
    began = time.monotonic()
    answer = relations.wait_related(message, timeout_s=timeout_s)
    return answer, time.monotonic() - began


def test_a_proof_that_takes_too_long_is_no_error_and_no_absence(
    relations: Relations, message: Message, proxy: Proxy, stream_name: str
) -> None:
    """Large bodies on a slow line: the proof would take 15 s."""
    proxy.bytes_per_s = SLOW

    def is_in_time() -> bool:
        answer, took_s = waited(relations, message)
        assert answer.status is Status.UNPROVEN
        assert answer.streams == (stream_name,)
        assert took_s >= WAIT_S
        return took_s < AT_MOST_S

    in_a_try(is_in_time, what="an answer in time")


def test_a_broker_that_falls_silent_is_no_error_of_a_wait(
    relations: Relations, message: Message, proxy: Proxy, amqp_url: str, stream_name: str
) -> None:
    """Nobody can say whether there is something: what was not recorded is never denied."""
    publish_plain(amqp_url, stream_name, [(b"", {"order_id": "0"})])
    proxy.mode = "frozen"

    def is_in_time() -> bool:
        answer, took_s = waited(relations, message)
        assert answer.status is Status.UNPROVEN
        return took_s < AT_MOST_S

    try:
        in_a_try(is_in_time, what="an answer in time")
    finally:
        proxy.mode = "pass"


def test_what_was_found_and_not_read_in_time_is_named(
    relations: Relations, message: Message, proxy: Proxy, amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """The index names it, its body does not come: it is in `unread`."""
    publish_plain(amqp_url, stream_name, [(b"x" * LARGE, {"order_id": "0"})])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    proxy.bytes_per_s = SLOW

    def is_in_time() -> bool:
        answer, took_s = waited(relations, message)
        assert (answer.status, answer.unread) == (Status.UNPROVEN, ((stream_name, 3),))
        return took_s < AT_MOST_S

    in_a_try(is_in_time, what="an answer in time")


def test_a_proof_begins_earlier_where_the_last_one_took_long(
    relations: Relations, message: Message, proxy: Proxy
) -> None:
    """On a line on which it takes half a second, a wait is told the absence in the end, and ends in time each time."""
    proxy.bytes_per_s = 30 * SLOW
    found: list[tuple[Any, float]] = []

    def is_proven() -> bool:
        found.append(waited(relations, message, 1.5))
        return found[-1][0].status is Status.ABSENT

    wait_until(is_proven, what="the proof")
    assert {answer.status for answer, _ in found} <= {Status.UNPROVEN, Status.ABSENT}
    assert all(took_s >= 1.5 for _, took_s in found)
    in_a_try(
        lambda: waited(relations, message, 1.5)[1] < 1.5 + AT_MOST_S - WAIT_S,
        what="an answer in time",
    )


@pytest.mark.parametrize("name", READERS)
def test_readers_keep_the_deadline_of_the_call_around_them(
    name: str, amqp_url: str, stream_url: str, stream_name: str
) -> None:
    """A silent broker ends each question in time; and what was cut short is never taken for the end of a stream."""
    publish_plain(amqp_url, stream_name, [b"0"])
    with Proxy.to(stream_url) as line:
        address = BrokerAddress.parse(amqp_url, line.url(stream_url))
        with open_face(name, address, timeout_s=LIMIT_S) as face:
            assert face.read(stream_name, 0).body == b"0"
            line.mode = "blackhole_replies"
            for ask in (lambda: face.read(stream_name, 1), lambda: face.iterate(stream_name)):
                with in_time(0.3), within(0.3), pytest.raises((ReadTimeout, BrokerUnavailable)):
                    ask()
            line.mode = "pass"
            with pytest.raises(OffsetNotFound):
                face.read(stream_name, 1)
