"""What reading groups asks of the outside world, besides what every look-up does."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from relatum.ids import MessageId
from relatum.reading import Message
from relatum_consumer._requests import Request

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Sift:
    """Read a stream's messages from `start` to before `stop`. Answer: what `take` makes of each, None left out."""

    stream: str
    start: int
    stop: int
    take: Callable[[Message], Any]


@dataclass(frozen=True, slots=True)
class OpenMany:
    """Begin to read many messages, planned together; what was begun before ends. Answer: None."""

    ids: Iterable[MessageId]
    window: int


@dataclass(frozen=True, slots=True)
class TakeMany:
    """Read so many more of them. Answer: for each id, in order, its message, or as a value why there is none."""

    count: int


@dataclass(frozen=True, slots=True)
class Give:
    """Hand something to the caller. Answer: None, once the caller asks for the next."""

    what: Any


GroupRequest: TypeAlias = Request | Sift | OpenMany | TakeMany | Give
GroupSteps: TypeAlias = Generator[GroupRequest, Any, _Result]
