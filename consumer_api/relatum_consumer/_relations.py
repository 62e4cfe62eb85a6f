"""The blocking face of look-ups."""

import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from weakref import WeakSet

import sqlalchemy as sa

from relatum import metrics
from relatum.checks import checked_count, checked_seconds
from relatum.errors import AccessRefused, NotFound, ReadTimeout, RelatumError, UsedAfterClose
from relatum.ids import MessageId
from relatum.processes import after_fork, leave_to_parent
from relatum.reading import (
    CONNECTIONS_MAX,
    AuthMechanism,
    BrokerAddress,
    Message,
    StreamReader,
    agreement,
    check_limit,
)
from relatum.steps import run
from relatum.store import Database
from relatum.waiting import left_s, within
from relatum_consumer._lookup_statistics import LookupCounts, LookupStatistics
from relatum_consumer.groups import GroupLookups, GroupMethods
from relatum_consumer.lookups import (
    CLOSED,
    NOT_REACHED_YET,
    POOL_MAX,
    Agree,
    Answer,
    Bounds,
    LookupRequest,
    Lookups,
    Missing,
    Names,
    Order,
    Partitions,
    Pause,
    Reach,
    Read,
    Scan,
    Select,
    Steps,
    Within,
)

_Result = TypeVar("_Result")


