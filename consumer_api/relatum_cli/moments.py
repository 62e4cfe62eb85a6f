"""Parses times and spans of time as people write them on a command line."""

import re
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from relatum_cli.show import note

FORMS: Final = (
    "2026-11-22T12:03, 2026-11-22, 12:03, yesterday 14:00, -5m or now; with a zone: Z, +01:00, Europe/Berlin, local"
)

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
"""The length of each unit, in seconds."""

_AGO: Final = re.compile(r"-\s*(?P<span>[\d.]+[smhd]?)|(?P<other>[\d.]+[smhd])(?:\s+ago)?", re.IGNORECASE)
_WRITTEN: Final = re.compile(
    r"(?:(?P<day>\d{4}-\d\d-\d\d|today|yesterday)(?:T|\s+|$))?"
    r"(?P<time>\d\d?:\d\d(?::\d\d(?:\.\d{1,6})?)?)?"
    r"\s*(?P<zone>Z|[+-]\d\d:?\d\d|[A-Za-z_]+(?:/[A-Za-z0-9_+-]+)*)?",
    re.IGNORECASE,
)


class ReadMoment(NamedTuple):
    """A moment, and what was assumed in words; empty if nothing was."""

    moment: datetime
    assumed: str


def parse_span(text: str) -> float:
    """Return the seconds of a span: a number, or a number with s, m, h or d."""
    found = _SPAN.fullmatch(text.strip())
    if not found:
        raise typer.BadParameter(f"{text!r} is not a span of time: give seconds, or 90s, 15m, 6h, 2d")
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > timedelta.max.total_seconds():
        raise typer.BadParameter(f"{text!r} is too long for a span of time")
    return seconds


def parse_moment(text: str) -> datetime:
    """Return the moment that a text means; if something was assumed, print on stderr how the text was read."""
    moment, assumed = read_moment(text)
    if assumed:
        shown = moment.isoformat(timespec="seconds" if not moment.microsecond else "microseconds")
        note(f"{text.strip()!r} is read as {shown} ({assumed})")
    return moment


def read_moment(text: str, now: datetime | None = None) -> ReadMoment:
    """Return the moment that a text in one of `FORMS` means.

    A time without a day is the last one that has passed. Without a zone it is in UTC, like the times in all output.
    """
    now = datetime.now(UTC) if now is None else now
    text = text.strip()
    if text.lower() == "now":
        return ReadMoment(now, "now")
    try:
        if ago := _AGO.fullmatch(text):
            return ReadMoment(now - timedelta(seconds=parse_span((ago["span"] or ago["other"]).lower())), "ago")
        if (written := _WRITTEN.fullmatch(text)) and (written["day"] or written["time"]):
            return _moment_of(written["day"], written["time"], written["zone"], now)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(f"{text!r} is not a time: write {FORMS}")


def _moment_of(day: str | None, clock: str | None, zone_name: str | None, now: datetime) -> ReadMoment:
    zone, words = _zone(zone_name)
    at = time.fromisoformat(clock if clock[2] == ":" else f"0{clock}") if clock else time()
    if day and day[0].isdigit():
        return ReadMoment(_combined(date.fromisoformat(day), at, zone), "" if zone_name else words)
    today = now.astimezone(zone).date()
    found = _combined(today, at, zone)
    if (day or "").lower() == "yesterday" or (day is None and found > now):
        found = _combined(today - timedelta(1), at, zone)
    return ReadMoment(found, words)


def _combined(day: date, at: time, zone: tzinfo | None) -> datetime:
    """Combine a day and a time in a zone; None is this machine's zone, with its offset on that day."""
    moment = datetime.combine(day, at, zone)
    return moment.astimezone() if zone is None else moment


def _zone(name: str | None) -> tuple[tzinfo | None, str]:
    """Return a zone by its name, or None for this machine's, and its description."""
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
    except (ZoneInfoNotFoundError, OSError) as error:
        raise ValueError(name) from error
