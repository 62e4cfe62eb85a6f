"""Statistics of an intercepted connection."""

from collections import Counter as Counts
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from relatum.errors import PublishError, PublishNacked, PublishOutcomeUnknown, PublishRejected, PublishUnroutable
from relatum.metrics import Counter, Distribution, Gauge, Histogram, Observed, reported

_REASONS: Final[tuple[tuple[type[PublishError], str], ...]] = (
    (PublishUnroutable, "unroutable"),
    (PublishNacked, "nacked"),
    (PublishRejected, "rejected"),
    (PublishOutcomeUnknown, "unknown"),
)


@reported("client")
@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStatistics:
    """Counts of an intercepted connection.

    Attributes:
        connections: 1 until the connection is released, then 0.
        published: Messages sent, whatever their outcome.
        errors: Messages sent whose publish failed, by reason: "unroutable", "nacked", "rejected", "unknown".
        skipped: Values that will not be recorded (`on_invalid="skip"`), by reason.
        receipt_s: Seconds from sending until a receipt had the message's places.
        left: Messages that `release` left to the next recorder, by stream; None: their number is unknown. Empty before
            `release`, if all messages were recorded, and if other connections still use the recorder.
    """

    connections: Annotated[int, Gauge("relatum_publisher_connections", "Intercepted connections")]
    published: Annotated[int, Counter("relatum_publisher_published_total", "Messages sent")]
    errors: Annotated[
        Mapping[str, int],
        Counter("relatum_publisher_errors_total", "Messages sent whose publish failed", by="reason"),
    ]
    skipped: Annotated[
        Mapping[str, int],
        Counter("relatum_publisher_skipped_values_total", "Values published that will not be recorded", by="reason"),
    ]
    receipt_s: Annotated[
        Observed,
        Distribution("relatum_publisher_receipt_seconds", "Time from sending until the message's places are known"),
    ]
    left: Mapping[str, int | None]


class PublisherCounts:
    """The counters of one connection, updated by the thread or event loop that publishes on it.

    The object refers to no other, so it may outlive the connection.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.published = 0
        self.errors: Counts[str] = Counts()
        self.skipped: Counts[tuple[str, str]] = Counts()
        """By key and reason."""
        self.receipt_s = Histogram()
        self.left: Mapping[str, int | None] = {}

    def failed(self, error: PublishError) -> PublishError:
        """Count the error of a message already counted as published."""
        self.errors[next((reason for kind, reason in _REASONS if isinstance(error, kind)), "unknown")] += 1
        return error

    def sent_and_failed(self, error: PublishError) -> PublishError:
        """Count a sent message and the error of its publish."""
        self.published += 1
        return self.failed(error)

    def statistics(self) -> PublisherStatistics:
        """Return the counts so far."""
        skipped: Counts[str] = Counts()
        for (_, reason), count in list(self.skipped.items()):
            skipped[reason] += count
        return PublisherStatistics(
            connections=int(self.is_open),
            published=self.published,
            errors=dict(self.errors),
            skipped=dict(skipped),
            receipt_s=self.receipt_s.observed(),
            left=dict(self.left),
        )
