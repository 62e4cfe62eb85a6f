"""One line when something goes away and one when it is back."""

import logging
import threading

import pytest

from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConnectionLost,
    DatabaseUnavailable,
    ReadTimeout,
    RelatumError,
    StreamNotFound,
    StreamNotHere,
    StreamUnavailable,
)
from relatum.waiting import ANSWER_S, Outages, Server

logger = logging.getLogger("relatum.test-outages")
AWAY = DatabaseUnavailable("refused")


@pytest.fixture
def outages() -> Outages:
    """Outages of named servers."""
    return Outages(logger, broker="amqp://u@b:1", database="d:2/n")


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger.name)


def texts(lines: list[logging.LogRecord]) -> list[tuple[str, str]]:
    """Level and text of each line."""
    return [(line.levelname, line.getMessage()) for line in lines]


def test_a_server_away_is_one_line_whoever_waits_and_however_often(
    outages: Outages, caplog: pytest.LogCaptureFixture
) -> None:
    """The first says that it is away, by name; the last that goes on says that it is back."""
    for _ in range(20):
        for who in ("a", "b", "c"):
            outages.failed(who, AWAY)
    assert texts(caplog.records) == [
        ("WARNING", "PostgreSQL d:2/n is away, and is waited for: DatabaseUnavailable: refused")
    ]
    assert not outages.is_up(Server.DATABASE)
    for who in ("a", "b", "x"):
        outages.over(who)
    assert len(caplog.records) == 1
    outages.over("c")
    assert texts(caplog.records[1:]) == [("INFO", "PostgreSQL d:2/n is back, after 0 s")]
    assert outages.is_up(Server.DATABASE)


def test_a_pool_that_others_use_up_is_no_outage(outages: Outages, caplog: pytest.LogCaptureFixture) -> None:
    """PostgreSQL was not asked; but whoever waited for it before still does."""
    used_up = DatabaseUnavailable("no connection became free", reason="pool")
    outages.answered(Server.DATABASE)
    outages.failed("a", used_up)
    assert outages.is_up(Server.DATABASE)
    assert "is away" not in caplog.text
    outages.over("a")
    outages.failed("b", AWAY)
    outages.failed("b", used_up)
    assert not outages.is_up(Server.DATABASE)


