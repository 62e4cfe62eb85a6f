"""A publish that is asked for a receipt, where the client itself makes the message that is sent."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relatum.errors import ConfigurationError, PublishUnroutable
from relatum.headers import RECEIPT_HEADER
from relatum.uuid7 import uuid7

if TYPE_CHECKING:
    from relatum.publishing._locate import Sent


class Asking:
    """One such publish: what is given to the client, and what its interception has sent.

    Attributes:
        message_id: The caller's, or a new one.
        headers: The caller's, and the one by which the recorder is asked.
        sent: What was sent, once it was.
        came_back: Whether nothing was bound for it.
    """

    def __init__(self, message_id: str | None, headers: Mapping[str, Any] | None) -> None:
        self.message_id = message_id or uuid7(time.time_ns())
        # An id of the caller's may have been used before: then the header holds a name of the receipt's own.
        asked = uuid7(time.time_ns()) if message_id else True
        self.name = asked if isinstance(asked, str) else self.message_id
        self.headers = {**(headers or {}), RECEIPT_HEADER: asked}
        self.sent: Sent | None = None
        self.came_back = False

    def published(self) -> "Sent":
        """What was sent, and taken by the broker.

        Raises:
            PublishUnroutable: it came back.
            ConfigurationError: it was not published by a connection that is intercepted.
        """
        if self.sent is None:
            raise ConfigurationError(
                f"message {self.message_id} was published past the interception: no receipt tells where it is"
            )
        if self.came_back:
            raise PublishUnroutable(f"message {self.message_id} came back: nothing is bound for it", in_stream=False)
        return self.sent
