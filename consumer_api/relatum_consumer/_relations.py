"""Finding the messages that belong together, blocking."""

from collections.abc import Callable, Generator, Iterable
from datetime import datetime
from functools import partial
from typing import Any, Final, ParamSpec, Self, TypeVar
from weakref import WeakSet

from relatum import metrics
from relatum.checks import checked_count, checked_seconds
from relatum.closing import Closing
from relatum.errors import AccessRefused, NotFound
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.processes import after_fork, leave_to_parent
from relatum.reading import CONNECTIONS_MAX, Broker, BrokerAddress, Message, StreamReader, check_limit
from relatum.store.database import AnyDatabase, Database
from relatum.waiting import LOOK_S, SharedWait, pause, within
from relatum_consumer import _missing
from relatum_consumer._tracing import Start, trace
from relatum_consumer._watch_missing import MissingWatch
from relatum_consumer.expectations import POLL_S, UNMET_MAX, Expectation, MissingReport, UnmetExpectation
from relatum_consumer.groups import GroupMethods
from relatum_consumer.lookups.answer import Answer
from relatum_consumer.lookups.arguments import Names, Order
from relatum_consumer.lookups.by_key import find, related
from relatum_consumer.lookups.by_time import around, beside, window
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.consumed import Consumed
from relatum_consumer.lookups.servers import CLOSED, Health, Servers
from relatum_consumer.lookups.telemetry import LookupCounts, LookupStatistics, look_up
from relatum_consumer.lookups.values import Times, times, values
from relatum_consumer.lookups.waiting import Rest, Watch, poll, rested, wait_related
from relatum_consumer.traces import Trace

