"""Find the messages that belong together, blocking."""

from collections.abc import Generator, Iterable
from datetime import datetime
from functools import partial
from typing import Any, Final, Self
from weakref import WeakSet

from relatum import metrics
from relatum.common.checks import checked_count, checked_seconds
from relatum.common.closing import Closing
from relatum.common.ids import MessageId
from relatum.common.processes import after_fork, leave_to_parent
from relatum.common.waiting import LOOK_S, SharedWait, pause, within
from relatum.errors import AccessRefused, NotFound
from relatum.keys import KeyDefinition
from relatum.reading import CONNECTIONS_MAX, Broker, BrokerAddress, Message, StreamReader
from relatum.store.database import IDLE_S, AnyDatabase, Database
from relatum_consumer import _missing
from relatum_consumer._tracing import TraceMethods
from relatum_consumer.expectations import UNMET_MAX, Expectation, MissingReport
from relatum_consumer.groups import GroupMethods
from relatum_consumer.lookups.answer import Answer
from relatum_consumer.lookups.arguments import Consumed, Names, Order
from relatum_consumer.lookups.by_key import answer, question_of, sought, values
from relatum_consumer.lookups.by_time import TimeMethods
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.servers import CLOSED, Health, Servers
from relatum_consumer.lookups.telemetry import Lookups, LookupStatistics, lookup
from relatum_consumer.lookups.waiting import Waiting, Watch, poll

POOL_MAX: Final = 1_000
"""Upper bound of `database_connections_max`; by default a PostgreSQL server accepts 100 connections of all clients."""


