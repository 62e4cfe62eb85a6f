"""The requests of lookups to PostgreSQL and the broker. The logger `relatum.lookups` logs each at level DEBUG."""

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

CLOSED: Final = "this `Relations` is closed: create a new one, or use it inside the `with` block"
"""The error message of calls after `close`."""

_TEST_STREAM: Final = "relatum"
"""The stream that health checks ask for. It need not exist: any response shows that the broker works."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_logger: Final = logging.getLogger("relatum.lookups")


def _logged(subject_of: Callable[..., str]) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Log a request at level DEBUG: the method's name, the subject, the number of rows returned, milliseconds."""

    def decorate(request: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @wraps(request)
        def wrapper(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
            if not _logger.isEnabledFor(logging.DEBUG):
                return request(*args, **options)
            began = time.perf_counter()
            response: Any = None
            try:
                response = result = request(*args, **options)
                return result
            finally:
                values = {
                    "name": request.__name__,
                    "about": subject_of(*args[1:], **options),
                    "rows": _rows(response),
                    "ms": (time.perf_counter() - began) * 1e3,
                }
                _logger.debug("%(name)s (%(about)s): %(rows)d rows, %(ms).2f ms", values)

        return wrapper

    return decorate


def _of_reader(
    method: Callable[Concatenate[StreamReader, _Arguments], _Result],
) -> Callable[Concatenate["Servers", _Arguments], _Result]:
    """Return a method that calls this method of the open reader."""

    @wraps(method)
    def wrapper(self: "Servers", /, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        result: _Result = getattr(self.reader(), method.__name__)(*args, **options)
        return result

    return wrapper


def _rows(response: Any) -> int:
    if isinstance(response, list | dict):
        return sum(not isinstance(each, RelatumError) for each in response)
    return int(response is not None)


def _names(streams: Iterable[str], *_: Any) -> str:
    return ", ".join(sorted(streams))


@dataclass(frozen=True, slots=True)
class Health:
    """Whether both servers answer.

    Attributes:
        database: PostgreSQL's error; empty if it answers, and the tables exist and may be read.
        broker: The broker's error; empty if it answers.
    """

    database: str = ""
    broker: str = ""

    @property
    def is_well(self) -> bool:
        """Whether lookups can be answered: neither server has an error."""
        return not self.database and not self.broker


class Servers:
    """Sends requests to PostgreSQL and the broker. Thread-safe. `timeout_s` limits a statement or a shared request."""

    def __init__(self, rows: Callable[..., list[Any]], reader: StreamReader, timeout_s: float = 10.0) -> None:
        self.timeout_s = timeout_s
        self._rows = rows
        self._reader = reader
        self._begin()
        after_fork(self, Servers._begin)

    def _begin(self) -> None:
        """Start without shared requests, also in a forked child."""
        self.flights = SharedRequests(self.timeout_s)

    def reader(self) -> StreamReader:
        """Return the reader. If no time is left, raise: a request that times out would close its connection."""
        if has_passed():
            raise ReadTimeout(f"There was no time left to query the broker ({current()}); it is safe to repeat.")
        return self._reader

    def check(self) -> None:
        """Send both servers a harmless request, and raise the error of the one that fails."""
        self._check_database()
        self.reach()

    def health(self, timeout_s: float) -> Health:
        """Check both servers, each for at most half of the time."""
        return Health(_error_text(self._check_database, timeout_s / 2), _error_text(self.reach, timeout_s / 2))

    def _check_database(self) -> None:
        self.rows(KEYS_IN_FORCE, {})

    @_logged(lambda statement, *_, **__: " ".join(str(statement).split()))
    def rows(self, statement: Any, parameters: Mapping[str, Any], **options: bool) -> list[Any]:
        """Return the rows of a statement, as tuples; for `options` see `Database.rows`."""
        with within(self.timeout_s):
            return self._rows(statement, parameters, **options)

    @_logged(lambda ids, chunks=None: _names({where.stream for where in ids}))
    def read(self, ids: Sequence[MessageId], chunks: ChunkCache | None = None) -> list[Message | RelatumError]:
        """Return for each id, in order, its message, or the `NotFound` or `AccessRefused` error."""
        reader = self.reader()
        if len(ids) > 1 or chunks is not None:
            return list[Message | RelatumError](reader.read_all(ids, kept=chunks))
        try:
            return [reader.read(*ids[0])]
        except (NotFound, AccessRefused) as error:
            return [error]

    @_logged(_names)
    def agreements(self, positions: Mapping[str, Position], chunks: ChunkCache) -> dict[str, Agreement]:
        """Return for each stream whether the message at its recorded position is the recorded one."""
        return agreements(self.reader(), positions, chunks)

    def reach(self) -> None:
        """Check that the broker answers and admits this user."""
        self.missing([_TEST_STREAM])

    read_many = _of_reader(StreamReader.read_many)
    bounds = _logged(str)(_of_reader(StreamReader.bounds))
    all_bounds = _logged(_names)(_of_reader(StreamReader.all_bounds))
    missing = _logged(_names)(_of_reader(StreamReader.missing))
    partitions = _logged(str)(_of_reader(StreamReader.partitions))
    identity = _logged(str)(_of_reader(StreamReader.identity))
    scan = _logged(lambda stream, start, stop, _: f"{stream} from {start} to {stop - 1}")(_of_reader(StreamReader.scan))


def _error_text(check: Callable[[], None], within_s: float) -> str:
    try:
        with within(within_s):
            check()
    except RelatumError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wait_for(lock: threading.Lock, until: float) -> None:
    """Acquire a lock, or raise `ReadTimeout` at a monotonic time."""
    while not lock.acquire(timeout=min(LOOK_S, max(0.0, left_s(until - time.monotonic())))):
        if left_s(until - time.monotonic()) <= 0:
            raise ReadTimeout("A request shared with other calls was not answered in time; it is safe to repeat.")


class _Subject:
    """The state of one kind of request: its lock, and the outcome of the latest one, which is done if it is shared."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.outcome: Future[Any] = Future()


class SharedRequests:
    """Makes one request for many concurrent callers. Thread-safe.

    A request that has already started cannot prove anything to a later caller, so that caller waits for it to end. The
    first waiting caller then makes the next request, and shares its result with all callers that wait.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._subjects: WeakValueDictionary[Hashable, _Subject] = WeakValueDictionary()
        self._lock = threading.Lock()

    def run(self, key: Hashable, request: Callable[[], _Result]) -> _Result:
        """Return the result of `request`, called here or by another caller with the same key. The result is shared."""
        with self._lock:
            subject = self._subjects.setdefault(key, _Subject())
        earlier = subject.outcome
        if not subject.lock.acquire(blocking=False):
            wait_for(subject.lock, time.monotonic() + self._within_s)
        try:
            outcome = subject.outcome
            if outcome is not earlier and outcome.done():
                if (error := outcome.exception()) is not None:
                    raise copy(error) from error
                shared: _Result = outcome.result()
                return shared
            subject.outcome = outcome = Future()
            try:
                outcome.set_result(result := request())
            except Exception as error:
                # A timeout of this caller is not shared: a waiting caller with time left makes its own request.
                if not (isinstance(error, Transient) and has_passed()):
                    outcome.set_exception(error)
                raise
            return result
        finally:
            subject.lock.release()
