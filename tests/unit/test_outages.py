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
    StreamNotFound,
    StreamNotHere,
    StreamUnavailable,
)
from relatum.waiting import ANSWER_S, Outages, Server

logger = logging.getLogger("relatum.test-outages")
AWAY = DatabaseUnavailable("refused")
GONE = BrokerUnavailable("gone")
NO_STREAM = StreamNotFound("no such stream", stream="s")

ON = "goes on"
ENDS = "ends while it waits"

POSTGRESQL_AWAY = "WARNING PostgreSQL d:2/n is away, and will be retried: DatabaseUnavailable: refused"
POSTGRESQL_BACK = "INFO PostgreSQL d:2/n is back, after 0 s"
RABBITMQ_AWAY = "WARNING RabbitMQ amqp://u@b:1 is away, and will be retried: BrokerUnavailable: gone"
RABBITMQ_BACK = "INFO RabbitMQ amqp://u@b:1 is back, after 0 s"

ALL = ("a", "b", "c")

CASES: dict[str, tuple[list[tuple[str, Exception | str]], list[str]]] = {
    "whoever waits, and however often": ([(who, AWAY) for _ in range(20) for who in ALL], [POSTGRESQL_AWAY]),
    "nobody says that it is back who did not wait, or while others do": (
        [*((who, AWAY) for who in ALL), ("a", ON), ("b", ON), ("x", ON)],
        [POSTGRESQL_AWAY],
    ),
    "the last that goes on says that it is back": (
        [*((who, AWAY) for who in ALL), ("a", ON), ("b", ON), ("c", ON)],
        [POSTGRESQL_AWAY, POSTGRESQL_BACK],
    ),
    "who ends while it waits does not": ([("a", AWAY), ("a", ENDS)], [POSTGRESQL_AWAY]),
    "the last that ends does where another has gone on": (
        [("a", AWAY), ("b", AWAY), ("a", ON), ("b", ENDS)],
        [POSTGRESQL_AWAY, POSTGRESQL_BACK],
    ),
    **{
        f"streams of a broker that was away: {type(error).__name__}": (
            [("s", GONE), ("s", error), ("s", ON)],
            [RABBITMQ_AWAY, RABBITMQ_BACK],
        )
        for error in (StreamUnavailable("starts", stream="s"), ReadTimeout("t"), ConnectionLost("l"))
    },
    "one that comes anew meets a broker before its streams": (
        [("the members", GONE), ("reading", StreamNotHere("no replica", stream="s")), ("the members", ON)],
        [RABBITMQ_AWAY, RABBITMQ_BACK],
    ),
    "a stream that is gone when its broker is back is another outage": (
        [("s", GONE), ("s", NO_STREAM), ("s", NO_STREAM), ("s", ON)],
        [
            RABBITMQ_AWAY,
            RABBITMQ_BACK,
            "WARNING s is waiting and will retry: StreamNotFound: no such stream",
            "INFO s is no longer waiting, after 0 s",
        ],
    ),
}
"""What befalls those who wait, and the lines that are logged."""


@pytest.fixture
def outages(caplog: pytest.LogCaptureFixture) -> Outages:
    caplog.set_level(logging.INFO, logger.name)
    return Outages(logger, broker="amqp://u@b:1", database="d:2/n")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{line.levelname} {line.getMessage()}" for line in caplog.records]


@pytest.mark.parametrize("case", CASES)
def test_an_outage_is_one_line_and_one_at_its_end(
    case: str, outages: Outages, caplog: pytest.LogCaptureFixture
) -> None:
    """However many wait for the same server, and whatever they meet as it comes back."""
    steps, expected = CASES[case]
    for who, what in steps:
        if isinstance(what, Exception):
            outages.failed(who, what)
        else:
            {ON: outages.over, ENDS: outages.forget}[what](who)
    assert lines(caplog) == expected
    server = Server.DATABASE if "PostgreSQL" in expected[0] else Server.BROKER
    if ENDS not in (what for _, what in steps):
        assert outages.is_up(server) == (len(expected) > 1)


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


@pytest.mark.parametrize("kind", [StreamUnavailable, StreamNotFound])
def test_a_stream_that_starts_after_its_broker_is_no_news_unless_it_lasts(
    outages: Outages,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[StreamUnavailable | StreamNotFound],
) -> None:
    """Whoever did not wait for the broker, and meets such a stream just after it is back, keeps still."""
    starts = kind("starts", stream="s")
    outages.failed("connections", GONE)
    outages.over("connections")
    outages.failed("s", starts)
    outages.over("s")
    assert lines(caplog) == [RABBITMQ_AWAY, RABBITMQ_BACK]
    monkeypatch.setattr("relatum.waiting._failures.STARTING_S", 0.0)
    for _ in range(2):
        outages.failed("s", starts)
    assert lines(caplog)[2:] == [f"WARNING s is waiting and will retry: {kind.__name__}: starts"]


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
        monkeypatch.setattr("relatum.waiting._failures.ANSWER_S", -ANSWER_S)
        assert not outages.is_up(Server.DATABASE)
        assert not outages.is_up(Server.BROKER)
    assert outages.is_up(Server.DATABASE)


def test_what_a_stop_ends_says_nothing_of_the_broker(outages: Outages, caplog: pytest.LogCaptureFixture) -> None:
    """A read that was under way, and was ended because a component stops, is no outage; a database's silence is one."""
    stop = threading.Event()
    outages = Outages(logger, broker="amqp://u@b:1", database="d:2/n", stop=stop)
    stop.set()
    outages.failed("leases", ReadTimeout("The call has timed out (the work was ended)."))
    assert lines(caplog) == []
    outages.failed("leases", AWAY)
    assert lines(caplog) == [POSTGRESQL_AWAY]
