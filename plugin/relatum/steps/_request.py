"""What steps ask for."""

from collections.abc import Generator
from typing import Any, Generic, Self, TypeAlias, TypeVar

_Answer = TypeVar("_Answer")
_Result = TypeVar("_Result")


class Request(Generic[_Answer]):
    """Something to be done for steps; the type is its answer's. Each kind is a frozen dataclass that says what is done.

    @dataclass(frozen=True, slots=True)
    class Bounds(Request[StreamBounds]):
        stream: str

    bounds = yield from Bounds("orders")
    """

    __slots__ = ()

    def __iter__(self) -> Generator[Self, Any, _Answer]:
        """Ask for it: the answer is what the driver sends."""
        answer: _Answer = yield self
        return answer


Steps: TypeAlias = Generator[Request[Any], Any, _Result]
"""Steps that return a result. Rooms that ask for a few kinds of requests alone name those, for their performers."""
