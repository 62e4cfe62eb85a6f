"""Where a message lies."""

from typing import NamedTuple


class MessageId(NamedTuple):
    """Where a message lies: the stream's name and the offset in it.

    The AMQP property `message_id` is another thing and is called by its full name everywhere.
    """

    stream: str
    offset: int

    def __str__(self) -> str:
        return f"{self.stream}@{self.offset}"
