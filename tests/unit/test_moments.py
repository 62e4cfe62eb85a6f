"""Times as people write them, and how they are read."""

import time
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
import typer

from relatum.terminal import parse_moment, read_moment

NOW = datetime(2026, 11, 22, 9, 30, 15, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")


def at(day: int, hour: int = 0, minute: int = 0, second: int = 0, *, zone: timezone | ZoneInfo = UTC) -> datetime:
    """A moment of that November."""
    return datetime(2026, 11, day, hour, minute, second, tzinfo=zone)


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
        ("2026-11-20 Europe/Berlin", at(20, zone=BERLIN)),
        ("09:12", at(22, 9, 12)),
        ("9:12:30", at(22, 9, 12, 30)),
        # It has not been that late today.
        ("12:03", at(21, 12, 3)),
        ("10:12 Europe/Berlin", at(22, 9, 12)),
        ("yesterday 14:00", at(21, 14)),
        ("Today", at(22)),
        ("today 23:00", at(22, 23)),
        ("-5m", NOW - timedelta(minutes=5)),
        ("-90", NOW - timedelta(seconds=90)),
        ("2h ago", NOW - timedelta(hours=2)),
        ("1d", NOW - timedelta(days=1)),
        ("now", NOW),
    ],
)
def test_a_time_is_read_as_it_is_meant(text: str, meant: datetime) -> None:
    """Dates, times, spans back from now; UTC where no zone is given, as commands show times."""
    assert read_moment(text, NOW).moment == meant


@pytest.mark.parametrize(
    ("text", "hour", "offset"),
    [
        ("2026-07-01T12:00 local", 10, 2),
        ("2026-12-01T12:00 local", 11, 1),
        ("2026-11-22 09:30 local", 8, 1),
        ("yesterday 12:00 local", 11, 1),
        ("09:30 local", 8, 1),
    ],
)
def test_local_time_has_the_offset_of_its_own_day(
    text: str, hour: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`local` in July is summer time, in whatever month it is asked."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        found = read_moment(text, NOW).moment
    time.tzset()
    assert found.utcoffset() == timedelta(hours=offset)
    assert found.astimezone(UTC).hour == hour


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tomorrow",
        "12",
        "25:00",
        "2026-02-30",
        "12:03 Nowhere/Else",
        "12:03 ../../etc",
        "-5y",
        "-99999999999d",
        "UTC",
    ],
)
def test_what_is_no_time_is_refused_with_the_ways_to_write_one(text: str) -> None:
    """One line, an error of use."""
    with pytest.raises(typer.BadParameter, match=r"12:03|longer"):
        read_moment(text, NOW)


def test_how_a_time_was_read_is_said_where_something_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, by the day and the zone; not where all was written."""
    parse_moment("2026-11-22T12:03")
    assert capsys.readouterr().err == (
        "'2026-11-22T12:03' is read as 2026-11-22T12:03:00+00:00 (UTC, since no zone was given)\n"
    )
    parse_moment("12:03 Europe/Berlin")
    assert "(Europe/Berlin)" in capsys.readouterr().err
    parse_moment("2026-11-22T12:03+01:00")
    assert capsys.readouterr() == ("", "")
