"""What `Relations` holds and asks by, and what there is: messages at their offsets, keys, streams, a key's values."""

import ssl
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar
from weakref import WeakSet

from relatum import metrics
from relatum.checks import checked_count, checked_seconds
from relatum.closing import Closing
from relatum.errors import AccessRefused, NotFound
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.processes import after_fork, leave_to_parent
from relatum.reading import CONNECTIONS_MAX, AuthMechanism, BrokerAddress, Message, StreamReader, check_limit
from relatum.store.database import AnyDatabase, Database
from relatum.waiting import LOOK_S, SharedWait, within
from relatum_consumer._lookup_statistics import LookupCounts, LookupStatistics
from relatum_consumer.expectations import ExpectationMethods
from relatum_consumer.groups import GroupMethods
from relatum_consumer.lookups import CLOSED, POOL_MAX, Health, Lookups, Servers, Watch, health, look_up, poll, reached

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Holdings(GroupMethods, ExpectationMethods, Closing):
    """What `Relations` gives without looking for what belongs together. Arguments are those of `Relations`."""

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
        open_reader = partial(StreamReader.open, self._address, timeout_s=timeout_s, connections_max=connections_max)
        self._servers = Servers(self._database.rows, open_reader, timeout_s)
        self._lookups = Lookups(self._servers, self._address.vhost)
        self._catalog = self._lookups.catalog
        self._sharing = WeakSet()
        # It knows nothing of this object: what is dropped without being closed must not wait for the garbage collector.
        self._waits: SharedWait[Watch, bool] = SharedWait(partial(poll, self._servers, self._address.vhost))
        after_fork(self, Holdings._renew)
        metrics.report(self._counts, owner=self)

    def _renew(self) -> None:
        """In a child: groups under way are the parent's. What else is the parent's sees to itself."""
        leave_to_parent(*self._sharing)
        self._counts.renew()
        self._sharing = WeakSet()

    def _run(
        self,
        called: str,
        function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Result:
        """One call, in its time, told and counted; what the function returns."""
        with within(self._timeout_s), look_up(called) as told, self._counts.counted():
            result = function(*args, **options)
            told(result)
            return result

    def statistics(self) -> LookupStatistics:
        """The connections to the broker that are in use, idle and waited for, and what was asked. It asks nobody."""
        reader = self._servers.opened
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
        self._run("open", reached, self._servers)

    def health(self, *, timeout_s: float = 2.0) -> Health:
        """Whether both servers answer now: for a service's readiness, also while its look-ups wait in turn.

        Args:
            timeout_s: Seconds at most, half of them for each server; connections that all are in use count as no
                answer. Default 2.
        """
        checked_seconds("timeout_s", timeout_s)
        with within(timeout_s + LOOK_S):
            return health(self._servers, timeout_s)

    def _end_sharing(self) -> None:
        for shared in list(self._sharing):
            shared.close()

    def close(self) -> None:
        """Close all connections; shared groups are given back. Look-ups under way may fail."""
        self._end_sharing()
        self._servers.close()
        self._waits.end()
        self._database.close()
        metrics.retire(self._counts)

    # --- reading ------------------------------------------------------------------------------------------

    def read(self, stream: str, offset: int) -> Message:
        """The message at an offset of a stream.

        Raises:
            OffsetExpired: retention has dropped it; field `first` is the first offset retained.
            OffsetNotFound: the stream ends before it, or the broker used the offset itself.
            StreamNotFound: there is no such stream.
        """
        with look_up("read", stream):
            return self._servers.reader().read(stream, offset)

    def read_many(
        self, ids: Iterable[MessageId | tuple[str, int]]
    ) -> Generator[Message | NotFound | AccessRefused, None, None]:
        """The messages of many ids, one after the other in the order of the ids; memory is bounded.

        Args:
            ids: (stream, offset) pairs, in any order and number, of any streams.

        Returns:
            For each id its message, or, as a value, the error that says why there is none.
        """
        return self._servers.reader().read_many(MessageId(*each) for each in ids)

    # --- what there is ------------------------------------------------------------------------------------

    def keys(self) -> tuple[KeyDefinition, ...]:
        """The key definitions in force, by name, as they were known within the last second."""
        return self._run("keys", self._catalog.keys)

    def streams(self) -> tuple[str, ...]:
        """The names of the streams that are recorded, in order, as they were known within the last second.

        A super stream's partitions are among them, itself is not.
        """
        return self._run("streams", self._catalog.all_streams)

    def values(self, key: str, prefix: str = "", *, limit: int = 10) -> tuple[str, ...]:
        """The first recorded values of a key that begin with a prefix, in order, each once; in canonical form.

        It goes from value to value by the index, whatever number of messages share one. What retention has dropped
        counts until its rows are pruned. Where hundreds of values are of other virtual hosts, some may be left out.

        Args:
            key: The key's name; none of several parts.
            prefix: What they begin with; empty (default) for all.
            limit: Values at most, 1 to 1,000. Default 10.

        Raises:
            KeyNotDefined: no key of that name is defined.
            InvalidInput: an argument is wrong, or the key is composite.
        """
        return self._run("values", self._lookups.values, key, prefix, limit)
