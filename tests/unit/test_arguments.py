"""Whatever is given for a number, a time, a name or a URL is one clear error, or is read as it is meant."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
import typer

from relatum.common.checks import COUNT_MAX, SECONDS_MAX, checked_count, checked_name, checked_seconds, seconds_text
from relatum.common.waiting import Deadline
from relatum.errors import AccessRefused, ConfigurationError, InvalidInput
from relatum.reading import BrokerAddress
from relatum.store.address import parse_database
from relatum.store.translation import translated_errors
from relatum_cli.options import parse_moment

COUNTS: list[Any] = [0, -1, True, 1.0, math.nan, math.inf, "1", None, 2**31, 2**63 - 1, 2**63, 10**5000]
SECONDS: list[Any] = [-1, -0.001, True, math.nan, math.inf, -math.inf, "1", None, 1e300, 2**63, 10**5000]
NAMES: list[Any] = ["", "a\0b", "\ud800", b"orders", 7, None, ["orders"], "é" * 128]


@pytest.mark.parametrize(
    ("check", "argument", "said", "values"),
    [
        (checked_count, "limit", "^limit= takes", COUNTS),
        (checked_seconds, "timeout_s", "^timeout_s= takes seconds", SECONDS),
        (checked_name, "stream", "^stream= takes a name", NAMES),
    ],
)
def test_what_is_no_count_no_time_and_no_name(
    check: Callable[[str, Any], Any], argument: str, said: str, values: list[Any]
) -> None:
    """It is refused by its argument's name, in a line that any terminal can show, and never whole."""
    for value in values:
        with pytest.raises(InvalidInput, match=said) as caught:
            check(argument, value)
        assert len(str(caught.value).encode()) < 400, value


def test_the_ends_of_what_can_be_given() -> None:
    """The least and the most are taken."""
    assert [checked_count("limit", each) for each in (1, COUNT_MAX)] == [1, COUNT_MAX]
    assert [checked_seconds("timeout_s", each) for each in (0, 0.5, SECONDS_MAX)] == [0, 0.5, SECONDS_MAX]
    assert checked_seconds("before_s", 1e300, most=math.inf) == 1e300
    for name in ("bestellungen-ä\U0001f600", "é" * 127):
        assert checked_name("stream", name) == name


def test_errors_show_seconds_as_people_say_them() -> None:
    """No more digits than anybody reads, no zeros behind a point; so does a call whose time is over."""
    shown = {0: "0 s", 0.05: "0.05 s", 0.5: "0.5 s", 1: "1 s", 2.3791: "2.4 s", 10.0: "10 s", 12.6: "13 s"}
    assert {seconds: seconds_text(seconds) for seconds in shown} == shown
    assert seconds_text(86_400) == "86,400 s"
    assert [str(Deadline(10.0)), str(Deadline(None, Deadline(2.3791)))] == ["10 s", "2.4 s"]


@pytest.mark.parametrize(
    ("url", "host", "password", "vhost"),
    [
        ("amqp://u:p%40ss%2Fword@host", "host", "p@ss/word", "/"),
        ("amqp://u:p@ss@host/a%40b", "host", "p@ss", "a@b"),
        ("amqp://u:p@[::1]:5672/v", "::1", "p", "v"),
        ("amqps://u:p@host/?certfile=/a/me@here.pem", "host", "p", "/"),
    ],
)
def test_what_is_quoted_is_read(url: str, host: str, password: str, vhost: str) -> None:
    """What a URL may hold is not taken for a mistake."""
    address = BrokerAddress.parse(url)
    assert (address.host, address.password, address.vhost) == (host, password, vhost)


@pytest.mark.parametrize("number", ["7", "-1", "0", "+3"])
def test_whole_numbers_are_taken(number: str) -> None:
    """Each way in which libpq takes a whole number is taken."""
    assert parse_database(f"postgresql://db/name?connect_timeout={number.replace('+', '%2B')}")


def test_an_option_that_psycopg_refuses_is_configuration() -> None:
    """Also where it is of the environment, or of a caller's own engine, and not of a URL."""
    with pytest.raises(ConfigurationError, match="bad value for connect_timeout"), translated_errors():
        psycopg.connect("host=127.0.0.1 port=1", connect_timeout="abc")


@pytest.mark.parametrize("what", ["schema relatum", "table relationships", "sequence streams_stream_id_seq"])
def test_a_missing_privilege_names_the_roles(what: str) -> None:
    """PostgreSQL's words are followed by the roles that the migration made."""
    with pytest.raises(AccessRefused, match=r"relatum_consumer.*relatum_recorder"), translated_errors():
        raise psycopg.errors.InsufficientPrivilege(f"permission denied for {what}")


NOW = datetime(2026, 11, 22, 9, 30, 15, tzinfo=UTC)


def at(day: int, hour: int = 0, minute: int = 0, second: int = 0) -> datetime:
    return datetime(2026, 11, day, hour, minute, second, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2026-11-22T12:03", at(22, 12, 3)),
        ("2026-11-22 12:03:04", at(22, 12, 3, 4)),
        ("2026-11-22T12:03:04.5", at(22, 12, 3, 4) + timedelta(milliseconds=500)),
        ("2026-11-22T12:03:04Z", at(22, 12, 3, 4)),
        ("2026-11-22T12:03+01:00", at(22, 11, 3)),
        ("2026-11-22T12:03:04.123456-0530", at(22, 17, 33, 4) + timedelta(microseconds=123456)),
        ("2026-11-20", at(20)),
        ("09:12", at(22, 9, 12)),
        ("09:12:30", at(22, 9, 12, 30)),
        # That time has not come yet today.
        ("12:03", at(21, 12, 3)),
        ("10:12+01:00", at(22, 9, 12)),
        ("-5m", NOW - timedelta(minutes=5)),
        ("-90", NOW - timedelta(seconds=90)),
        ("-1d", NOW - timedelta(days=1)),
        ("now", NOW),
    ],
)
def test_a_time_is_read_as_it_is_meant(text: str, meant: datetime) -> None:
    """Dates, times, spans back from now; UTC where no zone is given, as commands show times."""
    assert parse_moment(text, NOW) == meant


@pytest.mark.parametrize(
    "text",
    ["", "tomorrow", "12", "25:00", "2026-02-30", "yesterday", "12:03 Europe/Berlin", "-5y", "-99999999999d", "UTC"],
)
def test_what_is_no_time_is_refused_with_the_ways_to_write_one(text: str) -> None:
    """Text that is not a time is an error of usage that shows how to write one."""
    with pytest.raises(typer.BadParameter, match=r"12:03|time span"):
        parse_moment(text, NOW)


def test_how_a_time_was_read_is_said_where_something_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr; not where a zone was written."""
    parse_moment("2026-11-22T12:03")
    assert capsys.readouterr().err == (
        "'2026-11-22T12:03' is read as 2026-11-22T12:03:00+00:00 (UTC, since no zone was given)\n"
    )
    parse_moment("2026-11-22T12:03+01:00")
    assert capsys.readouterr() == ("", "")
