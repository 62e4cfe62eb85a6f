"""What a publication under a placement asks for, of whoever performs it."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from relatum.contexts.placement._entries import CONTROL_BYTES, Adoption, Entry, Fence, Marker, Placed
from relatum.contexts.placement._model import Move, Placement
from relatum.contexts.steps import Request

WhenAway: TypeAlias = Literal["known", "wait", "fail"]
"""What to do while the database is away: go on with known placements, wait, or fail."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sent:
    """A message, or an adoption, that was published.

    Attributes:
        name: The context or affinity set.
        stream: The partition it was published to.
        wanted: What it is found by.
        as_of: The generation its placement was right as of.
        is_doubtful: Whether it may not have arrived: an adoption that is not confirmed.
    """

    name: str
    stream: str
    wanted: Placed | Adoption
    as_of: int
    is_doubtful: bool = False


@dataclass(frozen=True, slots=True)
class ReadGeneration(Request[int]):
    """Read the generation of the super stream."""


@dataclass(frozen=True, slots=True)
class ReadChanges(Request[tuple[int, Sequence[Placement] | None]]):
    """Read what changed, and as of which generation; None instead where it cannot be told any more."""

    since: int


@dataclass(frozen=True, slots=True)
class Place(Request[Placement]):
    """Read the placement of a name, open or moving; make one where there is none, in a stream or by the rule."""

    name: str
    stream: str | None = None


@dataclass(frozen=True, slots=True)
class Send(Request[Any]):
    """Publish the message to the placement's partition and wait for the confirm; the answer is the client's own."""

    placement: Placement
    placed: Placed
    as_of: int


@dataclass(frozen=True, slots=True)
class FindMove(Request[Move | None]):
    """Find the first move of a name out of or into a stream whose fence or marker has a higher epoch."""

    name: str
    epoch: int
    stream: str


@dataclass(frozen=True, slots=True)
class Search(Request[int | None]):
    """Find what was sent, where it lies behind a fence or a marker of its name with a higher epoch.

    Read from an offset up to where the stream ends now. What is met before such a fence or marker, or not at all, is no
    stray, unless it is asked for wherever it lies. The answer is its offset.
    """

    sent: Sent
    from_offset: int
    anywhere: bool = False


class StrayFinder:
    """What a `Search` finds: fed with the entries of a partition, one after the other."""

    def __init__(self, sent: Sent, *, anywhere: bool = False) -> None:
        self._sent = sent
        self._is_behind = anywhere
        self._needle = (str(sent.wanted) if not isinstance(sent.wanted, Adoption) else sent.wanted.stream).encode()
        self.is_over = False
        """Whether what follows cannot matter."""

    def may_matter(self, record: bytes) -> bool:
        """Whether a record's bytes need a look."""
        return CONTROL_BYTES in record or self._needle in record

    def look(self, offset: int, entry: Entry) -> int | None:
        """The entry's offset, where it is what is looked for, behind the end of its placement."""
        if isinstance(entry, Fence | Marker):
            self._is_behind |= entry.epoch > self._sent.wanted.epoch and self._sent.name in entry.contexts
            return None
        found = entry if isinstance(entry, Adoption) else entry.placed
        if found is None or found != self._sent.wanted:
            return None
        self.is_over = True
        return offset if self._is_behind else None


@dataclass(frozen=True, slots=True)
class Adopt(Request[None]):
    """Publish an adoption to a stream and wait for the broker's confirm."""

    stream: str
    adoption: Adoption


@dataclass(frozen=True, slots=True)
class TakeOver(Request[None]):
    """Go on with moves of the super stream whose mover is gone, if there are any, for so many seconds at most."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Sleep(Request[None]):
    """Let time pass."""

    seconds: float


PublicationRequest: TypeAlias = (
    ReadGeneration | ReadChanges | Place | Send | FindMove | Search | Adopt | TakeOver | Sleep
)
"""What a step asks for."""


Steps: TypeAlias = Generator[PublicationRequest, Any, T]
