"""What a serial consumer is told, checked once for both faces."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

from relatum.checks import checked_callable, checked_count, checked_name, checked_seconds, shown
from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX

Start: TypeAlias = Literal["first", "next"] | datetime
"""Where a new consumer name begins: with the first message, with what is published from now on, or at a moment."""

Told: TypeAlias = Callable[[str], Any]
"""Is told of a partition by its stream's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialOptions:
    """How a serial consumer reads.

    Attributes:
        start: Where a name begins that is new: "first", "next" (with what is published from now on) or a datetime.
        header: The header that names contexts; None takes the one stored, and "serialization_context" where nobody has
            opened the super stream yet.
        batch_messages: Messages of a batch, at most.
        batch_bytes: Their bytes, about; one larger message still is a batch.
        batch_s: Seconds a batch that is not full waits for more; 0 for not at all.
        held_messages_max: Messages held back in a partition; then it is read no further until some are delivered.
        held_bytes_max: Their bytes.
        lease_s: Seconds after which others take over from a member that died; at least 1. It renews four times as
            often.
        on_gained: Called with a partition's name when this member begins with it: from a thread of the consumer, with
            asyncio in the loop.
        on_lost: Called when this member has it no more.

    Raises:
        InvalidInput: one of them cannot be.
    """

    start: Start = "first"
    header: str | None = None
    batch_messages: int = 1_000
    batch_bytes: int = 4 * 1024 * 1024
    batch_s: float = 0.02
    held_messages_max: int = 10_000
    held_bytes_max: int = 64 * 1024 * 1024
    lease_s: float = 4.0
    on_gained: Told | None = None
    on_lost: Told | None = None

    def __post_init__(self) -> None:
        if self.start not in ("first", "next") and not isinstance(self.start, datetime):
            raise InvalidInput(f"start= takes 'first', 'next' or a datetime, not {shown(self.start)}")
        if self.header is not None:
            checked_name("header", self.header)
        for name in ("batch_messages", "batch_bytes", "held_messages_max", "held_bytes_max"):
            checked_count(name, getattr(self, name), most=INTEGER_MAX)
        checked_seconds("batch_s", self.batch_s)
        # A lease shorter than a second lapses while its holder waits for a busy database.
        checked_seconds("lease_s", self.lease_s, least=1.0)
        for name in ("on_gained", "on_lost"):
            if getattr(self, name) is not None:
                checked_callable(name, getattr(self, name))
