"""The publish path: intercepting clients' connections and producers, and receipts."""

from relatum.publishing._intercept import intercept, release, stamped, statistics
from relatum.publishing._interception import PublisherStatistics
from relatum.publishing._message_group import AsyncMessageGroup, MessageGroup, Numbering
from relatum.publishing._publish import publish, publish_async
from relatum.publishing._receipt import AsyncReceipt, Receipt
from relatum.publishing._stamp import Stamper

__all__ = [
    "AsyncMessageGroup",
    "AsyncReceipt",
    "MessageGroup",
    "Numbering",
    "PublisherStatistics",
    "Receipt",
    "Stamper",
    "intercept",
    "publish",
    "publish_async",
    "release",
    "stamped",
    "statistics",
]
