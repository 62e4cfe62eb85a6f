"""The bulks of one type: options, the bulk being filled, waiting bulks and retries. No I/O."""

import heapq
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

from relatum.checks import checked_choice, checked_count, checked_seconds
from relatum.collecting._bulk import Bulk, Collected, FlushReason
from relatum.errors import InvalidInput
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX

WhenFull = Literal["block", "spill"]
"""What to do if there is no room for a message: `collect` waits, or bodies of waiting bulks are dropped from memory
and read again when a worker takes them."""

BULK_BYTES: Final = 1024 * 1024
"""Default bytes of a bulk."""

BULK_MESSAGES: Final = 500
"""Default messages of a bulk."""

BYTES_MAX: Final = 64 * 1024 * 1024
"""Default maximum bytes of all bulks."""

BULKS_MAX: Final = 64
"""Default maximum number of bulks being filled."""

BACKOFF_MAX_S: Final = 3600.0
"""Maximum seconds that a message waits before its next attempt."""

CRASHES_MAX: Final = 10
"""Attempts beyond `attempts` that may end with the collector's death before the message fails for good."""

ATTEMPTS_MAX: Final = 1000
"""Maximum of `attempts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """How bulks of a type are filled and consumed.

    Attributes:
        bulk_bytes: Close a bulk at this number of bytes. Default: 1 MiB.
        bulk_messages: Close a bulk at this number of messages. Default: 500.
        max_age_s: Close a bulk when its first message has waited this many seconds. Default: 1.
        idle_s: Close a bulk when nothing was added for this many seconds. None (default): never.
        workers: Number of bulks consumed at the same time, each in a thread or task. Default: 1.
        queue_bulks: Number of closed bulks that may wait for a worker; then the type is full. Default: 8.
        when_full: "block" (default): `collect` waits, and followed streams are not read. "spill": messages are taken;
            bodies are dropped from memory and read again from their streams.
        joins_transaction: Whether the executor writes through `bulk.connection`, in the transaction that stores its
            results: exactly once. Default: False.
        attempts: Attempts before a message fails for good, from 1 to 1,000. Default: 3.
        backoff_s: Seconds before the second attempt; doubled for each further one, up to an hour. Default: 1.

    Raises:
        InvalidInput: An option is out of range.
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
        for name in ("bulk_bytes", "bulk_messages", "workers", "queue_bulks"):
            checked_count(name, getattr(self, name), most=INTEGER_MAX)
        checked_count("attempts", self.attempts, most=ATTEMPTS_MAX)
        checked_seconds("max_age_s", self.max_age_s, zero=False)
        checked_seconds("backoff_s", self.backoff_s)
        if self.idle_s is not None:
            checked_seconds("idle_s", self.idle_s, zero=False)
        checked_choice("when_full", self.when_full, get_args(WhenFull))
        if not isinstance(self.joins_transaction, bool):
            raise InvalidInput(f"joins_transaction is True or False, not {self.joins_transaction!r}")

    def backoff_after(self, attempts: int) -> float:
        """Return the seconds to wait after this number of attempts."""
        return min(BACKOFF_MAX_S, self.backoff_s * 2.0 ** min(attempts - 1, 32))


class TypeBulks:
    """All bulks of one type, by the type's options. The core enforces the limits over all types."""

    def __init__(self, type: str, options: ExecutorOptions) -> None:  # noqa: A002 - RabbitMQ's word for it
        self.type = type
        self.options = options
        self.filling: list[Collected] = []
        self.bytes = 0
        self.first_at = self.last_at = 0.0
        self.waiting: deque[Bulk] = deque()
        self.running = 0
        self._expected = 0
        self._expected_bytes = 0
        self._retries: list[tuple[float, MessageId, Collected]] = []

    def expect(self, message: Collected, count: int = 1) -> None:
        """Reserve room in a bulk for a message that is being stored; with -1, release it."""
        self._expected += count
        self._expected_bytes += count * message.bytes

    def add(self, message: Collected, now: float) -> None:
        """Add a message to the bulk being filled, or start a bulk with it."""
        if not self.filling:
            self.first_at = now
        self.filling.append(message)
        self.bytes += message.bytes
        self.last_at = now

    @property
    def reached(self) -> FlushReason | None:
        """The size limit that the bulk being filled has reached; None if it has reached none."""
        if self.filling and self.bytes >= self.options.bulk_bytes:
            return FlushReason.BYTES
        return FlushReason.MESSAGES if len(self.filling) >= self.options.bulk_messages else None

    def deadlines(self) -> Iterator[tuple[float, FlushReason | None]]:
        """Yield when the bulk being filled must be closed, and why; and when the next retry is due."""
        if self.filling:
            yield self.first_at + self.options.max_age_s, FlushReason.AGE
            if self.options.idle_s is not None:
                yield self.last_at + self.options.idle_s, FlushReason.IDLE
        if self._retries:
            yield self._retries[0][0], None

    @property
    def is_full(self) -> bool:
        """Whether `queue_bulks` bulks wait for a worker, with those that messages now stored or filled in will make."""
        messages, size = self._expected + len(self.filling), self._expected_bytes + self.bytes
        coming = max(messages // self.options.bulk_messages, size // self.options.bulk_bytes)
        return len(self.waiting) + coming >= self.options.queue_bulks

    def retry_at(self, message: Collected, due_at: float) -> None:
        heapq.heappush(self._retries, (due_at, message.place, message))

    def retries_due(self, now: float) -> list[Collected]:
        """Remove and return the messages whose next attempt is due."""
        due: list[Collected] = []
        while self._retries and self._retries[0][0] <= now:
            due.append(heapq.heappop(self._retries)[2])
        return due

    def drop_retries(self, places: Collection[MessageId] | None = None) -> list[Collected]:
        """Remove and return messages that wait for a retry; None: all of them."""
        dropped = [message for _, place, message in self._retries if places is None or place in places]
        # A sorted list is a heap.
        self._retries = [] if places is None else sorted(each for each in self._retries if each[1] not in places)
        return dropped
