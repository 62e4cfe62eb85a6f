"""When a channel that the broker closed says that a message is in no stream: it was refused, or came behind what was.

A broker takes what comes over a channel in order, and drops whatever follows the frame it refused. So the last message
that was published on the channel is in no stream, if it is a publish that was refused: that message, or an earlier one.
"""

import re
from typing import Final

_OF_MESSAGE: Final = re.compile(
    r"PRECONDITION_FAILED - (message size|invalid expiration|user_id property|invalid message)"
)
"""What RabbitMQ says of a message alone, 3.10 to 4.3 alike. Its other 406 are about acknowledgements and declarations.

Source: RabbitMQ, `rabbit_channel.erl`: `check_msg_size`, `check_expiration_header`, `check_user_id_header`.
"""

_OF_PUBLISHING: Final = re.compile(
    r"ACCESS_REFUSED - (write access to exchange|access to topic|access to exchange|.*publish)", re.IGNORECASE
)

BLOCKING: Final = frozenset({403, 404})
"""Reply codes by which a broker refuses a publish: no permission, no such exchange.

Nothing else that a blocking channel has under way is answered by them.
"""

MALFORMED: Final = frozenset({501, 502, 505})
"""Reply codes for frames that the broker cannot take, by which it closes the connection: in what order or size they
come, or what is in them. What follows them on the connection is dropped."""


def refuses_message(text: str) -> bool:
    """Whether a close's text is about a message: its size, its expiration, whose it says to be."""
    return _OF_MESSAGE.search(text) is not None


def refuses_publish(text: str, exchange: str) -> bool:
    """Whether a close's text is about a publish to an exchange, on a channel that may have other things under way."""
    named = f"'{exchange or 'amq.default'}'" in text
    missing = named and "NOT_FOUND - no exchange" in text
    return refuses_message(text) or missing or (named and _OF_PUBLISHING.search(text) is not None)
