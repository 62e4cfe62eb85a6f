"""The bulks of one type: one being filled, some closed, and the messages that wait for another attempt. No I/O."""

import heapq
import secrets
from collections import deque
from collections.abc import Iterator

from relatum.collecting._bulk import Bulk, Collected, FlushReason
from relatum.collecting._collector_options import ExecutorOptions


class OpenBulk:
    """A bulk being filled."""

    __slots__ = ("bytes", "first_at", "last_at", "messages")

    def __init__(self, now: float) -> None:
        self.messages: list[Collected] = []
        self.bytes = 0
        self.first_at = self.last_at = now

    def add(self, message: Collected, now: float) -> None:
        """Take a message in."""
        self.messages.append(message)
        self.bytes += message.bytes
        self.last_at = now


class TypeBulks:
    """All bulks of one type. It decides by the type's own options; what concerns all types is the core's."""

    def __init__(self, type: str, options: ExecutorOptions) -> None:  # noqa: A002 - RabbitMQ's word for it
        self.type = type
        self.options = options
        self.open: OpenBulk | None = None
        self.waiting: deque[Bulk] = deque()
        self.running = 0
        self._admitted = 0
        self._admitted_bytes = 0
        self._retries: list[tuple[float, int, Collected]] = []
        self._count = 0

    def admit(self, message: Collected) -> None:
        """Count a message on its way into the store: it will need room in a bulk."""
        self._admitted += 1
        self._admitted_bytes += message.bytes

    def arrived(self, message: Collected) -> None:
        """A message that was counted by `admit` is stored, or will not be."""
        self._admitted -= 1
        self._admitted_bytes -= message.bytes

    def add(self, message: Collected, now: float) -> None:
        """Put a message into the bulk being filled; begins one where there is none."""
        if self.open is None:
            self.open = OpenBulk(now)
        self.open.add(message, now)

    @property
    def reached(self) -> FlushReason | None:
        """The size the bulk being filled has reached, if any."""
        if self.open is not None and self.open.bytes >= self.options.bulk_bytes:
            return FlushReason.BYTES
        if self.open is not None and len(self.open.messages) >= self.options.bulk_messages:
            return FlushReason.MESSAGES
        return None

    def due(self, now: float) -> FlushReason | None:
        """Why the bulk being filled is to be closed at this time, if it is."""
        if self.open is None:
            return None
        if now >= self.open.first_at + self.options.max_age_s:
            return FlushReason.AGE
        if self.options.idle_s is not None and now >= self.open.last_at + self.options.idle_s:
            return FlushReason.IDLE
        return None

    def deadlines(self) -> Iterator[float]:
        """The times at which something becomes due."""
        if self.open is not None:
            yield self.open.first_at + self.options.max_age_s
            if self.options.idle_s is not None:
                yield self.open.last_at + self.options.idle_s
        if self._retries:
            yield self._retries[0][0]

    def close(self, reason: FlushReason) -> Bulk | None:
        """Close the bulk being filled, and queue it; None where there is none."""
        if self.open is None:
            return None
        bulk = Bulk(secrets.randbits(63), self.type, tuple(self.open.messages), reason)
        self.open = None
        self.waiting.append(bulk)
        return bulk

    @property
    def is_queue_full(self) -> bool:
        """Whether as many bulks wait for a worker as may."""
        return len(self.waiting) >= self.options.queue_bulks

    @property
    def is_full(self) -> bool:
        """Whether as many bulks wait as may, with those that messages on their way will make."""
        messages, size = self._admitted, self._admitted_bytes
        if self.open is not None:
            messages, size = messages + len(self.open.messages), size + self.open.bytes
        coming = max(messages // self.options.bulk_messages, size // self.options.bulk_bytes)
        return len(self.waiting) + coming >= self.options.queue_bulks

    def take(self) -> Bulk | None:
        """The next bulk for a worker; None where there is none, or where as many run as may."""
        if not self.waiting or self.running >= self.options.workers:
            return None
        self.running += 1
        return self.waiting.popleft()

    def retry_at(self, message: Collected, due_at: float) -> None:
        """Keep a message until its next attempt is due."""
        self._count += 1
        heapq.heappush(self._retries, (due_at, self._count, message))

    def retries_due(self, now: float) -> list[Collected]:
        """The messages whose next attempt is due, taken out."""
        due: list[Collected] = []
        while self._retries and self._retries[0][0] <= now:
            due.append(heapq.heappop(self._retries)[2])
        return due

    def drop_retries(self) -> list[Collected]:
        """All messages that wait for a retry, taken out."""
        dropped = [message for _, _, message in self._retries]
        self._retries.clear()
        return dropped
