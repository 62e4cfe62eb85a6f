"""Parses times and spans of time as people write them on a command line."""

import re
from datetime import UTC, datetime, time, timedelta
from typing import Final

import typer

from relatum_cli.show import note

FORMS: Final = "2026-11-22T12:03, 2026-11-22, 12:03, -5m or now; in UTC, or with a zone such as +01:00 at the end"

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
"""The length of each unit, in seconds."""


def parse_span(text: str) -> float:
    """Return the seconds of a span: a number, or a number with s, m, h or d."""
    found = _SPAN.fullmatch(text.strip())
    if not found:
        raise typer.BadParameter(f"{text!r} is not a span of time: give seconds, or 90s, 15m, 6h, 2d")
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > timedelta.max.total_seconds():
        raise typer.BadParameter(f"{text!r} is too long for a span of time")
    return seconds


def parse_moment(text: str, now: datetime | None = None) -> datetime:
    """Return the moment that a text in one of `FORMS` means; if no zone was given, print on stderr how it was read.

    A time without a day is the last one that has passed.
    """
    now = datetime.now(UTC) if now is None else now
    text = text.strip()
    if text.lower() == "now":
        return now
    try:
        if text.startswith("-"):
            return now - timedelta(seconds=parse_span(text[1:]))
        if text[2:3] == ":":
            clock = time.fromisoformat(text)
            moment = datetime.combine(now.astimezone(clock.tzinfo or UTC), clock)
            moment -= timedelta(moment.replace(tzinfo=clock.tzinfo or UTC) > now)
        else:
            moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a time: write {FORMS}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
        note(f"{text!r} is read as {moment.isoformat()} (UTC, since no zone was given)")
    return moment
