"""What lookups ask PostgreSQL and the broker; each question is in the log `relatum.lookups` at level DEBUG."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, TypeVar, cast

from relatum.errors import AccessRefused, NotFound, ReadTimeout, RelatumError, UsedAfterClose
from relatum.ids import MessageId
from relatum.processes import after_fork
from relatum.reading import (
    Agreement,
    BrokerIdentity,
    KeptChunks,
    Message,
    Position,
    StreamBounds,
    StreamReader,
    agreements,
)
from relatum.store.catalog import KEYS_IN_FORCE
from relatum.waiting import current, has_passed, left_s, within
from relatum_consumer.lookups.flights import Flights

CLOSED: Final = "these relations were closed: make others, or ask inside the `with` block"
"""What is said where they are used after that."""

NOT_REACHED_YET: Final = "The broker did not answer in time: another call still waits for the first connection to it."
"""The error of those who wait for a reader that another call opens."""

_ASKED_FOR: Final = "relatum"
"""A stream that need not be there: the broker is asked whether it is, and any answer will do."""

_Ask = TypeVar("_Ask", bound=Callable[..., Any])

_logger: Final = logging.getLogger("relatum.lookups")


def _logged(name: str, about: Callable[..., str]) -> Callable[[_Ask], _Ask]:
    """Log a question where somebody wants to see it: its name, about what, rows of the answer, milliseconds."""

    def decorate(ask: _Ask) -> _Ask:
        @wraps(ask)
        def asked(*args: Any, **options: Any) -> Any:
            if not _logger.isEnabledFor(logging.DEBUG):
                return ask(*args, **options)
            began, answer = time.perf_counter(), None
            try:
                answer = ask(*args, **options)
            finally:
                question = {
                    "name": name,
                    "about": about(*args[1:], **options),
                    "rows": _rows(answer),
                    "ms": (time.perf_counter() - began) * 1e3,
                }
                _logger.debug("%(name)s (%(about)s): %(rows)d rows, %(ms).2f ms", question)
            return answer

        return cast(_Ask, asked)

    return decorate


def _rows(answer: Any) -> int:
    if isinstance(answer, list | dict):
        return sum(not isinstance(each, RelatumError) for each in answer)
    return int(answer is not None)


def _names(streams: Iterable[str], *_: Any) -> str:
    return ", ".join(sorted(streams))


@dataclass(frozen=True, slots=True)
class Health:
    """Whether both servers answer.

    Attributes:
        database: What is wrong with PostgreSQL; empty where it answers, and the tables are there and may be read.
        broker: What is wrong with the broker; empty where it answers.
    """

    database: str = ""
    broker: str = ""

    @property
    def is_well(self) -> bool:
        """Whether look-ups can be answered."""
        return not self.database and not self.broker


class Servers:
    """Asks PostgreSQL and the broker. Threads share it; the broker's reader is opened at the first question to it.

    `timeout_s`: Seconds for one statement, and for the wait for a reader that another thread opens.
    """

    def __init__(
        self,
        rows: Callable[[Any, Mapping[str, Any]], list[Any]],
        open_reader: Callable[[], StreamReader],
        timeout_s: float = 10.0,
    ) -> None:
        self.timeout_s = timeout_s
        self.opened: StreamReader | None = None
        self._rows = rows
        self._open_reader = open_reader
        self._is_closed = False
        self._begin()
        after_fork(self, Servers._begin)

    def _begin(self) -> None:
        """In a child, too: what is under way is the parent's."""
        self._lock = threading.Lock()
        self.flights = Flights(self.timeout_s)

    def reader(self) -> StreamReader:
        """The reader. It is not asked where no time is left: a question without an answer costs its connection."""
        if has_passed():
            raise ReadTimeout(f"There was no time left to ask the broker ({current()}); it is safe to repeat.")
        reader = self.opened
        if reader is None:
            # Who opens it may take all of its own time, if the broker is silent; others have theirs.
            if not self._lock.acquire(timeout=left_s(self.timeout_s)):
                raise ReadTimeout(NOT_REACHED_YET)
            try:
                if self._is_closed:
                    raise UsedAfterClose(CLOSED)
                if self.opened is None:
                    self.opened = self._open_reader()
                reader = self.opened
            finally:
                self._lock.release()
        return reader

    def close(self) -> None:
        """Close the reader, for good."""
        with self._lock:
            self._is_closed = True
            reader, self.opened = self.opened, None
        if reader is not None:
            reader.close()

    # --- whether they answer ------------------------------------------------------------------------------

    def check(self) -> None:
        """Ask both what every lookup needs, or something harmless; the error of what does not answer is raised."""
        self._check_database()
        self._check_broker()

    def health(self, timeout_s: float) -> Health:
        """Ask both, each for half of the time at most."""
        return Health(_wrong(self._check_database, timeout_s / 2), _wrong(self._check_broker, timeout_s / 2))

    def _check_database(self) -> None:
        self.rows(KEYS_IN_FORCE, {})

    def _check_broker(self) -> None:
        self.reach()
        self.missing([_ASKED_FOR])

    # --- the database -------------------------------------------------------------------------------------

    @_logged("select", lambda statement, _: " ".join(str(statement).split()))
    def rows(self, statement: Any, parameters: Mapping[str, Any]) -> list[Any]:
        """The rows of a statement, as tuples."""
        with within(self.timeout_s):
            return self._rows(statement, parameters)

    # --- the broker ---------------------------------------------------------------------------------------

    @_logged("read", lambda ids, kept=None: _names({where.stream for where in ids}))
    def read(self, ids: Sequence[MessageId], kept: KeptChunks | None = None) -> list[Message | RelatumError]:
        """For each id, in order, the message or the `NotFound` or `AccessRefused` error it met.

        `kept`: Chunks that were read before and need not be read again; None for none.
        """
        reader = self.reader()
        if len(ids) > 1 or kept is not None:
            return list[Message | RelatumError](reader.read_all(ids, kept=kept))
        try:
            return [reader.read(*ids[0])]
        except (NotFound, AccessRefused) as error:
            return [error]

    def read_many(
        self, ids: Iterable[tuple[str, int]], window: int
    ) -> Generator[Message | NotFound | AccessRefused, None, None]:
        """The same of any number of ids, planned together, one after the other. To be closed."""
        return self.reader().read_many(ids, window=window)

    @_logged("bounds", lambda stream: stream)
    def bounds(self, stream: str) -> StreamBounds:
        """A stream's ends."""
        return self.reader().bounds(stream)

    @_logged("allbounds", _names)
    def all_bounds(
        self, streams: Sequence[str], kept: KeptChunks, lasts: Collection[str] = ()
    ) -> dict[str, StreamBounds]:
        """The ends of those of many streams that are had at once; others are asked for by themselves.

        Of `lasts` the first offset is not asked for, and is 0.
        """
        return self.reader().all_bounds(streams, kept, lasts)

    @_logged("missing", _names)
    def missing(self, streams: Sequence[str]) -> list[str]:
        """Those of many streams that the broker surely has not."""
        return self.reader().missing(streams)

    @_logged("partitions", lambda super_stream: super_stream)
    def partitions(self, super_stream: str) -> list[str]:
        """The streams of a super stream; none where there is no such super stream."""
        return self.reader().partitions(super_stream)

    @_logged("agree", _names)
    def agreements(self, positions: Mapping[str, Position], kept: KeptChunks) -> dict[str, Agreement]:
        """Whether streams are those of which a position is known."""
        return agreements(self.reader(), positions, kept)

    @_logged("identify", str)
    def identity(self) -> BrokerIdentity:
        """Which broker answers."""
        return self.reader().identity()

    @_logged("reach", str)
    def reach(self) -> None:
        """See that the broker is there and lets this user in."""
        self.reader()

    @_logged("sift", lambda stream, start, stop, _: f"{stream} from {start} to {stop - 1}")
    def scan(self, stream: str, start: int, stop: int, take: Callable[[Message], Any]) -> list[Any]:
        """Read a stream's messages from `start` to before `stop`: what `take` makes of each, None left out."""
        return self.reader().scan(stream, start, stop, take)


def _wrong(ask: Callable[[], None], within_s: float) -> str:
    try:
        with within(within_s):
            ask()
    except RelatumError as error:
        return f"{type(error).__name__}: {error}"
    return ""
