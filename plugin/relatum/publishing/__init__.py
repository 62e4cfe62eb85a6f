"""The publish path: connections of pika and aio-pika whose messages can be related afterwards."""

from relatum.interception._group import MessageGroup, OnIncomplete
from relatum.interception._group_async import AsyncMessageGroup
from relatum.interception._intercept import intercept, release
from relatum.interception._interception import RecorderChoice
from relatum.interception._publish import publish
from relatum.interception._publish_async import publish_async
from relatum.interception._receipt import AsyncReceipt, Receipt
from relatum.interception._stamp import OnInvalid

__all__ = [
    "AsyncMessageGroup",
    "AsyncReceipt",
    "MessageGroup",
    "OnIncomplete",
    "OnInvalid",
    "Receipt",
    "RecorderChoice",
    "intercept",
    "publish",
    "publish_async",
    "release",
]
