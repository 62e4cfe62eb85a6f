"""Messages that come back unrouted, on pika's channels: whoever is told of one sees it as it was published."""

from collections import OrderedDict
from typing import Any, Final

from pika import BasicProperties
from pika.channel import Channel
from pika.exceptions import NackError, UnroutableError

from relatum.headers import RECEIPT_HEADER, TIME_HEADER
from relatum.publishing._stamp import Stamp

RETURNS: Final = "_relatum_returns"
"""Where a channel keeps its `Returns`."""

REMEMBERED_MAX: Final = 4096
"""Mandatory messages of one channel that are remembered, about 1 MiB; the broker returns a message within moments."""


class Returns:
    """Stands in for a channel's `_on_return`, and takes what was added out of what comes back.

    Before all callbacks: pika gives each of them the same properties.

    Attributes:
        names: What the message that is being returned is known by to its receipt: header and `message_id`.
    """

    def __init__(self, channel: Channel) -> None:
        self.__wrapped__ = channel._on_return
        self._stamps: OrderedDict[tuple[Any, Any], Stamp] = OrderedDict()
        self.names: tuple[Any, Any] = (None, None)

    @classmethod
    def of(cls, channel: Channel) -> "Returns":
        """Those of a channel, from now on."""
        returns = vars(channel).get(RETURNS)
        if not isinstance(returns, cls):
            returns = cls(channel)
            setattr(channel, RETURNS, returns)
            channel._on_return = returns
        return returns

    @staticmethod
    def put_back(channel: Channel) -> None:
        """Leave a channel as it was."""
        returns = vars(channel).pop(RETURNS, None)
        if returns is not None and vars(channel).get("_on_return") is returns:
            del channel._on_return

    def expect(self, stamp: Stamp) -> None:
        """Remember what was added to a message that may come back."""
        if not (stamp.added or stamp.names_message):
            return  # It was stamped before, by who publishes with a receipt.
        key = stamp.message_id, (stamp.headers or {}).get(TIME_HEADER)
        self._stamps.pop(key, None)
        self._stamps[key] = stamp._replace(headers=None)
        if len(self._stamps) > REMEMBERED_MAX:
            self._stamps.popitem(last=False)

    def __call__(self, method: Any, header: Any, body: Any) -> Any:
        properties = header.properties
        headers = properties.headers or {}
        self.names = (headers.get(RECEIPT_HEADER), properties.message_id)
        stamp = self._stamps.get((properties.message_id, headers.get(TIME_HEADER)))
        if stamp is not None:
            restore(properties, stamp)
        return self.__wrapped__(method, header, body)


def restore(properties: BasicProperties, stamp: Stamp) -> None:
    """Take what was added out of properties that came back from the broker."""
    if stamp.names_message:
        properties.message_id = None
    if properties.headers is not None:
        for name in stamp.added:
            properties.headers.pop(name, None)
        if not properties.headers and not stamp.had_headers:
            properties.headers = None


def strip_returned(error: "UnroutableError | NackError", stamp: Stamp) -> None:
    """Take what was added out of the messages an error returns: the caller compares them with what it published."""
    for message in error.messages:
        restore(message.properties, stamp)
