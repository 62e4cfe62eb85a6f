"""Common arguments of lookups, checked before any request."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias, get_args

from relatum.checks import checked_count, checked_name
from relatum.errors import InvalidInput
from relatum.keys import InvalidValue, moment, timestamp_us
from relatum.limits import TIME_US_MAX, TIME_US_MIN

Names: TypeAlias = str | Sequence[str] | None
"""A name, several names, or None."""

Order: TypeAlias = Literal["oldest", "newest", "offset"]


def names_of(argument: str, names: Names) -> tuple[str, ...] | None:
    """Return the stream names of an argument without duplicates; None for all."""
    if names is None:
        return None
    is_several = isinstance(names, Iterable) and not isinstance(names, str | bytes)
    found = tuple(names) if is_several else (names,)
    if not found or not all(isinstance(name, str) for name in found):
        raise InvalidInput(f"{argument}= takes a name, several names, or None for all")
    return tuple(dict.fromkeys(checked_name(argument, name) for name in found))


def check_limit(limit: int | None, order: Order) -> None:
    """Check the number of messages and the order."""
    if limit is not None:
        checked_count("limit", limit, otherwise=", or None for all")
    if order not in get_args(Order):
        raise InvalidInput(f"order= takes one of {', '.join(get_args(Order))}")


def time_us_of(given: Any) -> int:
    """Return a moment in microseconds since 1970, UTC."""
    if not isinstance(given, datetime):
        raise InvalidInput(f"a moment is a datetime, not {type(given).__name__}")
    try:
        return timestamp_us(given)
    except InvalidValue as error:
        raise InvalidInput(f"no moment between the years 1 and 9999: {error.reason}") from error


def moment_of(time_us: int) -> datetime:
    """Return microseconds since 1970 as a moment, capped at the calendar's ends."""
    return moment(max(TIME_US_MIN, min(time_us, TIME_US_MAX)))


def span_of(since: datetime | None, until: datetime | None) -> tuple[int | None, int | None]:
    """Return the bounds of a time span in microseconds since 1970, UTC; None for no bound."""
    low, high = _bound("since", since), _bound("until", until)
    if low is not None and high is not None and low > high:
        raise InvalidInput("since= is later than until=, so that no message can be between them")
    return low, high


def _bound(argument: str, given: datetime | None) -> int | None:
    try:
        return None if given is None else time_us_of(given)
    except InvalidInput as error:
        raise InvalidInput(f"{argument}=: {error}") from error


def is_in_span(time_us: int | None, since: int | None, until: int | None) -> bool:
    """Whether a time is from `since` to before `until`; None is no bound, or an unknown time."""
    if time_us is None:
        return since is None and until is None
    return (since is None or time_us >= since) and (until is None or time_us < until)
