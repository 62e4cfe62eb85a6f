"""The requests of lookups to PostgreSQL and the broker; the log `relatum.lookups` has each at level DEBUG."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from relatum.common.ids import MessageId
from relatum.common.processes import after_fork
from relatum.common.waiting import LOOK_S, current, has_passed, left_s, within
from relatum.errors import AccessRefused, NotFound, ReadTimeout, RelatumError, Transient
from relatum.reading import Agreement, ChunkCache, Message, Position, StreamReader, agreements
from relatum.store.catalog import KEYS_IN_FORCE

CLOSED: Final = "these relations are closed: create new ones, or use them inside the `with` block"
"""The error message after `close`."""

_ASKED_FOR: Final = "relatum"
"""A stream that need not exist: any answer shows that the broker works."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_logger: Final = logging.getLogger("relatum.lookups")


def _logged(
    about: Callable[..., str],
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Log a request at level DEBUG: the method's name, subject, rows of the answer, milliseconds."""

    def decorate(ask: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @wraps(ask)
        def asked(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
            if not _logger.isEnabledFor(logging.DEBUG):
                return ask(*args, **options)
            began = time.perf_counter()
            answer: Any = None
            try:
                answer = result = ask(*args, **options)
                return result
            finally:
                question = {
                    "name": ask.__name__,
                    "about": about(*args[1:], **options),
                    "rows": _rows(answer),
                    "ms": (time.perf_counter() - began) * 1e3,
                }
                _logger.debug("%(name)s (%(about)s): %(rows)d rows, %(ms).2f ms", question)

        return asked

    return decorate


def _of_reader(
    method: Callable[Concatenate[StreamReader, _Arguments], _Result],
) -> Callable[Concatenate["Servers", _Arguments], _Result]:
    """Wrap a method of the reader, to be called on the open reader, with its docstring."""

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
        database: What is wrong with PostgreSQL; empty if it answers, and the tables exist and may be read.
        broker: What is wrong with the broker; empty if it answers.
    """

    database: str = ""
    broker: str = ""

    @property
    def is_well(self) -> bool:
        """True if lookups can be answered."""
        return not self.database and not self.broker


class Servers:
    """Sends requests to PostgreSQL and the broker. Thread-safe.

    `get_reader`: Returns the open reader. `timeout_s`: Seconds for one statement, or for another caller's answer.
    """

    def __init__(
        self,
        rows: Callable[[Any, Mapping[str, Any]], list[Any]],
        get_reader: Callable[[], StreamReader],
        timeout_s: float = 10.0,
    ) -> None:
        self.timeout_s = timeout_s
        self._rows = rows
        self._get_reader = get_reader
        self._begin()
        after_fork(self, Servers._begin)

    def _begin(self) -> None:
        """Start without running requests, also in a forked child."""
        self.flights = Flights(self.timeout_s)

    def reader(self) -> StreamReader:
        """Return the reader, or raise if no time is left, because a request that times out closes its connection."""
        if has_passed():
            raise ReadTimeout(f"There was no time left to ask the broker ({current()}); it is safe to repeat.")
        return self._get_reader()

    # --- health -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Send both servers a harmless request, and raise the error of the one that fails."""
        self._check_database()
        self._check_broker()

    def health(self, timeout_s: float) -> Health:
        """Check both servers, each for at most half of the time."""
        return Health(_wrong(self._check_database, timeout_s / 2), _wrong(self._check_broker, timeout_s / 2))

    def _check_database(self) -> None:
        self.rows(KEYS_IN_FORCE, {})

    def _check_broker(self) -> None:
        self.reach()
        self.missing([_ASKED_FOR])

    # --- the database -------------------------------------------------------------------------------------

    @_logged(lambda statement, _: " ".join(str(statement).split()))
    def rows(self, statement: Any, parameters: Mapping[str, Any]) -> list[Any]:
        """Return the rows of a statement, as tuples."""
        with within(self.timeout_s):
            return self._rows(statement, parameters)

    # --- the broker -------------------------------------------------------------------------------------

    @_logged(lambda ids, kept=None: _names({where.stream for where in ids}))
    def read(self, ids: Sequence[MessageId], kept: ChunkCache | None = None) -> list[Message | RelatumError]:
        """Return for each id, in order, its message, or the `NotFound` or `AccessRefused` error.

        `kept`: A cache of chunks read before; None for no cache.
        """
        reader = self.reader()
        if len(ids) > 1 or kept is not None:
            return list[Message | RelatumError](reader.read_all(ids, kept=kept))
        try:
            return [reader.read(*ids[0])]
        except (NotFound, AccessRefused) as error:
            return [error]

    @_logged(_names)
    def agreements(self, positions: Mapping[str, Position], kept: ChunkCache) -> dict[str, Agreement]:
        """Check whether streams are the streams whose positions are known."""
        return agreements(self.reader(), positions, kept)

    @_logged(str)
    def reach(self) -> None:
        """Check that the broker answers and admits this user."""
        self.reader()

    read_many = _of_reader(StreamReader.read_many)
    bounds = _logged(str)(_of_reader(StreamReader.bounds))
    all_bounds = _logged(_names)(_of_reader(StreamReader.all_bounds))
    missing = _logged(_names)(_of_reader(StreamReader.missing))
    partitions = _logged(str)(_of_reader(StreamReader.partitions))
    identity = _logged(str)(_of_reader(StreamReader.identity))
    scan = _logged(lambda stream, start, stop, _: f"{stream} from {start} to {stop - 1}")(_of_reader(StreamReader.scan))


def _wrong(ask: Callable[[], None], within_s: float) -> str:
    try:
        with within(within_s):
            ask()
    except RelatumError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wait_for(turn: threading.Lock, until: float) -> None:
    """Take a turn, until a monotonic time at most."""
    while not turn.acquire(timeout=min(LOOK_S, max(0.0, left_s(until - time.monotonic())))):
        if left_s(until - time.monotonic()) <= 0:
            raise ReadTimeout("A shared request was not answered in time; it is safe to repeat.")


class _Subject:
    """What callers query. `outcome` belongs to the last request begun; it is done if it is shared."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.outcome: Future[Any] = Future()


class Flights:
    """Makes one request for many callers. Thread-safe.

    A running request began before a later caller came, so it proves nothing to that caller, which waits for its end.
    The first waiting caller makes the next request, which answers all of them.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._subjects: WeakValueDictionary[Hashable, _Subject] = WeakValueDictionary()
        self._lock = threading.Lock()

    def run(self, about: Hashable, ask: Callable[[], _Result]) -> _Result:
        """Return what `ask` returns, called here or by another thread for the same `about`. The result is shared."""
        with self._lock:
            subject = self._subjects.setdefault(about, _Subject())
        began_before = subject.outcome
        if not subject.turn.acquire(blocking=False):
            wait_for(subject.turn, time.monotonic() + self._within_s)
        try:
            outcome = subject.outcome
            if outcome is not began_before and outcome.done():
                if (error := outcome.exception()) is not None:
                    raise copy(error) from error
                shared: _Result = outcome.result()
                return shared
            subject.outcome = outcome = Future()
            try:
                outcome.set_result(result := ask())
            except Exception as error:
                # The asking thread's own timeout says nothing about the others: one of them asks again.
                if not (isinstance(error, Transient) and has_passed()):
                    outcome.set_exception(error)
                raise
            return result
        finally:
            subject.turn.release()
