"""The place of a message."""

from typing import NamedTuple


class MessageId(NamedTuple):
    """The place of a message: the stream's name and the offset in it.

    The AMQP property `message_id` is another thing and is called by its full name everywhere.
    """

    stream: str
    offset: int

    def __str__(self) -> str:
        return f"{self.stream}@{self.offset}"
