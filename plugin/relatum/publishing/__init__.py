"""The publish path: connections of pika and aio-pika whose messages can be related afterwards."""

from relatum.publishing._intercept import intercept, release, statistics
from relatum.publishing._interception import RecorderChoice
from relatum.publishing._publish import publish
from relatum.publishing._publish_async import publish_async
from relatum.publishing._publisher_statistics import PublisherStatistics
from relatum.publishing._receipt import AsyncReceipt, Receipt
from relatum.publishing._stamp import OnInvalid

__all__ = [
    "AsyncReceipt",
    "OnInvalid",
    "PublisherStatistics",
    "Receipt",
    "RecorderChoice",
    "intercept",
    "publish",
    "publish_async",
    "release",
    "statistics",
]
