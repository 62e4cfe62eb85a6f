"""What time a message has, and whose time that is."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from relatum.limits import TIME_US_MAX, TIME_US_MIN
from relatum.reading._message_values import TimeSource
from relatum.uuid7 import time_us_of

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
SECOND: Final = timedelta(seconds=1)
MICROSECOND: Final = timedelta(microseconds=1)


def message_time(stamped: Any, timestamp: Any, message_id: Any, chunk_ms: int | None) -> tuple[int | None, TimeSource]:
    """A message's time, in microseconds, and whose it is.

    Args:
        stamped: The header `relatum_time`; anything but a moment's microseconds counts as none.
        timestamp: The property `timestamp`; it counts in whole seconds, all that AMQP 0.9.1 shows of it.
        message_id: The property `message_id`; one that no intercepted connection made counts as none.
        chunk_ms: When the chunk was written; None where that is not known.
    """
    if type(stamped) is int and TIME_US_MIN <= stamped <= TIME_US_MAX:
        return stamped, TimeSource.HEADER
    if timestamp is not None and (second := whole_second(timestamp)) is not None:
        return (second - EPOCH) // MICROSECOND, TimeSource.PROPERTY
    if (time_us := time_us_of(message_id)) is not None:
        return time_us, TimeSource.MESSAGE_ID
    if chunk_ms is not None and 0 <= chunk_ms * 1000 <= TIME_US_MAX:
        return chunk_ms * 1000, TimeSource.CHUNK
    return None, TimeSource.UNKNOWN


def whole_second(value: Any) -> datetime | None:
    """AMQP 0.9.1 knows whole seconds only; deliveries and records must say the same."""
    if not isinstance(value, datetime):
        return None
    moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return EPOCH + (moment - EPOCH) // SECOND * SECOND
