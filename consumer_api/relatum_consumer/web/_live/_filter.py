"""What somebody who looks wants to see."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Form = Literal["json", "rows"]


@dataclass(frozen=True, slots=True)
class Filter:
    """What a client wants to see; clients of the same one share all that is made for them.

    Attributes:
        streams: Streams and super streams; none for all.
        key: A key that messages have, empty for any.
        value: Its canonical value; None for any.
        form: JSON, or rows of HTML.
        most: Messages of an event at most, the newest.
    """

    streams: frozenset[str]
    key: str
    value: str | None
    form: Form
    most: int

    def has_stream(self, stream: str, super_stream: str | None) -> bool:
        """Whether a stream's messages are wanted."""
        return not self.streams or stream in self.streams or super_stream in self.streams

    def has_value(self, values: Sequence[str]) -> bool:
        """Whether a message is wanted that has these values of the key."""
        return not self.key or (bool(values) if self.value is None else self.value in values)
