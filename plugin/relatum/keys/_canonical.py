"""Converts a key's values to their canonical form, in which they are stored, looked up and compared.

A canonical value is always text, so one column and one index serve all keys. Equal values in messages are equal in the
table:

| key type | from | canonical form |
| --- | --- | --- |
| `text` | `str` | itself, code point for code point: no trimming, no case folding, no Unicode normalisation |
| | `int` | its decimal digits: 42 and "42" are one value of a text key |
| | `bool` | `true` or `false`: never 1 or 0 |
| `integer` | `int` within 64 bits | its decimal digits |
| | `str` of an optional `-` and digits | the digits of that number: "042" is 42 |
| `timestamp` | `datetime`; without a zone it is UTC | microseconds since 1970, UTC, in decimal |
| | `int` | taken as microseconds since 1970, UTC |
| | ISO 8601 text with a zone | as the `datetime` that the text denotes |

For every type, `bytes` count as the text that they encode in UTF-8. `None` is not a value: it makes no row and no
error. All other values are invalid, each for a `SkipReason`.
"""

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from relatum.common.limits import INTEGER_MAX, INTEGER_MIN, KEY_VALUE_BYTES_MAX, TIME_US_MAX, TIME_US_MIN

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_INTEGER: Final = re.compile(r"-?[0-9]{1,32}\Z", re.ASCII)


class KeyType(StrEnum):
    """The type of a key's values, which determines which values are equal."""

    TEXT = "text"
    INTEGER = "integer"
    TIMESTAMP = "timestamp"


class SkipReason(StrEnum):
    """Why a value cannot be a key's value. The recorder's counters use these names."""

    NESTED = "nested"
    DECIMAL = "decimal"
    FLOAT = "float"
    NUL = "nul_character"
    NOT_UNICODE = "not_unicode"
    TOO_LONG = "too_long"
    NOT_INTEGER = "not_integer"
    NOT_TIMESTAMP = "not_timestamp"
    OUT_OF_RANGE = "out_of_range"
    SUBSECOND = "fraction_of_a_second"
    UNSUPPORTED = "unsupported_type"
    UNDECODABLE = "undecodable_message"
    TOO_MANY = "too_many_values"
    NOT_JSON = "not_json"
    BODY_TOO_LARGE = "body_too_large"
    NOT_TRACE_ID = "not_trace_id"


_VALID_FORMS: Final = {
    SkipReason.NOT_INTEGER: "an integer is digits, such as 42",
    SkipReason.NOT_TIMESTAMP: "a timestamp is ISO 8601 with a zone, such as 2026-11-23T14:00:00Z, or microseconds",
    SkipReason.FLOAT: "a floating-point number has no unique text: use text or an integer",
}


def described(reason: SkipReason) -> str:
    """Return a reason as text for an error, followed by the valid values if that helps."""
    return f"{reason}: {_VALID_FORMS[reason]}" if reason in _VALID_FORMS else str(reason)


class InvalidValue(ValueError):
    """The value is invalid for the key (field `reason`)."""

    def __init__(self, reason: SkipReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


def microseconds(moment: datetime) -> int:
    """Return a datetime as integer microseconds since 1970, UTC. A datetime without a zone counts as UTC.

    With a zone, the result may be out of the range of `datetime`: see `timestamp_us`.
    """
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // _MICROSECOND


def moment(time_us: int) -> datetime:
    """Return an aware UTC `datetime`: the inverse of `microseconds`."""
    return _EPOCH + timedelta(microseconds=time_us)


def canonical(value: Any, key_type: KeyType) -> str:
    """Return the canonical form of a value that is not None.

    Raises:
        InvalidValue: the value is invalid for a key of this type (field `reason`).
    """
    if type(value) is str and key_type is KeyType.TEXT:
        return checked_text(value)  # nearly all values
    if isinstance(value, (bytes, bytearray, memoryview)):
        # RabbitMQ 3.13 and later deliver binary headers as text, earlier versions as binary.
        try:
            value = str(value, "utf-8")
        except UnicodeDecodeError:
            raise InvalidValue(SkipReason.NOT_UNICODE) from None
    if key_type is KeyType.TEXT:
        return _text(value)
    if key_type is KeyType.INTEGER:
        return _integer(value)
    return str(timestamp_us(value))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return checked_text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return _in_range(int(value))
    raise InvalidValue(_type_reason(value, SkipReason.UNSUPPORTED))


def checked_text(value: str) -> str:
    """Return the text; raise `InvalidValue` if a row or an index entry cannot hold it."""
    if "\0" in value:
        raise InvalidValue(SkipReason.NUL)
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise InvalidValue(SkipReason.NOT_UNICODE) from None
    if size > KEY_VALUE_BYTES_MAX:
        raise InvalidValue(SkipReason.TOO_LONG)
    return value


def is_integer_text(value: Any) -> bool:
    """Whether a value is text of an optional `-` and digits."""
    return isinstance(value, str) and _INTEGER.match(value) is not None


def _integer(value: Any) -> str:
    if not is_integer_text(value) and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidValue(_type_reason(value, SkipReason.NOT_INTEGER))
    return _in_range(int(value))


def _in_range(value: int) -> str:
    if not INTEGER_MIN <= value <= INTEGER_MAX:
        raise InvalidValue(SkipReason.OUT_OF_RANGE)
    return str(value)


def timestamp_us(value: Any) -> int:
    """Return the value of a timestamp key as integer microseconds since 1970, UTC.

    Raises:
        InvalidValue: the value is not a time between the years 1 and 9999.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            parsed = datetime.fromisoformat(value)
            # Text without a zone is refused: its zone is unknown.
            value = value if parsed.tzinfo is None else parsed
    if isinstance(value, datetime):
        value = microseconds(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValue(_type_reason(value, SkipReason.NOT_TIMESTAMP))
    if not TIME_US_MIN <= value <= TIME_US_MAX:
        raise InvalidValue(SkipReason.OUT_OF_RANGE)
    return int(value)


def _type_reason(value: Any, otherwise: SkipReason) -> SkipReason:
    """Return the reason why no key accepts values of this type; `otherwise` if some key does."""
    if isinstance(value, float):
        return SkipReason.FLOAT
    if isinstance(value, (dict, list, tuple, set)):
        return SkipReason.NESTED
    return SkipReason.DECIMAL if type(value).__name__ == "Decimal" else otherwise


def join_components(components: list[str]) -> str:
    r"""Return the canonical form of a composite: its components, joined by `|`, each with `\` before every `|` and `\`.

    Raises:
        InvalidValue: the result is longer than a value may be.
    """
    return checked_text("|".join(part.replace("\\", "\\\\").replace("|", "\\|") for part in components))
