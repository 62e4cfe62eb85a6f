"""Times as people write them on a command line, and how they were read."""

import re
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Annotated, Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from relatum.terminal._output import errors
from relatum.terminal._shared_options import parse_span

FORMS: Final = (
    "2026-11-22T12:03, 2026-11-22, 12:03, yesterday 14:00, -5m or now; with a zone: Z, +01:00, Europe/Berlin, local"
)

_WRITTEN: Final = re.compile(
    r"(?:(?P<day>\d{4}-\d\d-\d\d|today|yesterday)(?:T|\s+|$))?"
    r"(?P<time>\d\d?:\d\d(?::\d\d(?:\.\d{1,6})?)?)?"
    r"\s*(?P<zone>Z|[+-]\d\d:?\d\d|[A-Za-z_]+(?:/[A-Za-z0-9_+-]+)*)?",
    re.IGNORECASE,
)
_AGO: Final = re.compile(r"-\s*(?P<span>[\d.]+[smhd]?)|(?P<other>[\d.]+[smhd])(?:\s+ago)?", re.IGNORECASE)


class ReadMoment(NamedTuple):
    """A moment, and what was assumed of it; empty where all was written."""

    moment: datetime
    assumed: str


def read_moment(text: str, now: datetime | None = None) -> ReadMoment:
    """The moment that a text means.

    `FORMS` are the ways to write one. A time without a day is the last one that there was; without a zone it is UTC, as
    the times are that commands show.
    """
    now = datetime.now(UTC) if now is None else now
    text = text.strip()
    if text.lower() == "now":
        return ReadMoment(now, "now")
    if ago := _AGO.fullmatch(text):
        try:
            return ReadMoment(now - timedelta(seconds=parse_span((ago["span"] or ago["other"]).lower())), "ago")
        except OverflowError:
            raise _none(text) from None
    written = _WRITTEN.fullmatch(text)
    if written is None or not (written["day"] or written["time"]):
        raise _none(text)
    try:
        return _of_parts(written["day"], written["time"], written["zone"], now)
    except (ValueError, OverflowError):
        raise _none(text) from None


def _of_parts(day: str | None, clock: str | None, zone: str | None, now: datetime) -> ReadMoment:
    of, name = _zone(zone)
    at = time.fromisoformat(clock if clock[2] == ":" else f"0{clock}") if clock else time()
    assumed = "" if zone else name
    today = now.astimezone(of).date()
    if day is None or day.lower() in ("today", "yesterday"):
        found = _combined(today if day is None or day.lower() == "today" else today - timedelta(1), at, of)
        if day is None and found > now:
            found = _combined(today - timedelta(1), at, of)
        return ReadMoment(found, name)
    return ReadMoment(_combined(date.fromisoformat(day), at, of), assumed)


def _combined(day: date, at: time, zone: tzinfo | None) -> datetime:
    """A day and a time in a zone; None is this machine's, with the offset that it has on that day."""
    moment = datetime.combine(day, at, zone)
    return moment.astimezone() if zone is None else moment


def _zone(name: str | None) -> tuple[tzinfo | None, str]:
    """A zone by what was written, and what to call it; None is that of this machine."""
    if name is None:
        return UTC, "UTC, since no zone was given"
    if name.upper() in ("Z", "UTC"):
        return UTC, "UTC"
    if name.lower() == "local":
        return None, "local time"
    if name[0] in "+-":
        return datetime.strptime(name, "%z").tzinfo, name
    try:
        return ZoneInfo(name), name
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(name) from error


def _none(text: str) -> typer.BadParameter:
    return typer.BadParameter(f"{text!r} is no time: write {FORMS}")


def parse_moment(text: str) -> datetime:
    """What Typer takes as `parser=` for a moment; where something was assumed, stderr says how it was read."""
    moment, assumed = read_moment(text)
    if assumed:
        shown = moment.isoformat(timespec="seconds" if not moment.microsecond else "microseconds")
        errors.print(f"{text.strip()!r} is read as {shown} ({assumed})", soft_wrap=True)
    return moment


SinceOption = Annotated[
    datetime | None,
    typer.Option(
        parser=parse_moment, metavar="MOMENT", help=f"Only messages of this time or later: {FORMS}.", show_default=False
    ),
]
UntilOption = Annotated[
    datetime | None,
    typer.Option(parser=parse_moment, metavar="MOMENT", help="Only earlier messages.", show_default=False),
]
