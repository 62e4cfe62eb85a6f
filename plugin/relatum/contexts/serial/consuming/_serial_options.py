"""What a serial consumer is told, checked once for both faces."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

from relatum.checks import checked_count, checked_name, checked_seconds, shown
from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX

Start: TypeAlias = Literal["first", "next"] | datetime
"""Where a new consumer name begins: with the first message, with what is published from now on, or at a moment."""

BATCH_MESSAGES: Final = 1_000
"""Messages of a batch by default."""

BATCH_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a batch by default."""

BATCH_S: Final = 0.02
"""Seconds a batch that is not full waits for more by default."""

HELD_MESSAGES_MAX: Final = 10_000
"""Messages held back in a partition by default; then the partition waits."""

HELD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Their bytes by default."""

LEASE_S: Final = 4.0
"""Seconds after which others take over from a member that died, by default; it renews four times as often."""

NAME_BYTES_MAX: Final = 255
"""Bytes of a consumer's name, as of a stream's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """How a serial consumer reads.

    Attributes:
        start: Where a new consumer name begins.
        batch_messages: Messages of a batch, at most.
        batch_bytes: Bytes of a batch, about: at least one message, however large.
        batch_s: Seconds a batch that is not full waits for more; 0 for not at all.
        held_messages_max: Messages held back in a partition; then it is read no further until some are delivered.
        held_bytes_max: Their bytes.
        lease_s: Seconds after which others take over from a member that died.
    """

    start: Start = "first"
    batch_messages: int = BATCH_MESSAGES
    batch_bytes: int = BATCH_BYTES
    batch_s: float = BATCH_S
    held_messages_max: int = HELD_MESSAGES_MAX
    held_bytes_max: int = HELD_BYTES_MAX
    lease_s: float = LEASE_S

    def __post_init__(self) -> None:
        if self.start not in ("first", "next") and not isinstance(self.start, datetime):
            raise InvalidInput(f"start= takes 'first', 'next' or a datetime, not {shown(self.start)}")
        for name in ("batch_messages", "batch_bytes", "held_messages_max", "held_bytes_max"):
            value = getattr(self, name)
            checked_count(name, value, most=INTEGER_MAX)
        check_seconds("batch_s", self.batch_s, at_least=0.0)
        # A lease shorter than a second lapses while its holder waits for a busy database.
        check_seconds("lease_s", self.lease_s, at_least=1.0)


def check_seconds(name: str, value: Any, *, at_least: float = 0.0) -> None:
    """Check a time span.

    Raises:
        InvalidInput: It is no number of seconds, or fewer than it must be.
    """
    checked_seconds(name, value, least=at_least)


def check_name(what: str, value: str) -> str:
    """Check a consumer's, or a super stream's name.

    Raises:
        InvalidInput: It is no text, an empty one, or too long.
    """
    if len(checked_name(what, value).encode()) > NAME_BYTES_MAX:
        raise InvalidInput(f"{what}= takes a name of at most {NAME_BYTES_MAX} bytes, not {shown(value)}")
    return value