class Relations(GroupMethods):
    """Finds the messages that belong together, and reads them. Blocking; `AsyncRelations` has the same methods.

    A context manager; threads may share one: each call takes a connection to the database and one to the broker of
    its own for as long as it lasts. Both are opened when they are first needed.

    Args:
        broker: The broker's URL (`amqp://…` or `rabbitmq-stream://…`), or its address.
        database: PostgreSQL's URL, or an engine, which stays open when this is closed.
        stream_url: Where the stream protocol is, if that cannot be told from the broker's URL.
        transport: "stream" for the stream protocol, "amqp" for AMQP 0.9.1, "auto" (default) for whichever answers.
        timeout_s: Seconds for a whole call, of the database and the broker together, also where one of them accepts and
            never answers. Default 10. It ends as `DatabaseUnavailable` (`reason` is "timeout", or "pool" where all
            connections are in use) or `ReadTimeout`, and is safe to repeat. What reads much (`complete=True` far behind
            a recorder) may need more. Iterators take it for each question they ask.
        pool_size: Connections to the database that are kept; as many again are opened under load. Default 5.
        connections_max: Connections to the broker at most, from 2 on, to all its nodes together. What is asked waits
            for one within `timeout_s`; each iteration that reads streams holds one. Default 16.
        ssl_context: The TLS context for the broker; None: what its URL says, or the system's authorities.
        auth_mechanism: "PLAIN" logs in with user and password, "EXTERNAL" with the client certificate; None: what the
            broker's URL says, or PLAIN.

    Every look-up may raise, besides what its method names:

    - `StreamReplaced`: a stream is not the one that was recorded (declared again, or its tail lost). It is never
      answered from.
    - `SchemaMissing`, `AccessRefused`, `ConfigurationError`: something must be put right first.
    - `DatabaseUnavailable`, `BrokerUnavailable`, `ConnectionLost`, `StreamUnavailable`, `ReadTimeout`,
      `ConnectionsInUse` (more asked at once than `connections_max` could serve in time): safe to repeat.
    """

    def __init__(
        self,
        broker: str | BrokerAddress,
        database: str | sa.Engine,
        *,
        stream_url: str | None = None,
        transport: Literal["auto", "stream", "amqp"] = "auto",
        timeout_s: float = 10.0,
        pool_size: int = 5,
        connections_max: int = CONNECTIONS_MAX,
        ssl_context: ssl.SSLContext | None = None,
        auth_mechanism: AuthMechanism | None = None,
    ) -> None:
        self._address = BrokerAddress.of(broker, stream_url, ssl_context=ssl_context, auth_mechanism=auth_mechanism)
        checked_seconds("timeout_s", timeout_s)
        checked_count("pool_size", pool_size, most=POOL_MAX)
        self._database = Database(database, refusing=CLOSED, pool_size=pool_size)
        check_limit(connections_max)
        self._counts = LookupCounts(connections_max)
        self._options: dict[str, Any] = {
            "transport": transport,
            "timeout_s": timeout_s,
            "connections_max": connections_max,
        }
        self._timeout_s = timeout_s
        self._lookups = Lookups(self._address.vhost, timeout_s)
        self._group_lookups = GroupLookups(self._lookups.catalog)
        self._sharing = WeakSet()
        self._lock = threading.Lock()
        self._reader: StreamReader | None = None
        self._is_closed = False
        after_fork(self, Relations._renew)
        metrics.report(self._counts, owner=self)

    def _renew(self) -> None:
        """In a child: no other thread asks, and groups under way are the parent's. The rest sees to itself."""
        self._lock = threading.Lock()
        leave_to_parent(*self._sharing)
        self._sharing = WeakSet()

    # --- reading ------------------------------------------------------------------------------------------

    def read(self, stream: str, offset: int) -> Message:
        """The message at an offset of a stream.

        Raises:
            OffsetExpired: retention has dropped it; field `first` is the first offset retained.
            OffsetNotFound: the stream ends before it, or the broker used the offset itself.
            StreamNotFound: there is no such stream.
        """
        return self._open_reader().read(stream, offset)

    def read_many(self, ids: Iterable[MessageId | tuple[str, int]]) -> Iterator[Message | NotFound | AccessRefused]:
        """The messages of many ids, one after the other in the order of the ids; memory is bounded.

        Args:
            ids: (stream, offset) pairs, in any order and number, of any streams.

        Returns:
            For each id its message, or, as a value, the error that says why there is none.
        """
        return self._open_reader().read_many(MessageId(*each) for each in ids)

    # --- by key -------------------------------------------------------------------------------------------

    def related(
        self,
        message: Message,
        to: Names = None,
        *,
        by: Names = None,
        limit: int | None = None,
        order: Order = "oldest",
        complete: bool = False,
    ) -> Answer:
        """The messages that share a key's value with a message, and never the message itself.

        Args:
            message: A message read from a stream.
            to: The stream, super stream or streams to look in; None for all that are recorded. A super stream stands
                for its partitions.
            by: The key or keys; a message that shares one of them is meant, and its hit names all that it shares.
                None for every key defined. Keys the message has no value of are left out.
            limit: Messages at most, from 1 on; None for all, up to 100,000.
            order: "oldest" (default) by time, then stream and offset; "newest" the reverse of that; "offset" by
                stream and offset. A message of unknown time counts as later than all.
            complete: True also reads what is retained and not recorded yet, so that the answer is definite.

        Returns:
            The messages, each read and checked, the status, and the streams it holds over. `FOUND` says what is
            recorded; with `complete` it is all there is. `ABSENT` is said only when every retained message of those
            streams was recorded for all the keys asked by, or read; `UNPROVEN` where that cannot be known. For a
            message that has none of the keys nothing is looked for: `ABSENT`, and `lacking` names them with the reason.

        Raises:
            KeyNotDefined: no key of that name is defined, or, by every key, none at all.
            NothingRecorded: no stream was named, and none of this virtual host is recorded: nothing can be known.
            StreamNotFound: neither the database nor the broker knows a stream of `to`, or it was deleted.
            InvalidInput: an argument is wrong, or there are more than 100,000 messages and no limit.
        """
        return self._run(self._lookups.related(message, to, by, limit, order, complete=complete))

    def find(
        self,
        key: str,
        value: Any,
        *,
        streams: Names = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
        order: Order = "oldest",
        complete: bool = False,
    ) -> Answer:
        """The messages that carry a key's value.

        Args:
            key: The key's name.
            value: Its value, of any type the key takes: it is compared in canonical form. A tuple for a composite key.
            streams: The streams and super streams to look in; None for all that are recorded.
            since: Only messages of this time or later; a `datetime` without a zone is UTC. None for no bound.
            until: Only messages before this time. With either bound messages of unknown time are left out.
            limit: As for `related`.
            order: As for `related`.
            complete: As for `related`.

        Raises:
            KeyNotDefined: no key of that name is defined.
            NothingRecorded: as for `related`.
            InvalidRelationshipKey: no message can carry that value.
            StreamNotFound: neither the database nor the broker knows a stream, or it was deleted.
            InvalidInput: an argument is wrong, or there are more than 100,000 messages and no limit.
        """
        return self._run(self._lookups.find(key, value, streams, since, until, limit, order, complete=complete))

    def wait_related(
        self,
        message: Message,
        to: Names = None,
        *,
        by: Names = None,
        timeout_s: float,
        limit: int | None = None,
        order: Order = "oldest",
    ) -> Answer:
        """The same as `related`, waiting until there is at least one message.

        The index is probed after 5 ms, then at growing intervals of up to 50 ms.

        Args:
            message: A message read from a stream.
            to: As for `related`.
            by: As for `related`.
            timeout_s: Seconds to wait; 0 looks once, as `related` does.
            limit: As for `related`.
            order: As for `related`.

        Returns:
            The messages recorded when the first was seen. When the time is over, what is known: `ABSENT` where that
            could be proven in time, `NOT_RECORDED_YET`, or `UNPROVEN`, where `unread` names what was found and could
            not be read in time. That is no error, and comes within about 0.3 s of the time asked for. For a message
            that has none of the keys nothing is looked for: the answer is `ABSENT` at once, and `lacking` says why.

        Raises:
            KeyNotDefined, NothingRecorded, StreamNotFound, InvalidInput: as for `related`.
        """
        checked_seconds("timeout_s", timeout_s)
        return self._run(self._lookups.wait_related(message, to, by, limit, order, timeout_s), waits_s=timeout_s)

    # --- by time ------------------------------------------------------------------------------------------

    def after(
        self,
        moment: Message | datetime,
        stream: str,
        *,
        by: str | None = None,
        inclusive: bool = False,
        complete: bool = False,
    ) -> Answer:
        """The next message in time in a stream, also where times are not in the order of offsets.

        In the message's own stream, equal times are ordered by offset (in its super stream by partition, then offset),
        so that going on from each message found passes every message once. In another stream, and from a datetime,
        the next message is strictly later.

        Args:
            moment: A message read from a stream, for its time; or a `datetime`, without a zone UTC.
            stream: The stream or super stream to look in.
            by: A key: only messages that share its value with the message. Needs a message.
            inclusive: True takes an equal time in another stream as next, too: the one with the lowest offset.
            complete: True also reads what is retained and not recorded yet; without it, the answer is exact over what
                is recorded.

        Returns:
            No message or one, with the status.

        Raises:
            TimeNotRecorded: times are switched off for the stream, or come from its chunks while messages are read
                over AMQP, which does not show them.
            KeyNotDefined: no key of that name is defined.
            StreamNotFound: neither the database nor the broker knows the stream, or it was deleted.
            InvalidInput: an argument is wrong, or the message has no time.
        """
        return self._run(self._lookups.beside("after", moment, stream, by, inclusive=inclusive, complete=complete))

    def before(
        self,
        moment: Message | datetime,
        stream: str,
        *,
        by: str | None = None,
        inclusive: bool = False,
        complete: bool = False,
    ) -> Answer:
        """The previous message in time in a stream: the mirror of `after`.

        With `inclusive`, of several messages of an equal time it is the one with the highest offset.
        """
        return self._run(self._lookups.beside("before", moment, stream, by, inclusive=inclusive, complete=complete))

    def nearest(
        self, moment: Message | datetime, stream: str, *, by: str | None = None, complete: bool = False
    ) -> Answer:
        """The message nearest in time in a stream, and never the message itself.

        An equal time is nearest of all. Of two equally near it is the earlier; of several of one time before the
        moment, or at it, the one with the highest offset: what `before(…, inclusive=True)` gives. Arguments, result
        and errors are those of `after`.
        """
        return self._run(self._lookups.beside("nearest", moment, stream, by, complete=complete))

    def window(
        self,
        moment: Message | datetime,
        stream: str,
        *,
        before_s: float = 0.0,
        after_s: float = 0.0,
        by: str | None = None,
        complete: bool = False,
    ) -> Answer:
        """All messages of a stream around a moment, but not the message itself, by time, partition and offset.

        Args:
            moment: As for `after`.
            stream: As for `after`.
            before_s: Seconds before the moment, from 0 on; a message at the very end is in.
            after_s: Seconds after the moment, from 0 on; a message at the very end is in.
            by: As for `after`.
            complete: As for `after`.

        Raises:
            InvalidInput: also where there are more than 100,000 messages.
            TimeNotRecorded, KeyNotDefined, StreamNotFound: as for `after`.
        """
        return self._run(self._lookups.window(moment, stream, before_s, after_s, by, complete=complete))

    # --- carrying out -------------------------------------------------------------------------------------

    def _run(self, steps: Steps[_Result], *, waits_s: float = 0.0) -> _Result:
        with within(self._timeout_s + waits_s), self._counts.counted():
            return run(steps, self._carry_out)

    def _carry_out(self, request: LookupRequest) -> Any:
        if type(request) is Select:
            with within(self._timeout_s):
                return self._database.rows(request.sql, request.parameters)
        if type(request) is Read:
            return self._read(request.ids)
        if type(request) is Pause:
            return time.sleep(left_s(request.seconds))
        if type(request) is Within:
            with within(request.until - time.monotonic()):
                return self._carry_out(request.request)
        return self._ask(self._open_reader(), request)

    def _ask(self, reader: StreamReader, request: LookupRequest) -> Any:
        """Carry out what the broker answers; to have reached it is an answer, too."""
        if type(request) is Reach:
            return None
        if type(request) is Bounds:
            return reader.bounds(request.stream)
        if type(request) is Missing:
            return reader.missing(request.streams)
        if type(request) is Partitions:
            return reader.partitions(request.super_stream)
        if type(request) is Agree:
            return agreement(reader, request.stream, request.position)
        assert type(request) is Scan, "there are no other requests"
        return reader.scan(request.stream, request.start, request.stop, request.take)

    def _read(self, ids: Sequence[MessageId]) -> list[Message | RelatumError]:
        reader = self._open_reader()
        if len(ids) > 1:
            return list[Message | RelatumError](reader.read_all(ids))
        try:
            return [reader.read(*ids[0])]
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

    def close(self) -> None:
        """Close all connections. Calls under way in other threads may fail; shared groups are given back."""
        for shared in list(self._sharing):
            shared.close()
        with self._lock:
            self._is_closed = True
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        self._database.close()
        metrics.retire(self._counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
