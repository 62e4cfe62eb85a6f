"""What a collector and its executors are told: sizes, times, numbers, each with its limits."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from relatum.checks import checked_choice, checked_count, checked_seconds
from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX

WhenFull = Literal["block", "spill"]
"""What happens to a message when there is no room: `collect` waits for it; or bodies of bulks that wait are dropped
from memory and read again when it is their turn."""

BULK_BYTES: Final = 1024 * 1024
"""Bytes of a bulk by default."""

BULK_MESSAGES: Final = 500
"""Messages of a bulk by default."""

BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of all bulks by default."""

BULKS_MAX: Final = 64
"""Bulks being filled at one time by default."""

BACKOFF_MAX_S: Final = 3600.0
"""Seconds a message waits at most before its next attempt."""

CRASHES_MAX: Final = 10
"""Attempts beyond `attempts` that may end with the collector's death: a message that kills it is then given up."""

ATTEMPTS_MAX: Final = 1000
"""Attempts a message may be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """How messages of a type are put into bulks, and how those are handed on.

    Attributes:
        bulk_bytes: A bulk of that many bytes is closed.
        bulk_messages: A bulk of that many messages is closed.
        max_age_s: A bulk whose first message waited that long is closed.
        idle_s: A bulk to which nothing was added for that long is closed; None for never.
        workers: Bulks handed to the executor at the same time, each in a thread or task.
        queue_bulks: Closed bulks that may wait for a worker before the type counts as full.
        when_full: What happens then: "block" makes `collect` wait and followed streams stop; "spill" takes the
            message, and drops bodies from memory that are read again from their streams.
        joins_transaction: The executor writes by `bulk.connection`, in the transaction that stores its results: each
            message is consumed exactly once.
        attempts: Times a message is handed to the executor before it is given up.
        backoff_s: Seconds before the second attempt; twice as many before each further one, at most an hour.

    Raises:
        InvalidInput: One of them cannot be one.
    """

    bulk_bytes: int = BULK_BYTES
    bulk_messages: int = BULK_MESSAGES
    max_age_s: float = 1.0
    idle_s: float | None = None
    workers: int = 1
    queue_bulks: int = 8
    when_full: WhenFull = "block"
    joins_transaction: bool = False
    attempts: int = 3
    backoff_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("bulk_bytes", "bulk_messages", "workers", "queue_bulks", "attempts"):
            checked_count(name, getattr(self, name), most=INTEGER_MAX)
        if self.attempts > ATTEMPTS_MAX:
            raise InvalidInput(f"attempts is at most {ATTEMPTS_MAX}, not {self.attempts}")
        checked_seconds("max_age_s", self.max_age_s, zero=False)
        checked_seconds("backoff_s", self.backoff_s)
        if self.idle_s is not None:
            checked_seconds("idle_s", self.idle_s, zero=False)
        checked_choice("when_full", self.when_full, get_args(WhenFull))
        if not isinstance(self.joins_transaction, bool):
            raise InvalidInput(f"joins_transaction is True or False, not {self.joins_transaction!r}")

    def backoff_after(self, attempts: int) -> float:
        """Seconds to wait after that many attempts."""
        return min(BACKOFF_MAX_S, self.backoff_s * 2.0 ** min(attempts - 1, 32))
