"""What the blocking face of look-ups asks by: its reader, its connections to the database, and how they end."""

import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakSet

from relatum import metrics
from relatum.checks import checked_count, checked_seconds
from relatum.closing import Closing
from relatum.errors import (
    AccessRefused,
    NotFound,
    ReadTimeout,
    RelatumError,
    UsedAfterClose,
)
from relatum.processes import after_fork, leave_to_parent
from relatum.reading import (
    CONNECTIONS_MAX,
    AuthMechanism,
    BrokerAddress,
    Message,
    StreamReader,
    agreements,
    check_limit,
)
from relatum.steps import run
from relatum.store.database import AnyDatabase, Database
from relatum.waiting import LOOK_S, SharedWait, left_s, pause, within
from relatum_consumer._lookup_statistics import LookupCounts, LookupStatistics
from relatum_consumer._together import Flights
from relatum_consumer.expectations import ExpectationMethods
from relatum_consumer.groups import GroupMethods
from relatum_consumer.lookups import (
    CLOSED,
    NOT_REACHED_YET,
    POOL_MAX,
    WATCHED,
    Agree,
    AllBounds,
    Bounds,
    Health,
    Identify,
    InTime,
    LookupRequest,
    Lookups,
    Missing,
    Partitions,
    Pause,
    Reach,
    Read,
    Select,
    Sift,
    Steps,
    Together,
    Watch,
    are_logged,
    health,
    in_time,
    log_question,
    look_up,
    parameters_of,
    reached,
)

_Result = TypeVar("_Result")