@pytest.mark.parametrize("error", [StreamUnavailable("starts", stream="s"), ReadTimeout("t"), ConnectionLost("l")])
def test_a_broker_that_starts_is_still_the_same_outage(
    outages: Outages, caplog: pytest.LogCaptureFixture, error: RelatumError
) -> None:
    """Streams of a broker that was away are back a moment after it: that is no news."""
    outages.failed("recording of stream 's'", BrokerUnavailable("gone"))
    outages.failed("recording of stream 's'", error)
    outages.over("recording of stream 's'")
    assert [line.levelname for line in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.parametrize("kind", [StreamUnavailable, StreamNotFound])
def test_a_stream_that_starts_after_its_broker_is_no_news_to_those_who_did_not_wait_for_that(
    outages: Outages,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[StreamUnavailable | StreamNotFound],
) -> None:
    """Whoever meets such a stream just after the broker is back keeps still, unless it lasts."""
    starts = kind("starts", stream="s")
    outages.failed("connections", BrokerUnavailable("gone"))
    outages.over("connections")
    assert not outages.failed("recording of stream 's'", starts)
    outages.over("recording of stream 's'")
    assert [line.levelname for line in caplog.records] == ["WARNING", "INFO"]
    monkeypatch.setattr("relatum.waiting._outages.STARTING_S", 0.0)
    for _ in range(2):
        outages.failed("recording of stream 's'", starts)
    assert texts(caplog.records[2:]) == [
        ("WARNING", f"recording of stream 's' waits, and is tried again: {kind.__name__}: starts")
    ]


def test_a_stream_that_is_not_there_while_others_still_wait_for_the_broker_is_no_news(
    outages: Outages, caplog: pytest.LogCaptureFixture
) -> None:
    """One that comes anew meets a broker that answers before its streams do, though nobody has said that it is back."""
    outages.failed("the members", BrokerUnavailable("gone"))
    outages.failed("reading of partition 's'", StreamNotHere("no replica", stream="s"))
    outages.over("the members")
    assert texts(caplog.records) == [
        ("WARNING", "RabbitMQ amqp://u@b:1 is away, and is waited for: BrokerUnavailable: gone"),
        ("INFO", "RabbitMQ amqp://u@b:1 is back, after 0 s"),
    ]


def test_who_comes_to_wait_for_something_else_lets_the_first_be_back(
    outages: Outages, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that is gone when the broker is back is not the broker's outage any more."""
    outages.failed("recording of stream 's'", BrokerUnavailable("gone"))
    outages.failed("recording of stream 's'", StreamNotFound("no such stream", stream="s"))
    outages.failed("recording of stream 's'", StreamNotFound("no such stream", stream="s"))
    outages.over("recording of stream 's'")
    assert texts(caplog.records) == [
        ("WARNING", "RabbitMQ amqp://u@b:1 is away, and is waited for: BrokerUnavailable: gone"),
        ("INFO", "RabbitMQ amqp://u@b:1 is back, after 0 s"),
        ("WARNING", "recording of stream 's' waits, and is tried again: StreamNotFound: no such stream"),
        ("INFO", "recording of stream 's' waits no more, after 0 s"),
    ]
    assert outages.is_up(Server.BROKER)


def test_a_defect_is_told_with_its_traceback_once(outages: Outages, caplog: pytest.LogCaptureFixture) -> None:
    """What nobody foresaw is shown whole, the first time; then as all else that is repeated."""
    for _ in range(3):
        outages.failed("leases", KeyError("x"))
    outages.failed("leases", AccessRefused("no"))
    assert [(line.levelname, bool(line.exc_info)) for line in caplog.records] == [("ERROR", True), ("WARNING", False)]


def test_a_server_that_was_never_asked_or_says_nothing_is_not_up(
    outages: Outages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up is who has answered: not at the start, and not while a question is open for long."""
    assert not outages.is_up(Server.DATABASE)
    outages.answered(Server.DATABASE)
    assert outages.is_up(Server.DATABASE)
    with outages.asking(Server.DATABASE):
        assert outages.is_up(Server.DATABASE)
        monkeypatch.setattr("relatum.waiting._outages.ANSWER_S", -ANSWER_S)
        assert not outages.is_up(Server.DATABASE)
        assert not outages.is_up(Server.BROKER)
    assert outages.is_up(Server.DATABASE)


def test_who_ends_while_it_waits_says_nothing_of_its_own(outages: Outages, caplog: pytest.LogCaptureFixture) -> None:
    """The last that waits and ends says that a server is back only where another has gone on."""
    outages.failed("a", AWAY)
    outages.forget("a")
    assert len(caplog.records) == 1
    outages.failed("a", AWAY)
    outages.failed("b", AWAY)
    outages.over("a")
    assert len(caplog.records) == 2
    outages.forget("b")
    assert caplog.records[-1].getMessage() == "PostgreSQL d:2/n is back, after 0 s"


def test_what_a_stop_ends_says_nothing_of_the_broker(caplog: pytest.LogCaptureFixture) -> None:
    """A read that was under way, and was ended because a component stops, is no outage; a database's silence is one."""
    caplog.set_level(logging.INFO, logger.name)
    stop = threading.Event()
    outages = Outages(logger, broker="amqp://u@b:1", database="d:2/n", stop=stop)
    stop.set()
    assert not outages.failed("renewing the leases", ReadTimeout("The time of the call is over (the work was ended)."))
    assert texts(caplog.records) == []
    assert outages.failed("renewing the leases", AWAY)