POOL_MAX: Final = 1_000
"""Connections to PostgreSQL one `Relations` can be told to keep; a server has a hundred for all, unless told."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Relations(GroupMethods, Closing):
    """Finds the messages that belong together, and reads them, blocking.

    A context manager; threads may share one: each call takes a connection to the database and one to the
    broker of its own for as long as it lasts. Both are opened when they are first needed.

    Args:
        broker: The broker's URL (`amqp://…` or `rabbitmq-stream://…`), or its address.
        database: PostgreSQL's URL, or a `Database`, which stays open when this is closed.
        timeout_s: Seconds for a whole call, of the database and the broker together, also where one of them accepts and
            never answers. Default 10. It ends as `DatabaseUnavailable` (`reason` is "timeout", or "pool" where all
            connections are in use) or `ReadTimeout`, and is safe to repeat. What reads much (`complete=True` far behind
            a recorder) may need more. Iterators take it for each question they ask.
        database_connections_max: Connections to PostgreSQL at most, kept once opened. A call waits for one within
            `timeout_s`. None (default): 10, or twice the `?pool_size=` of the URL. A `Database` has its own limit.
        broker_connections_max: Connections to the broker at most, to all its nodes together; 2 or more, default 16. A
            call waits for one within `timeout_s`; an iteration that reads streams holds one.

    Every lookup may raise, besides what its method names:

    - `StreamReplaced`: a stream is not the one that was recorded (declared again, or its tail lost). It is never
      answered from. A lookup that names no stream leaves it out: `Answer.unreadable_streams`.
    - `AnotherBroker`: a stream that was named was recorded from another broker. Left out, likewise.
    - `SchemaMissing`, `AccessRefused`, `ConfigurationError`: something must be put right first.
    - `DatabaseUnavailable`, `BrokerUnavailable`, `ConnectionLost`, `StreamUnavailable`, `ReadTimeout`,
      `ConnectionsInUse` (more asked at once than `broker_connections_max` could serve in time): safe to repeat.
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
        self._database = Database(database, refusing=CLOSED, connections_max=database_connections_max, is_kept=True)
        self._timeout_s = timeout_s
        check_limit(broker_connections_max)
        self._counts = LookupCounts(broker_connections_max)
        open_reader = partial(
            StreamReader.open, self._address, timeout_s=timeout_s, broker_connections_max=broker_connections_max
        )
        self._servers = Servers(self._database.rows, open_reader, timeout_s)
        self._catalog = Catalog(self._servers, self._address.vhost)
        self._sharing = WeakSet()
        # It knows nothing of this object: what is dropped without being closed must not wait for the garbage collector.
        self._waits: SharedWait[Watch, bool] = SharedWait(partial(poll, self._servers, self._address.vhost))
        after_fork(self, Relations._renew)
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
        return self._counts.statistics(None if reader is None else reader.statistics())

    @classmethod
    def open(cls, broker: str | Broker, database: AnyDatabase, **options: Any) -> Self:
        """The same as the constructor, once both servers have answered: what is wrong shows at once.

        Args:
            broker: As for the class.
            database: As for the class.
            options: As for the class: `database_connections_max`, `timeout_s`, …

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
        self._run("open", self._servers.check)

    def health(self, *, timeout_s: float = 2.0) -> Health:
        """Whether both servers answer now: for a service's readiness, also while its lookups wait in turn.

        Args:
            timeout_s: Seconds at most, half of them for each server; connections that all are in use count as no
                answer. Default 2.
        """
        checked_seconds("timeout_s", timeout_s)
        with within(timeout_s + LOOK_S):
            return self._servers.health(timeout_s)

    def _end_sharing(self) -> None:
        for shared in list(self._sharing):
            shared.close()

    def close(self) -> None:
        """Close all connections; shared groups are given back. Lookups under way may fail."""
        self._end_sharing()
        self._servers.close()
        self._waits.end()
        self._database.close()
        metrics.retire(self._counts)

    # --- by key -------------------------------------------------------------------------------------------

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
        """The messages that share a key's value with a message, and never the message itself.

        Args:
            message: A message read from a stream, or as a client gave it to its consumer (docs/clients.md). Where that
                does not say where it is, its copies in streams are left out, and named in `answer.self_ids`.
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
            streams was recorded for all the keys asked by, or read; `UNPROVEN` where that cannot be known. If the
            message has none of the keys, nothing is looked for: `ABSENT`, and `missing_keys` says why.

        Raises:
            KeyNotDefined: no key of that name is defined, or, by every key, none at all.
            NothingRecorded: no stream was named, and none of this virtual host is recorded: nothing can be known.
            StreamNotFound: neither the database nor the broker knows a stream of `to`, or it was deleted.
            InvalidInput: an argument is wrong, or there are more than 100,000 messages and no limit.
        """
        return self._run("related", related, self._catalog, message, to, by, limit, order, complete=complete)

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
            InvalidKeyDefinition: a list for a key of one value, or not as many values as a composite key has parts.
            InvalidRelationshipKey: no message can carry that value.
            StreamNotFound: neither the database nor the broker knows a stream, or it was deleted.
            InvalidInput: an argument is wrong, or there are more than 100,000 messages and no limit.
        """
        return self._run(
            "find", find, self._catalog, key, value, streams, since, until, limit, order, complete=complete
        )

    def times(
        self,
        key: str,
        value: Any,
        *,
        streams: Names = None,
        since: datetime | None = None,
        until: datetime | None = None,
        spans: int = 60,
        order: Order = "oldest",
    ) -> Times:
        """When messages carry a key's value: how many are recorded, by spans of time from the first to the last.

        The index alone is asked, and 50,000 rows of it at most, so it proves nothing: what retention has dropped
        counts until its rows are pruned, what is not recorded yet and what has no time does not.

        Args:
            key: The key's name.
            value: As for `find`.
            streams: As for `find`.
            since: As for `find`.
            until: As for `find`.
            spans: Spans of one length, 1 to 1,000. Default 60.
            order: Which are counted of each stream where there are more: "oldest" (default) or "newest" by time.

        Raises:
            KeyNotDefined, InvalidRelationshipKey, StreamNotFound: as for `find`.
            InvalidInput: an argument is wrong.
        """
        return self._run("times", times, self._catalog, key, value, streams, since, until, spans, order)

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
        """The same as `related`, waiting until there is at least one message.

        All who wait share one question to the index: it is asked 5 ms after one began or one was told, then at growing
        intervals of up to 50 ms, of twice as long as it takes at least.

        Args:
            message: As for `related`.
            to: As for `related`.
            by: As for `related`.
            timeout_s: Seconds to wait; 0 looks once, as `related` does.
            limit: As for `related`.
            order: As for `related`.

        Returns:
            The messages recorded when the first was seen. When the time is over, what is known: `ABSENT` where that
            could be proven in time, `NOT_RECORDED_YET`, or `UNPROVEN`, where `unread` names what was found and could
            not be read in time. That is no error, and comes within about 0.3 s of the time asked for. If the message
            has none of the keys, the answer is `ABSENT` at once, and `missing_keys` says why.

        Raises:
            KeyNotDefined, NothingRecorded, StreamNotFound, InvalidInput: as for `related`.
        """
        waiting = wait_related(self._catalog, message, to, by, limit, order, timeout_s)
        with within(self._timeout_s + timeout_s), look_up("wait_related") as told, self._counts.counted():
            while (answer := waiting.look()) is None:
                with self._counts.awaiting():
                    pause(waiting.pause_s)
                    waiting.is_seen = bool(self._waits.wait(waiting.watch, waiting.watch.until))
            told(answer)
            return answer

    # --- what is connected ---------------------------------------------------------------------------------

    def trace(
        self,
        start: Start,
        *,
        by: Names = None,
        streams: Names = None,
        hops: int = 8,
        limit: int = 1_000,
        fan_out: int = 200,
        since: datetime | None = None,
        until: datetime | None = None,
        complete: bool = False,
    ) -> Trace:
        """All messages that are connected with one, over one key or several: hop by hop, from each to all it leads to.

        A hop asks for all new values by one statement, and reads all new messages together. Where a key names another
        (`KeyDefinition(…, names=)`), the trace tells what came from what; other values are shared.

        Args:
            start: A message read or consumed, recorded or not, or a key's name and a value as a tuple.
            by: The key or keys to follow, and what they name; None for every key defined.
            streams: The streams and super streams to look in; None for all that are recorded. The start may be
                elsewhere.
            hops: Hops from the start at most, 1 to 1,000. Default 8.
            limit: Messages at most, the start among them, 1 to 100,000. Default 1,000. Of those of one hop the oldest
                are taken.
            fan_out: Messages that one value may have to be followed, 1 to 10,000. Default 200. It counts what is
                recorded, also where retention has dropped it since.
            since: As for `find`; the start itself may be earlier.
            until: As for `find`.
            complete: True also reads what is retained and not recorded yet, at each hop.

        Returns:
            The messages, how they are linked, what a bound left out, and how sure each step is. It holds for what was
            in the streams when the trace began, and for some that came later.

        Raises:
            KeyNotDefined: no key of that name is defined, or, by every key, none at all.
            InvalidRelationshipKey: no message can carry the value of the start.
            NothingRecorded: no stream was named, and none of this virtual host is recorded: nothing can be known.
            StreamNotFound: neither the database nor the broker knows a stream, or it was deleted.
            InvalidInput: an argument is wrong.
        """
        return self._run(
            "trace",
            trace,
            self._catalog,
            start,
            by=by,
            streams=streams,
            hops=hops,
            limit=limit,
            fan_out=fan_out,
            since=since,
            until=until,
            complete=complete,
        )

    # --- what did not follow in time ------------------------------------------------------------------------

    def expectations(self) -> tuple[Expectation, ...]:
        """The expectations that are defined for this virtual host, in the order of their names."""
        return self._run("expectations", _missing.defined, self._catalog)

    def missing(
        self,
        expectation: str | Expectation,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = UNMET_MAX,
    ) -> MissingReport:
        """The messages of a span of time that nothing has followed in time, and how sure that is.

        The messages themselves are read, so each that is named is there; what followed them is told by the index, and
        that nothing did by what is recorded. A call that looks at much needs more than the usual `timeout_s`: some
        seconds for 100,000 messages.

        Args:
            expectation: What is expected, by its name; or an `Expectation`, which need not be defined.
            since: Only messages of this time or later; a `datetime` without a zone is UTC. None (default): those that
                fell due within a day before `until`, as far back as they are recorded without a hole, and retained.
            until: Only messages before this time. None (default) for now.
            limit: Messages of each kind that are named at most, from 1 to 100,000; they are counted all the same.
                Default 1,000.

        Raises:
            NotFound: no expectation of that name is defined.
            KeyNotDefined: its key is not defined any more.
            StreamNotFound: neither the database nor the broker knows one of its streams, or it was deleted.
            TimeNotRecorded: the times of one of its streams are not recorded.
            InvalidInput: an argument is wrong.
        """
        return self._run("missing", _missing.missing, self._catalog, expectation, since, until, limit)

    def watch_missing(
        self, expectation: str | Expectation, *, since: datetime | None = None, poll_s: float = POLL_S
    ) -> Generator[UnmetExpectation, None, None]:
        """The messages that nothing has followed in time, each as soon as that is known, and once.

        It never ends by itself. While a recorder is behind it waits for it, and it waits for servers that are away.
        What it remembers does not grow. A message that is published later than it was due itself is not reported here:
        `missing` finds it.

        Args:
            expectation: As for `missing`.
            since: The time of the first message to look at; None (default) for those that fall due from now on.
            poll_s: Seconds between two looks, more than 0. Default 1.

        Returns:
            An iterator; of late and missing messages, and of those of which it can never be known. Close it where it
            is left early.

        Raises:
            NotFound, KeyNotDefined, StreamNotFound, TimeNotRecorded, InvalidInput: as for `missing`; when it is
                iterated.
        """
        return rested(self._watch_missing(expectation, since, poll_s))

    def _watch_missing(
        self, expectation: str | Expectation, since: datetime | None, poll_s: float
    ) -> Generator[UnmetExpectation | Rest, None, None]:
        return MissingWatch(self._catalog, expectation, since, poll_s).found(self._run, str(self._address))

    # --- by time ------------------------------------------------------------------------------------------

    def after(
        self,
        moment: Message | Consumed | datetime,
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
            moment: A message read or consumed, for its time; or a `datetime`, without a zone UTC. Of one consumed that
                does not say where it is, nothing but the time counts: its own copies are found, too.
            stream: The stream or super stream to look in.
            by: A key: only messages that share its value with the message. Needs a message.
            inclusive: True takes an equal time in another stream as next, too: the one with the lowest offset.
            complete: True also reads what is retained and not recorded yet; without it, the answer is exact over what
                is recorded.

        Returns:
            No message or one, with the status.

        Raises:
            TimeNotRecorded: times are switched off for the stream.
            KeyNotDefined: no key of that name is defined.
            StreamNotFound: neither the database nor the broker knows the stream, or it was deleted.
            InvalidInput: an argument is wrong, or the message has no time.
        """
        return self._run(
            "after", beside, self._catalog, "after", moment, stream, by, inclusive=inclusive, complete=complete
        )

    def before(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        *,
        by: str | None = None,
        inclusive: bool = False,
        complete: bool = False,
    ) -> Answer:
        """The previous message in time in a stream: the mirror of `after`.

        With `inclusive`, of several messages of an equal time it is the one with the highest offset.
        """
        return self._run(
            "before", beside, self._catalog, "before", moment, stream, by, inclusive=inclusive, complete=complete
        )

    def nearest(
        self, moment: Message | Consumed | datetime, stream: str, *, by: str | None = None, complete: bool = False
    ) -> Answer:
        """The message nearest in time in a stream, and never the message itself.

        An equal time is nearest of all. Of two equally near it is the earlier; of several of one time before the
        moment, or at it, the one with the highest offset: what `before(…, inclusive=True)` gives. In the message's own
        stream those of its time that come after it are later: the first of them, where none comes before. Arguments,
        result and errors are those of `after`.
        """
        return self._run("nearest", beside, self._catalog, "nearest", moment, stream, by, complete=complete)

    def window(
        self,
        moment: Message | Consumed | datetime,
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
        return self._run("window", window, self._catalog, moment, stream, before_s, after_s, by, complete=complete)

    def around(
        self,
        moment: Message | Consumed | datetime,
        streams: Names = None,
        *,
        before_s: float = 0.0,
        after_s: float = 0.0,
        limit: int | None = None,
        complete: bool = False,
    ) -> Answer:
        """All messages of several streams around a moment, merged by time: what happened then.

        Of one time they come by stream, shorter names first (`r-2` before `r-10`), and offset.

        Args:
            moment: A `datetime`, without a zone UTC; or a message read or consumed, for its time: it is found, too.
            streams: The streams and super streams to look in; None for all that are recorded, with their times.
            before_s: As for `window`.
            after_s: As for `window`.
            limit: Messages at most, those nearest to the moment; None for all, up to 100,000.
            complete: As for `after`.

        Raises:
            NothingRecorded: no stream was named, and none of this virtual host is recorded: nothing can be known.
            TimeNotRecorded: as for `after`, of a stream that was named.
            StreamNotFound: neither the database nor the broker knows a stream, or it was deleted.
            InvalidInput: an argument is wrong, or there are more than 100,000 messages and no limit.
        """
        return self._run("around", around, self._catalog, moment, streams, before_s, after_s, limit, complete=complete)

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
        return self._run("values", values, self._catalog, key, prefix, limit)
