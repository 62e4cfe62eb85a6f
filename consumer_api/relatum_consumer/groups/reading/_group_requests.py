"""What reading groups asks of the outside world, besides what every look-up does."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from relatum.errors import RelatumError
from relatum.reading import Message
from relatum.steps import Request
from relatum_consumer.lookups import LookupRequest

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class OpenMany(Request[None]):
    """Begin to read many messages, planned together; what was begun before ends. Answer: None."""

    ids: Iterable[tuple[str, int]]
    window: int


@dataclass(frozen=True, slots=True)
class TakeMany(Request[list[Message | RelatumError]]):
    """Read so many more of them. Answer: for each id, in order, its message, or as a value why there is none."""

    count: int


GroupRequest: TypeAlias = LookupRequest | OpenMany | TakeMany
GroupSteps: TypeAlias = Generator[GroupRequest, Any, _Result]
GivingSteps: TypeAlias = Generator[GroupRequest | _Item, Any, _Result]
"""Steps that give something on the way."""
