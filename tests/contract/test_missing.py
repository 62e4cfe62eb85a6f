"""Names under which there is no stream, or none yet."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from pika.exceptions import ChannelClosedByBroker

from relatum.errors import NotAStream, RelatumError, StreamNotFound, StreamUnavailable, Transient
from tests.contract._faces import Face
from tests.support import broker_connection, unique_name

ROUND_S = 1.0
ROUND_LONG_S = 10.0
"""Seconds a stream is deleted and declared again: hundreds of questions, and thousands in a long run."""


@pytest.fixture
def restless_stream(amqp_url: str) -> Iterator[str]:
    """A stream that is deleted and declared again, all the time."""
    name, ended = unique_name(), threading.Event()

    def declare_and_delete() -> None:
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            while not ended.is_set():
                channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
                channel.queue_delete(name)

    thread = threading.Thread(target=declare_and_delete)
    thread.start()
    yield name
    ended.set()
    thread.join()


def test_a_stream_that_is_declared_again(face: Face, restless_stream: str, is_long: bool) -> None:
    """A stream that is deleted and declared again is there or not, or unavailable; it is never another queue."""
    limit, questions = time.monotonic() + (ROUND_LONG_S if is_long else ROUND_S), 0
    while time.monotonic() < limit:
        questions += 1
        with contextlib.suppress(StreamNotFound, Transient):
            face.bounds(restless_stream)
    assert questions


def test_queues_of_other_kinds(face: Face, amqp_url: str) -> None:
    """A queue, another connection's own queue, and a name of nothing are told apart, and no message is taken."""
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        names = (unique_name(), unique_name())
        channel.queue_declare(names[0], exclusive=True)
        channel.queue_declare(names[1], durable=True)
        try:
            channel.basic_publish("", names[1], b"somebody's")
            for name in names:
                with pytest.raises(NotAStream):
                    face.bounds(name)
            with pytest.raises(StreamNotFound):
                face.bounds(unique_name())
            _, _, body = channel.basic_get(names[1], auto_ack=True)
            assert body == b"somebody's"
        finally:
            channel.queue_delete(names[1])


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (404, "NOT_FOUND - no queue 's' in vhost '/'", StreamNotFound),
        (404, "NOT_FOUND - home node 'r1@h' of durable queue 's' is down or inaccessible", StreamUnavailable),
        (406, "PRECONDITION_FAILED - queue 's' does not have a replica on the local node", Transient),
        (406, "PRECONDITION_FAILED - stream queue 's' in vhost '/' does not have a running replica", Transient),
        (406, "PRECONDITION_FAILED - invalid arg 'x-stream-offset' for queue 's'", NotAStream),
        (405, "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue 's'", NotAStream),
    ],
)
def test_what_a_node_says_of_a_stream(
    face: Face, code: int, text: str, kind: type[RelatumError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only "no queue" says that there is no such stream; nodes that start give other reasons, seen on 3.10 and 4.3."""

    @contextlib.contextmanager
    def refused(*_: object) -> Iterator[None]:
        raise ChannelClosedByBroker(code, text)
        yield

    monkeypatch.setattr("relatum.reading._missing_streams.asking", refused)
    with pytest.raises(kind):
        face.bounds(unique_name())
