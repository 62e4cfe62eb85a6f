"""What `release` leaves unrecorded: it is said and counted, and the next recorder of the stream records it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import relatum
from tests.contract._clients import open_line
from tests.support import declare_stream, delete_stream, unique_name, wait_until
from tests.support.place import FailingPlace, Place
from tests.support.standstill import in_time

RELEASE_S = 2.0
"""What `release` takes at most, as its documentation says."""

TROUBLES = ("database refused", "database frozen", "locked coverage")
"""PostgreSQL is not there; it answers nothing; somebody else holds a table that is written to."""

CLIENTS = ("pika", "aio-pika robust")


@pytest.fixture
def failing(place: Place) -> Iterator[FailingPlace]:
    made = FailingPlace(place, "blocking")
    yield made
    made.close()


def left_by(client: str, at: FailingPlace, *acts: str | Callable[[], object], **options: Any) -> Any:
    """Publish an order for each text, call the rest, release the connection, and give what that left."""
    with open_line(client, at.place.amqp) as line:
        line.intercept(database=at.database, broker=at.place.broker, keys=["order_id"], **options)
        channel = line.channel()
        for act in acts:
            if callable(act):
                act()
            else:
                line.publish(channel, line.message(headers={"order_id": act}), at.place.stream)
        with in_time(RELEASE_S):
            assert relatum.release(line.connection) is line.connection
        return relatum.statistics(line.connection).left


def wait_first(place: Place) -> None:
    wait_until(lambda: place.recorded_to() == 1, what="the first message recorded")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of messages that are not recorded."""
    lines = [each.getMessage() for each in caplog.records if each.name == "relatum.recorder"]
    return [line for line in lines if "ends with messages that are not recorded" in line]


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_left_is_said_and_recorded_next(
    failing: FailingPlace, place: Place, caplog: pytest.LogCaptureFixture, client: str, trouble: str
) -> None:
    """A warning and `statistics` say how many messages of a stream are left, and a later recorder has all, once."""
    with ExitStack() as stack:

        def begin() -> None:
            wait_first(place)
            stack.enter_context(failing.fault(trouble))

        assert left_by(client, failing, "a", begin, "b", "c") == {place.stream: 2}
    [line] = said(caplog)
    assert f"2 of {place.stream!r}" in line
    place.record()
    assert place.rows() == [("order_id", each, n) for n, each in enumerate("abc")]


@pytest.mark.parametrize(("client", "trouble"), list(zip((*CLIENTS, CLIENTS[0]), TROUBLES, strict=True)))
def test_what_was_never_looked_at_is_said(
    failing: FailingPlace, place: Place, caplog: pytest.LogCaptureFixture, client: str, trouble: str
) -> None:
    """Where PostgreSQL never answered, the stream is named without the number of its messages."""
    with failing.fault(trouble):
        assert left_by(client, failing, "a", "b") == {place.stream: None}
    [line] = said(caplog)
    assert repr(place.stream) in line
    place.record(keys=["order_id"])
    assert place.rows() == [("order_id", "a", 0), ("order_id", "b", 1)]


@pytest.mark.parametrize("client", CLIENTS)
def test_nothing_is_said_where_nothing_is_left(
    failing: FailingPlace, place: Place, caplog: pytest.LogCaptureFixture, client: str
) -> None:
    """Nothing is said where all is recorded before PostgreSQL stops, nor of a stream that was deleted."""
    gone = unique_name()
    declare_stream(place.amqp, gone)
    with ExitStack() as stack:

        def stop_when_recorded() -> None:
            wait_first(place)
            delete_stream(place.amqp, gone)
            wait_until(lambda: f"There is no stream {gone!r}" in caplog.text, what="the stream is missed")
            stack.enter_context(failing.fault("database refused"))

        assert left_by(client, failing, "a", stop_when_recorded, streams=[gone]) == {}
    assert not said(caplog)
