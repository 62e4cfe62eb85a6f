"""Arguments of public calls, checked before anything is asked, sent or written: one clear error for each kind.

Whatever a caller gives goes to PostgreSQL, whose integers have 64 bits and whose texts hold no NUL character, to the
broker, whose names are UTF-8, or into a wait, where a number of seconds past all calendars overflows.
"""

from typing import Any, Final

from relatum.errors import InvalidInput

COUNT_MAX: Final = 1_000_000_000
"""The largest number of things that can be asked for: more fit into no memory; PostgreSQL counts to 2^63 - 1."""

SECONDS_MAX: Final = 2**31 - 1
"""The longest time that can be waited for, 68 years: locks and sockets overflow somewhere past it."""


def checked_count(argument: str, value: Any, *, least: int = 1, most: int = COUNT_MAX, otherwise: str = "") -> int:
    """A number of things.

    Args:
        argument: The argument's name.
        value: What was given.
        least: The smallest number that can be meant.
        most: The largest.
        otherwise: What else can be given, for the error.

    Raises:
        InvalidInput: it is no integer between the two.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInput(f"{argument}= takes a number from {least:,} to {most:,}{otherwise}, not {_shown(value)}")
    return value


def checked_seconds(argument: str, value: Any, *, least: float = 0.0, most: float = SECONDS_MAX) -> float:
    """A number of seconds.

    Args:
        argument: The argument's name.
        value: What was given.
        least: The shortest time that can be meant.
        most: The longest; whatever it is, infinity and what is no number are refused.

    Raises:
        InvalidInput: it is no number of seconds between the two.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A comparison with what is not a number is false.
    if not is_number or not least <= value <= most or value == float("inf"):
        between = f"seconds, {least:g} or more" if most >= SECONDS_MAX else f"seconds from {least:g} to {most:g}"
        raise InvalidInput(f"{argument}= takes {between}, not {_shown(value)}")
    seconds: float = value
    return seconds


def checked_name(argument: str, value: Any) -> str:
    """A name of a stream, a super stream or a key.

    Raises:
        InvalidInput: it is no text, an empty one, or one that neither the broker nor PostgreSQL can hold.
    """
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{argument}= takes a name, not {_shown(value)}")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidInput(f"{argument}= takes a name; {_shown(value)} has a NUL character or half a surrogate pair")
    return value


def _shown(value: Any) -> str:
    """A value for a message: its beginning, in characters that any terminal can write."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"an integer of {value.bit_length()} bits"
    return ascii(value)[:80]
