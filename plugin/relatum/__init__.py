"""Relatum finds the messages that belong together, across RabbitMQ streams, without scanning them.

A publisher wraps its connection: `relatum.intercept(connection, database=URL, keys=["order_id"])`. One that needs the
offset of what it published calls `relatum.publish` (`publish_async` for aio-pika) and waits on the receipt.
"""

from relatum import errors
from relatum._ids import MessageId
from relatum.interception import AsyncReceipt, Receipt, intercept, publish, publish_async, release
from relatum.keys import KeyDefinition

__all__ = [
    "AsyncReceipt",
    "KeyDefinition",
    "MessageId",
    "Receipt",
    "errors",
    "intercept",
    "publish",
    "publish_async",
    "release",
]
