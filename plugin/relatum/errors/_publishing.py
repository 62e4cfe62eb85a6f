"""Errors of messages that were to be published. See `relatum.errors`."""

from collections.abc import Callable
from typing import Any

from relatum.errors._root import RelatumError


class PublishError(RelatumError):
    """A publish did not end as confirmed (field `in_stream`: False, or None where it is not known)."""

    in_stream: bool | None = None


class PublishRejected(PublishError):
    """The broker took the message into no stream."""

    in_stream: bool | None = False


class PublishNacked(PublishRejected):
    """The broker refused the message (`basic.nack`)."""


class PublishUnroutable(PublishRejected):
    """No queue or stream is bound for the message (`basic.return`)."""


class PublishOutcomeUnknown(PublishError):
    """Connection or time was lost after sending: the message may or may not be in the stream.

    `settle(timeout_s)` finds out by reading the streams: it returns the message's places, or raises `PublishRejected`
    (it is nowhere and cannot arrive any more) or this error again. It is to be awaited where the publish was. After
    pickling it is gone: it belongs to the process that published.
    """

    settle: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild without `settle`: it holds connections of this process."""
        kind, args, fields = super().__reduce__()
        return kind, args, {name: value for name, value in fields.items() if name != "settle"}
