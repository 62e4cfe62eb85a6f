"""What a look-up asks of the outside world, as values: the look-ups themselves do no input or output.

A look-up is steps (`relatum.steps`). The blocking and the asyncio face perform their requests, each in its own way, and
do nothing else; so both give the same answers by construction.
"""

from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import sqlalchemy as sa

from relatum.errors import RelatumError
from relatum.ids import MessageId
from relatum.reading import Agreement, BrokerIdentity, KeptChunks, Message, Position, StreamBounds
from relatum.steps import Request
from relatum.store.database import Either
from relatum.waiting import pause

CLOSED: Final = "these relations were closed: make others, or ask inside the `with` block"
"""What is said where they are used after that."""

NOT_REACHED_YET: Final = "The broker did not answer in time: another call still waits for the first connection to it."
"""The error of those who wait for a reader that another call opens."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Select(Request[list[Any]]):
    """Run a statement. Answer: its rows, a list of tuples."""

    sql: sa.TextClause | Either
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Read(Request[list[Message | RelatumError]]):
    """Read messages. Answer: for each id, in order, the message or the `NotFound` or `AccessRefused` error it met.

    `kept`: Chunks that were read before and need not be read again; None for none.
    """

    ids: Sequence[MessageId]
    kept: KeptChunks | None = None


@dataclass(frozen=True, slots=True)
class Bounds(Request[StreamBounds]):
    """Find a stream's ends. Answer: `StreamBounds`."""

    stream: str


@dataclass(frozen=True, slots=True)
class AllBounds(Request[dict[str, StreamBounds]]):
    """Find the ends of many streams. Answer: those that are had at once; others are asked for by themselves.

    Of `lasts` the first offset is not asked for, and is 0.
    """

    streams: Sequence[str]
    kept: KeptChunks
    lasts: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Missing(Request[list[str]]):
    """Find those of many streams that the broker surely has not. Answer: their names."""

    streams: Sequence[str]


@dataclass(frozen=True, slots=True)
class Partitions(Request[list[str]]):
    """Find the streams of a super stream. Answer: their names; none where there is no such super stream."""

    super_stream: str


@dataclass(frozen=True, slots=True)
class Agree(Request[dict[str, Agreement]]):
    """See whether streams are those of which a position is known. Answer: an `Agreement` for each."""

    positions: Mapping[str, Position]
    kept: KeptChunks


@dataclass(frozen=True, slots=True)
class Identify(Request[BrokerIdentity]):
    """See which broker answers. Answer: a `BrokerIdentity`."""


@dataclass(frozen=True, slots=True)
class Reach(Request[None]):
    """See that the broker is there and lets this user in. Answer: None."""


@dataclass(frozen=True, slots=True)
class Sift(Request[list[Any]]):
    """Read a stream's messages from `start` to before `stop`. Answer: what `take` makes of each, None left out."""

    stream: str
    start: int
    stop: int
    take: Callable[[Message], Any]


@dataclass(frozen=True, slots=True)
class Rest:
    """There is nothing to give for so many seconds: whoever iterates pauses, and goes on. No thread need be held."""

    seconds: float


def rested(given: Generator[_Result | Rest, None, None]) -> Generator[_Result, None, None]:
    """What is given, with pauses in this thread where there is nothing."""
    with closing(given):
        for each in given:
            if isinstance(each, Rest):
                pause(each.seconds)
            else:
                yield each


@dataclass(frozen=True, slots=True)
class Pause(Request[None]):
    """Wait for so many seconds. Answer: None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Watch:
    """What is waited for: that the index may name a message that is sought.

    Attributes:
        names: Streams and super streams; None for all that are recorded.
        values: Key ids and the values sought of them.
        beside: The message that is not meant itself.
        until: When to look in any case, as of `time.monotonic`.
    """

    names: tuple[str, ...] | None
    values: tuple[tuple[int, str], ...]
    beside: MessageId | None
    until: float


@dataclass(frozen=True, slots=True)
class Together(Request[Any]):
    """Take steps that who asks for the same at the same time need not take as well. Answer: what they return.

    They begin after each of those has asked. What they return is shared: nobody changes it.

    Attributes:
        about: What is the same.
        begin: Gives the steps.
    """

    about: Hashable
    begin: "Callable[[], Steps[Any]]"


@dataclass(frozen=True, slots=True)
class InTime(Request[Any]):
    """Take steps, each request of theirs `in_time` of a moment, as of `time.monotonic`. Answer: what they return."""

    steps: "Steps[Any]"
    until: float


LookupRequest: TypeAlias = (
    Select
    | Read
    | Bounds
    | AllBounds
    | Missing
    | Partitions
    | Agree
    | Identify
    | Reach
    | Sift
    | Pause
    | Together
    | InTime
)
Steps: TypeAlias = Generator[LookupRequest, Any, _Result]