class Relations(TimeMethods, TraceMethods, GroupMethods, Closing):
    """Finds and reads the messages that belong together, blocking.

    Thread-safe, and a context manager. A running call uses one connection to the database and one to the broker, or up
    to four to read many messages while others are free. Connections are opened when a call first needs them.

    Args:
        broker: The broker's URL (`amqp://…` or `rabbitmq-stream://…`), or a `Broker`.
        database: PostgreSQL's URL, or a `Database`, which stays open when this object is closed.
        timeout_s: Time limit of a whole call, for the database and the broker together, in seconds. Default 10. A call
            that takes longer raises `DatabaseUnavailable` (`reason` is "timeout", or "pool" if all connections are in
            use) or `ReadTimeout`, and is safe to repeat. A call that reads many messages (`complete=True` while the
            recorder is far behind) may need a higher limit. For iterators and `incomplete_groups`, the limit applies to
            each request.
        database_connections_max: Maximum number of connections to PostgreSQL; idle ones stay open. A call waits up to
            `timeout_s` for a free one. None (default): 10, of which 5 stay open. A `Database` has its own limit.
        broker_connections_max: Maximum number of connections to all nodes of the broker together; 2 or more, default
            16. A call waits up to `timeout_s` for a free one.

    Every lookup may raise these errors, in addition to those that its method lists:

    - `InvalidInput`: an argument is invalid, or more than 100,000 messages match without `limit`.
    - `KeyNotDefined`: no key of that name is defined, or the key was removed during the call; if you named no key, no
      key is defined at all.
    - `StreamNotFound`: a named stream was deleted, or is unknown to the database and the broker.
    - `NothingRecorded`: you named no stream, and no stream of this virtual host is recorded, so nothing is known.
    - `StreamReplaced`: a named stream is not the recorded one: it was declared again, or lost its tail. Lookups never
      answer from such a stream. If you name no stream, it is left out and listed in `Answer.unreadable_streams`.
    - `AnotherBroker`: a named stream was recorded from another broker. If you name no stream, it is left out, too.
    - `SchemaMissing`, `AccessRefused`, `ConfigurationError`: fix the setup first.
    - `DatabaseUnavailable`, `BrokerUnavailable`, `ConnectionLost`, `StreamUnavailable`, `ReadTimeout`,
      `ConnectionsInUse` (`broker_connections_max` is too low for the concurrent calls): safe to repeat.
    """

    def __init__(
        self,
        broker: str | Broker,
        database: AnyDatabase,
        *,
        timeout_s: float = 10.0,
        database_connections_max: int | None = None,
        broker_connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._address = BrokerAddress.of(broker)
        checked_seconds("timeout_s", timeout_s)
        if database_connections_max is not None:
            checked_count("database_connections_max", database_connections_max, most=POOL_MAX)
        self._database = Database(database, refusing=CLOSED, idle_s=IDLE_S, connections_max=database_connections_max)
        self._reader = StreamReader(
            self._address, timeout_s=timeout_s, refusing=CLOSED, broker_connections_max=broker_connections_max
        )
        self._servers = Servers(self._database.rows, self._reader, timeout_s)
        self._catalog = Catalog(self._servers, self._address.vhost)
        self._shared_groups = WeakSet()
        # No reference to `self`: in a cycle, an object dropped without close() would wait for the garbage collector.
        self._waits: SharedWait[Watch, bool] = SharedWait(partial(poll, self._servers, self._address.vhost))
        self._lookups = Lookups(timeout_s, broker_connections_max, self._waits)
        after_fork(self, Relations._renew)
        metrics.report(self._lookups, owner=self)

    def _renew(self) -> None:
        """Drop the parent's shared groups after a fork. The other parts handle the fork themselves."""
        leave_to_parent(*self._shared_groups)
        self._lookups.renew()
        self._shared_groups = WeakSet()

    def statistics(self) -> LookupStatistics:
        """Return the broker connections in use, idle and waited for, and counts of lookups, without any I/O."""
        return self._lookups.statistics(self._reader.statistics())

    @classmethod
    def open(cls, broker: str | Broker, database: AnyDatabase, **options: Any) -> Self:
        """Return an open `Relations` after both servers have answered, so that setup errors show immediately.

        Args:
            broker: As for the class.
            database: As for the class.
            options: The other arguments of the class: `timeout_s`, `database_connections_max`, …

        Raises:
            DatabaseUnavailable, SchemaMissing, AccessRefused: the database cannot be used.
            BrokerUnavailable, ReadTimeout, AccessRefused, TlsRefused: the broker cannot be used.
            ConfigurationError, InvalidInput: an option is invalid.
        """
        relations = cls(broker, database, **options)
        try:
            relations._check_servers()
        except BaseException:
            relations.close()
            raise
        return relations

    def _check_servers(self) -> None:
        with self._lookups.counted("open", self._lookups.timeout_s):
            self._servers.check()

    def health(self, *, timeout_s: float = 2.0) -> Health:
        """Return whether both servers answer now, for a readiness check. Waiting lookups do not delay the check.

        Args:
            timeout_s: Time limit in seconds, half of it for each server. Default 2. A server whose connections are all
                in use counts as not answering.
        """
        checked_seconds("timeout_s", timeout_s)
        with within(timeout_s + LOOK_S):
            return self._servers.health(timeout_s)

    def _close_shared_groups(self) -> None:
        for shared in list(self._shared_groups):
            shared.close()

    def close(self) -> None:
        """Close all connections and release shared groups. Running lookups may fail."""
        self._close_shared_groups()
        self._reader.close()
        self._waits.end()
        self._database.close()
        metrics.retire(self._lookups)

    @lookup
    def related(
        self,
        message: Message | Consumed,
        to: Names = None,
        *,
        by: Names = None,
        limit: int | None = None,
        order: Order = "oldest",
        complete: bool = False,
    ) -> Answer:
        """Return the messages that share a key's value with a message, without the message itself.

        Args:
            message: A message read from a stream, or delivered by a client library (docs/clients.md). If the client
                does not provide stream and offset, copies of the message are left out; `answer.self_ids` lists them.
            to: The streams and super streams (their partitions) to search. None: all recorded streams.
            by: The key or keys to search by. A message that shares the value of any of them is returned; its hit names
                all shared keys. None: all defined keys. Keys without a value in the message are skipped.
            limit: Maximum number of messages to return, at least 1. None: all, up to 100,000.
            order: "oldest" (default) sorts by time, then stream and offset; "newest" is its reverse; "offset" sorts by
                stream and offset. A message without a known time sorts as later than all others.
            complete: True also reads retained messages that are not recorded yet: never `NOT_RECORDED_YET`.

        Returns:
            The messages, each read and checked; the status; and the streams searched. `FOUND` covers all recorded
            messages, with `complete` all retained ones. `ABSENT`: every retained message was recorded for all searched
            keys, or was read, and none matches. `UNPROVEN`: it is unknown whether there are more messages. If the
            message has none of the keys, nothing is searched: the status is `ABSENT`, and `missing_keys` says why.
        """
        return answer(self._catalog, question_of(self._catalog, message, to, by, limit, order), complete=complete)

    @lookup
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
        """Return the messages that carry a key's value.

        Args:
            key: The key's name.
            value: The value, of any type that the key accepts, compared in canonical form. A tuple for a composite key.
            streams: The streams and super streams to search. None: all recorded streams.
            since: Only messages from this time on; a `datetime` without a zone is UTC. None: no bound.
            until: Only messages before this time. With either bound, messages without a known time are left out.
            limit: As for `related`.
            order: As for `related`.
            complete: As for `related`.

        Raises:
            InvalidKeyDefinition: `value` is a list for a single-value key, or has too few or too many parts.
            InvalidRelationshipKey: no message can carry the value.
        """
        question = sought(self._catalog, key, value, streams, since, until, limit, order)
        return answer(self._catalog, question, complete=complete)

    def wait_related(
        self,
        message: Message | Consumed,
        to: Names = None,
        *,
        by: Names = None,
        timeout_s: float,
        limit: int | None = None,
        order: Order = "oldest",
    ) -> Answer:
        """Wait until there is at least one related message, and return the same as `related`.

        All waiting calls share one index query. It runs 5 ms after a call starts or finds something, then at growing
        intervals: at most 50 ms, or twice the query's duration if that is longer. `timeout_s` is the number of seconds
        to wait; 0 searches once, as `related` does. The other arguments are those of `related`.

        Returns:
            All related messages recorded by the time the call finds one. After a timeout the call returns within about
            0.3 s, without an error: `ABSENT` if it can be proven in time, `NOT_RECORDED_YET`, or `UNPROVEN`; `unread`
            has the messages that were found but not read in time. If the message has none of the keys, the call
            returns `ABSENT` immediately, and `missing_keys` says why.
        """
        make_question = partial(question_of, self._catalog, message, to, by, limit, order)
        waiting = Waiting(self._catalog, make_question, timeout_s)
        with self._lookups.counted("wait_related", self._lookups.timeout_s + timeout_s) as note:
            while (found := waiting.probe()) is None:
                pause(waiting.pause_s)
                waiting.has_row = bool(self._waits.wait(self._waits.ask(waiting.watch), waiting.watch.until))
            note(found)
            return found

    @lookup
    def expectations(self) -> tuple[Expectation, ...]:
        """Return the expectations defined for this virtual host, ordered by name."""
        return _missing.defined(self._catalog)

    @lookup
    def missing(
        self,
        expectation: str | Expectation,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = UNMET_MAX,
    ) -> MissingReport:
        """Report the messages of a time span that no message followed in time, and how certain that is.

        The call reads the messages, so each reported message exists. The index shows which messages were followed; the
        coverage proves which were not. A long span needs a higher `timeout_s`: a few seconds per 100,000 messages.

        Args:
            expectation: The name of a defined expectation, or an `Expectation`, which need not be defined.
            since: Only messages from this time on; a `datetime` without a zone is UTC. None (default): messages that
                became due in the day before `until`, as far back as they are retained and recorded without a hole.
            until: Only messages before this time. None (default): now.
            limit: Maximum number of messages of each kind to list, from 1 to 100,000; all are counted. Default 1,000.

        Raises:
            NotFound: no expectation of that name is defined.
            KeyNotDefined: the expectation's key is no longer defined.
            TimeNotRecorded: message times are not recorded for one of the expectation's streams.
        """
        return _missing.missing(self._catalog, expectation, since, until, limit)

    @lookup
    def read(self, stream: str, offset: int) -> Message:
        """Read the message at an offset of a stream.

        Raises:
            OffsetExpired: retention has dropped the message; field `first` is the first retained offset.
            OffsetNotFound: the stream ends before the offset, or the broker used the offset for its own data.
            StreamNotFound: the stream does not exist.
        """
        return self._servers.reader().read(stream, offset)

    def read_many(
        self, ids: Iterable[MessageId | tuple[str, int]]
    ) -> Generator[Message | NotFound | AccessRefused, None, None]:
        """Yield the messages with the given ids, in the order of the ids, in bounded memory.

        Args:
            ids: (stream, offset) pairs of any streams, in any order and number.

        Returns:
            An iterator: for each id the message, or the error that says why there is none (yielded, not raised).
        """
        return self._servers.reader().read_many(ids)

    @lookup
    def keys(self) -> tuple[KeyDefinition, ...]:
        """Return the key definitions in force, ordered by name; at most a second old."""
        return self._catalog.keys()

    @lookup
    def streams(self) -> tuple[str, ...]:
        """Return the names of the recorded streams, in order; at most a second old.

        They include a super stream's partitions, not the super stream itself.
        """
        return self._catalog.all_streams()

    @lookup
    def values(self, key: str, prefix: str = "", *, limit: int = 10) -> tuple[str, ...]:
        """Return a key's first recorded values that begin with a prefix: canonical, sorted, without duplicates.

        The cost does not grow with the number of messages per value. Values of messages that retention has dropped are
        included until their rows are pruned. If hundreds of values belong to other virtual hosts, some are left out.

        Args:
            key: The name of a key that is not composite.
            prefix: The beginning of the values; empty (default): all values.
            limit: Maximum number of values to return, 1 to 1,000. Default 10.
        """
        return values(self._catalog, key, prefix, limit)
