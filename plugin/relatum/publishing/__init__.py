"""The publish path: clients' connections and producers whose messages can be related afterwards."""

from typing import TYPE_CHECKING

from relatum.faces import imported_later
from relatum.publishing._dead_letters import REASON_CHARACTERS_MAX, Burial, DeadLetters
from relatum.publishing._direct_publisher import DIRECT_TIMEOUT_S, DirectPublisher
from relatum.publishing._intercept import intercept, recording_here, release, stamped, statistics
from relatum.publishing._interception import RecorderChoice
from relatum.publishing._pika import OwnProperties, copy_with
from relatum.publishing._publish import intercepted_exchange, publish, publish_async, publisher_of
from relatum.publishing._publisher_statistics import PublisherStatistics
from relatum.publishing._receipt import AsyncReceipt, Receipt
from relatum.publishing._stamp import OnInvalid, Stamper

if TYPE_CHECKING:
    from relatum.publishing._aio_pika import came_back

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
    "came_back",
    "copy_with",
    "intercept",
    "intercepted_exchange",
    "publish",
    "publish_async",
    "publisher_of",
    "recording_here",
    "release",
    "stamped",
    "statistics",
]

# aio-pika is an extra: its adapter is imported when it is first used.
__getattr__ = imported_later(__name__, {"came_back": "relatum.publishing._aio_pika"})
