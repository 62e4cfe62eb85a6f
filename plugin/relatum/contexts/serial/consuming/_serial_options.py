"""How a serial consumer reads."""

from dataclasses import dataclass
from typing import Literal

from relatum.checks import checked_choice, checked_count, checked_name, checked_seconds
from relatum.limits import INTEGER_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialOptions:
    """How a serial consumer reads.

    Attributes:
        start: Where a new name begins: with the "first" message, or with the "next" one that is published.
        header: The header that names contexts; None takes the one stored, and "serialization_context" where nobody has
            opened the super stream yet.
        batch_messages: Messages of a batch, at most.
        batch_bytes: Their bytes, about; one larger message still is a batch.
        batch_s: Seconds a batch that is not full waits for more; 0 for not at all.
        held_messages_max: Messages held back in a partition; then it is read no further until some are delivered.
        held_bytes_max: Their bytes.
        lease_s: Seconds after which others take over from a member that died; at least 1. It renews four times as
            often.

    Raises:
        InvalidInput: one of them cannot be.
    """

    start: Literal["first", "next"] = "first"
    header: str | None = None
    batch_messages: int = 1_000
    batch_bytes: int = 4 * 1024 * 1024
    batch_s: float = 0.02
    held_messages_max: int = 10_000
    held_bytes_max: int = 64 * 1024 * 1024
    lease_s: float = 4.0

    def __post_init__(self) -> None:
        checked_choice("start", self.start, ("first", "next"))
        if self.header is not None:
            checked_name("header", self.header)
        for name in ("batch_messages", "batch_bytes", "held_messages_max", "held_bytes_max"):
            checked_count(name, getattr(self, name), most=INTEGER_MAX)
        checked_seconds("batch_s", self.batch_s)
        # A lease shorter than a second lapses while its holder waits for a busy database.
        checked_seconds("lease_s", self.lease_s, least=1.0)