class Asking(GroupMethods, ExpectationMethods, Closing):
    """Carries out what look-ups ask for. Arguments are those of `Relations`."""

    def __init__(
        self,
        broker: str | BrokerAddress,
        database: AnyDatabase,
        *,
        stream_url: str | None = None,
        timeout_s: float = 10.0,
        pool_size: int = 5,
        max_connections: int | None = None,
        connections_max: int = CONNECTIONS_MAX,
        ssl_context: ssl.SSLContext | None = None,
        auth_mechanism: AuthMechanism | None = None,
    ) -> None:
        self._address = BrokerAddress.of(broker, stream_url, ssl_context=ssl_context, auth_mechanism=auth_mechanism)
        checked_seconds("timeout_s", timeout_s)
        checked_count("pool_size", pool_size, most=POOL_MAX)
        if max_connections is not None:
            checked_count("max_connections", max_connections, most=POOL_MAX)
        self._database = Database(
            database, refusing=CLOSED, pool_size=pool_size, connections_max=max_connections, is_kept=True
        )
        self._timeout_s = timeout_s
        check_limit(connections_max)
        self._counts = LookupCounts(connections_max)
        self._options: dict[str, Any] = {"timeout_s": timeout_s, "connections_max": connections_max}
        self._lookups = Lookups(self._address.vhost, timeout_s)
        self._catalog = self._lookups.catalog
        self._sharing = WeakSet()
        # Weakly: what is dropped without being closed must not wait for the garbage collector.
        self._waits: SharedWait[Watch, bool] = SharedWait(partial(Asking._poll, weakref.proxy(self)))
        self._together = Flights()
        self._lock = threading.Lock()
        self._reader: StreamReader | None = None
        self._is_closed = False
        after_fork(self, Asking._renew)
        metrics.report(self._counts, owner=self)

    def _renew(self) -> None:
        """In a child: groups under way are the parent's. What else is the parent's sees to itself."""
        leave_to_parent(*self._sharing)
        self._counts.renew()
        self._lock, self._sharing = threading.Lock(), WeakSet()
        self._together = Flights()

    def _run(self, steps: Steps[_Result], *, called: str = "") -> _Result:
        with within(self._timeout_s), look_up(steps, called) as told, self._counts.counted():
            return told(run(steps, self._carry_out))

    def _carry_out(self, request: LookupRequest) -> Any:
        if type(request) is InTime:
            return run(request.steps, partial(self._carry_out_by, request.until))
        if type(request) is Together:
            return self._together.run(request, self._carry_out, within_s=self._timeout_s)
        if type(request) is Pause:
            return pause(request.seconds)
        return self._ask(request)

    def _carry_out_by(self, until: float, request: LookupRequest) -> Any:
        with in_time(request, until):
            return self._carry_out(request)

    def _poll(self, watches: Sequence[Watch]) -> Iterator[tuple[int, bool]]:
        """Ask the index for all who wait."""
        request = Select(WATCHED, parameters_of(self._address.vhost, watches))
        return ((number, True) for (number,) in self._ask(request))

    def _ask(self, request: LookupRequest) -> Any:
        """Carry out what a server answers; it is logged where somebody wants to see that."""
        if not are_logged():
            return self._answer(request)
        began, answer = time.perf_counter(), None
        try:
            answer = self._answer(request)
        finally:
            log_question(request, answer, began)
        return answer

    def _answer(self, request: LookupRequest) -> Any:
        if type(request) is Select:
            return self._select(request)
        if type(request) is Read:
            return self._read(request)
        reader = self._open_reader()
        if type(request) is Agree:
            return agreements(reader, request.positions, request.kept)
        return self._ask_broker(reader, request)

    def _ask_broker(self, reader: StreamReader, request: LookupRequest) -> Any:
        """Carry out what the broker answers; to have reached it is an answer, too."""
        if type(request) is Identify or type(request) is Reach:
            return reader.identity() if type(request) is Identify else None
        if type(request) is Bounds:
            return reader.bounds(request.stream)
        if type(request) is AllBounds:
            return reader.all_bounds(request.streams, request.kept, request.lasts)
        if type(request) is Missing:
            return reader.missing(request.streams)
        if type(request) is Partitions:
            return reader.partitions(request.super_stream)
        assert type(request) is Sift, "there are no other requests"
        return reader.scan(request.stream, request.start, request.stop, request.take)

    def _select(self, request: Select) -> list[Any]:
        with within(self._timeout_s):
            return self._database.rows(request.sql, request.parameters)

    def _read(self, request: Read) -> list[Message | RelatumError]:
        reader = self._open_reader()
        if len(request.ids) > 1 or request.kept is not None:
            return list[Message | RelatumError](reader.read_all(request.ids, kept=request.kept))
        try:
            return [reader.read(*request.ids[0])]
        except (NotFound, AccessRefused) as error:
            return [error]

    def _open_reader(self) -> StreamReader:
        reader = self._reader
        if reader is None:
            # Who opens it may take all of its own time, if the broker is silent; others have theirs.
            if not self._lock.acquire(timeout=left_s(self._timeout_s)):
                raise ReadTimeout(NOT_REACHED_YET)
            try:
                if self._is_closed:
                    raise UsedAfterClose(CLOSED)
                if self._reader is None:
                    self._reader = StreamReader.open(self._address, **self._options)
                reader = self._reader
            finally:
                self._lock.release()
        return reader

    def statistics(self) -> LookupStatistics:
        """The connections to the broker that are in use, idle and waited for, and what was asked. It asks nobody."""
        reader = self._reader
        return self._counts.with_connections(self._counts.connections if reader is None else reader.statistics())

    @classmethod
    def open(cls, broker: str | BrokerAddress, database: AnyDatabase, **options: Any) -> Self:
        """The same as the constructor, once both servers have answered: what is wrong shows at once.

        Args:
            broker: As for the class.
            database: As for the class.
            options: As for the class: `max_connections`, `timeout_s`, …

        Raises:
            DatabaseUnavailable, SchemaMissing, AccessRefused: what is wrong with the database.
            BrokerUnavailable, ReadTimeout, AccessRefused, TlsRefused: what is wrong with the broker.
            ConfigurationError, InvalidInput: an option is wrong.
        """
        relations = cls(broker, database, **options)
        try:
            relations._reach()
        except BaseException:
            relations.close()
            raise
        return relations

    def _reach(self) -> None:
        self._run(reached(), called="open")

    def health(self, *, timeout_s: float = 2.0) -> Health:
        """Whether both servers answer now: for a service's readiness, also while its look-ups wait in turn.

        Args:
            timeout_s: Seconds at most, half of them for each server; connections that all are in use count as no
                answer. Default 2.
        """
        checked_seconds("timeout_s", timeout_s)
        with within(timeout_s + LOOK_S):
            return run(health(timeout_s), self._carry_out)

    def _end_sharing(self) -> None:
        for shared in list(self._sharing):
            shared.close()

    def close(self) -> None:
        """Close all connections; shared groups are given back. Look-ups under way may fail."""
        self._end_sharing()
        with self._lock:
            self._is_closed = True
            reader, self._reader = self._reader, None
        self._waits.end()
        if reader is not None:
            reader.close()
        self._database.close()
        metrics.retire(self._counts)
