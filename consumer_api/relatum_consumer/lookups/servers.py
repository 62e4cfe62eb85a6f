"""What lookups ask PostgreSQL and the broker; each question is in the log `relatum.lookups` at level DEBUG."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

from relatum.errors import AccessRefused, NotFound, ReadTimeout, RelatumError, Transient, UsedAfterClose
from relatum.ids import MessageId
from relatum.processes import after_fork
from relatum.reading import (
    Agreement,
    KeptChunks,
    Message,
    Position,
    StreamReader,
    agreements,
)
from relatum.store.catalog import KEYS_IN_FORCE
from relatum.waiting import LOOK_S, current, has_passed, left_s, within

CLOSED: Final = "these relations were closed: make others, or ask inside the `with` block"
"""What is said where they are used after that."""

NOT_REACHED_YET: Final = "The broker did not answer in time: another call still waits for the first connection to it."
"""The error of those who wait for a reader that another call opens."""

_ASKED_FOR: Final = "relatum"
"""A stream that need not be there: the broker is asked whether it is, and any answer will do."""

_Ask = TypeVar("_Ask", bound=Callable[..., Any])
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

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


def _of_reader(
    method: Callable[Concatenate[StreamReader, _Arguments], _Result],
) -> Callable[Concatenate["Servers", _Arguments], _Result]:
    """A method of the reader, asked of the one that is open; with its documentation."""

    @wraps(method)
    def asked(self: "Servers", /, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        result: _Result = getattr(self.reader(), method.__name__)(*args, **options)
        return result

    return asked


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
        """Whether lookups can be answered."""
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

    # --- the broker -------------------------------------------------------------------------------------

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

    @_logged("agree", _names)
    def agreements(self, positions: Mapping[str, Position], kept: KeptChunks) -> dict[str, Agreement]:
        """Whether streams are those of which a position is known."""
        return agreements(self.reader(), positions, kept)

    @_logged("reach", str)
    def reach(self) -> None:
        """See that the broker is there and lets this user in."""
        self.reader()

    read_many = _of_reader(StreamReader.read_many)
    bounds = _logged("bounds", str)(_of_reader(StreamReader.bounds))
    all_bounds = _logged("allbounds", _names)(_of_reader(StreamReader.all_bounds))
    missing = _logged("missing", _names)(_of_reader(StreamReader.missing))
    partitions = _logged("partitions", str)(_of_reader(StreamReader.partitions))
    identity = _logged("identify", str)(_of_reader(StreamReader.identity))
    scan = _logged("sift", lambda stream, start, stop, _: f"{stream} from {start} to {stop - 1}")(
        _of_reader(StreamReader.scan)
    )


def _wrong(ask: Callable[[], None], within_s: float) -> str:
    try:
        with within(within_s):
            ask()
    except RelatumError as error:
        return f"{type(error).__name__}: {error}"
    return ""


_Answer = TypeVar("_Answer")


class Flight:
    """A question that is asked once for all who came before it began.

    Where it ends with neither result nor error, whoever still wants to know asks again.
    """

    def __init__(self) -> None:
        self.has_result = False
        self.result: Any = None
        self.error: Exception | None = None
        self._over = threading.Event()

    def end(self) -> None:
        """Tell all who wait."""
        self._over.set()

    def wait(self, until: float) -> None:
        """Wait until it ended, no longer than to a moment."""
        while not self._over.wait(min(LOOK_S, left := left_s(until - time.monotonic()))):
            if left <= 0:
                raise ReadTimeout("What others ask for as well was not answered in time; it is safe to repeat.")


class Flights:
    """Asks once for many. Threads share it.

    A question that is under way began before a later caller came, and so proves nothing to that one: the caller waits
    for the next, with all others who come meanwhile. The first of them asks it.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._next: dict[Hashable, Flight] = {}
        self._under_way: dict[Hashable, Flight] = {}
        self._lock = threading.Lock()

    def run(self, about: Hashable, ask: Callable[[], _Answer]) -> _Answer:
        """What `ask` returns, called here or by another thread that asks `about` the same. Nobody changes it."""
        until = time.monotonic() + self._within_s
        while True:
            with self._lock:
                flight, before = self._next.get(about), self._under_way.get(about)
                if flight is None:
                    mine = self._next[about] = Flight()
            if flight is None:
                return self._take(about, ask, mine, before, until)
            flight.wait(until)
            if flight.error is not None:
                raise copy(flight.error) from flight.error
            if flight.has_result:
                result: _Answer = flight.result
                return result

    def _take(
        self, about: Hashable, ask: Callable[[], _Answer], flight: Flight, before: Flight | None, until: float
    ) -> _Answer:
        try:
            if before is not None:
                before.wait(until)
            with self._lock:
                del self._next[about]
                self._under_way[about] = flight
            result = flight.result = ask()
            flight.has_result = True
        except Exception as error:
            # That the asking thread's own time is over says nothing of the others: one of them asks anew.
            if not (isinstance(error, Transient) and has_passed()):
                flight.error = error
            raise
        else:
            return result
        finally:
            with self._lock:
                for flights in (self._next, self._under_way):
                    if flights.get(about) is flight:
                        del flights[about]
            flight.end()
