"""The publish path: connections of pika and aio-pika whose messages can be related afterwards."""

from relatum.publishing._dead_letters import REASON_CHARACTERS_MAX, Burial, DeadLetters
from relatum.publishing._direct import DIRECT_TIMEOUT_S, DirectPublisher
from relatum.publishing._intercept import intercept, release, statistics
from relatum.publishing._interception import RecorderChoice
from relatum.publishing._publish import publish, publisher_of
from relatum.publishing._publish_async import intercepted_exchange, publish_async
from relatum.publishing._publisher_statistics import PublisherStatistics
from relatum.publishing._receipt import AsyncReceipt, Receipt
from relatum.publishing._stamp import OnInvalid, Stamper
from relatum.publishing.clients._pika import OwnProperties, copy_with

__all__ = [
    "DIRECT_TIMEOUT_S",
    "REASON_CHARACTERS_MAX",
    "AsyncReceipt",
    "Burial",
    "DeadLetters",
    "DirectPublisher",
    "OnInvalid",
    "OwnProperties",
    "PublisherStatistics",
    "Receipt",
    "RecorderChoice",
    "Stamper",
    "copy_with",
    "intercept",
    "intercepted_exchange",
    "publish",
    "publish_async",
    "publisher_of",
    "release",
    "statistics",
]
