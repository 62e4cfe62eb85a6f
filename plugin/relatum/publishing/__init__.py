"""The publish path: intercepting clients' connections and producers, and receipts."""

from relatum.publishing._dead_letters import REASON_CHARACTERS_MAX, DeadLetterPublisher, DeadLetters
from relatum.publishing._direct_publisher import DIRECT_TIMEOUT_S, DirectPublisher
from relatum.publishing._intercept import intercept, release, stamped, statistics
from relatum.publishing._message_group import AsyncMessageGroup, MessageGroup
from relatum.publishing._pika import OwnProperties, copy_with
from relatum.publishing._publish import publish, publish_async, was_returned
from relatum.publishing._publisher_statistics import PublisherStatistics
from relatum.publishing._receipt import AsyncReceipt, Receipt
from relatum.publishing._stamp import Stamper

__all__ = [
    "DIRECT_TIMEOUT_S",
    "REASON_CHARACTERS_MAX",
    "AsyncMessageGroup",
    "AsyncReceipt",
    "DeadLetterPublisher",
    "DeadLetters",
    "DirectPublisher",
    "MessageGroup",
    "OwnProperties",
    "PublisherStatistics",
    "Receipt",
    "Stamper",
    "copy_with",
    "intercept",
    "publish",
    "publish_async",
    "release",
    "stamped",
    "statistics",
    "was_returned",
]
