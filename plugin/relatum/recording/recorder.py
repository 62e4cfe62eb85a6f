"""The recorder of named streams and super streams, which `relatum record` runs."""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from relatum.common.checks import as_options, checked_count, checked_event, checked_name, checked_names, checked_seconds
from relatum.common.limits import RECORDER_CONNECTIONS_MAX
from relatum.common.processes import refuse_in_child
from relatum.common.waiting import QUESTION_S, AfterStop, Server, backoff, has_passed, within
from relatum.errors import DataError, NotFound, StreamNotFound, Transient, UsedAfterClose
from relatum.keys import KeyDefinition, as_definitions
from relatum.reading import Broker, BrokerAddress, StreamReader
from relatum.recording.recorder_group import RecorderGroup
from relatum.recording.statistics import RecorderStatistics
from relatum.store.catalog import add_keys, check_may_record, ensure_stream, key_definitions
from relatum.store.catalog import set_record_time as switch_record_time
from relatum.store.database import AnyDatabase, as_engine, transaction
from relatum.store.members import LEASE_S

logger = logging.getLogger("relatum.recorder")

PARTITIONS_S: Final = 30.0
"""Seconds between two queries for new partitions of super streams."""

SHARED_NAME_BYTES_MAX: Final = 500
"""Maximum bytes of the name that members share; PostgreSQL can index 2,700."""


class Recorder:
    """Records streams and super streams until it is stopped.

    Recorders with the same `streams`, in one process or many, share them evenly.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`, whose pool then limits the connections.
        streams: Names of streams and super streams. The recorder records all partitions of a super stream, including
            those added later, and waits for streams that do not exist yet.
        keys: Keys to define before recording, unless they are already defined.
        holder: The name of this member. Default: a name made of host and process.
        database_connections_max: Maximum connections to PostgreSQL, for any number of streams; at least 1, default 4.
            Work waits while all are in use. With a URL and three or more, one is reserved for the lease.
        lease_s: Seconds for which the lease is valid without renewal. Default: 5. If this member dies, others take its
            streams over after one to two leases.
    """

    def __init__(
        self,
        broker: str | Broker,
        database: AnyDatabase,
        streams: Sequence[str],
        *,
        keys: Iterable[str | KeyDefinition] = (),
        holder: str | None = None,
        database_connections_max: int = RECORDER_CONNECTIONS_MAX,
        lease_s: float = LEASE_S,
    ) -> None:
        with as_options():
            checked_count("database_connections_max", database_connections_max)
            checked_seconds("lease_s", lease_s, zero=False)
            self._names = list(checked_names("streams", streams, least=1))
            if holder is not None:
                checked_name("holder", holder)
        self._address = BrokerAddress.of(broker)
        self._keys = as_definitions(keys)
        self._group = RecorderGroup(
            self._address,
            database,
            connections_max=database_connections_max,
            name=shared_name(self._address.vhost, self._names),
            holder=holder,
            lease_s=lease_s,
        )
        self._engine = self._group.database.engine
        for each in self._names:
            self._group.progress_of(each)
        self._is_super: dict[str, bool] = {}
        """Whether a found name is a super stream's. If not, querying its partitions makes the broker log an error."""
        self._has_checked = False
        refuse_in_child(self, "a recorder")

    def statistics(self) -> RecorderStatistics:
        """Return the numbers of recorded messages and the lag of each stream. Queries no server."""
        return self._group.statistics()

    def run(self, stop: threading.Event) -> None:
        """Record until `stop` is set; then commit the messages that were read, release the streams, and return.

        Waits for a broker or database that is unavailable, also at the start.

        Raises:
            ConfigurationError, AccessRefused: a retry would not help; for example, the database user may only read.
            AnotherBroker: all streams were recorded from another broker. If only some were, the recorder logs the
                error and retries them.
            KeyDefinitionConflict: a key of `keys` is already defined with another source or type.
            SchemaMissing: the database has no schema: run `relatum migrate`.
            UsedAfterClose: the recorder has run before; create another one.
        """
        checked_event("stop", stop)
        if self._group.stopping.is_set():
            raise UsedAfterClose("this recorder has run: create another one")
        try:
            with within(AfterStop(stop)):
                self._discover_streams(stop)
        finally:
            self._group.stop()
            if stop.is_set():
                logger.info("the recorder has stopped, as requested")

    def _discover_streams(self, stop: threading.Event) -> None:
        has_keys, outage_pauses, unknown_pauses = False, backoff(), backoff(QUESTION_S)
        while not stop.is_set():
            has_keys = has_keys or self._attempt("reading the definitions of keys", Server.DATABASE, self._define_keys)
            # Until the keys are read, the broker is queried only for the metrics.
            find = partial(self._find_streams, stop) if has_keys else self._probe_broker
            if not self._attempt("looking for streams to record", Server.BROKER, find) or not has_keys:
                stop.wait(next(outage_pauses))
                continue
            outage_pauses = backoff()
            if self._is_super.keys() >= set(self._names):
                unknown_pauses = backoff(QUESTION_S)
                stop.wait(PARTITIONS_S if any(self._is_super.values()) else None)
            else:
                stop.wait(next(unknown_pauses))

    def _attempt(self, what: str, server: Server, attempt: Callable[[], None]) -> bool:
        """Make an attempt; log a transient error and return False."""
        outages = self._group.outages
        try:
            attempt()
        except (Transient, DataError) as error:
            if not has_passed():  # if a stop ended the attempt, the server may be available
                outages.failed(what, error)
            return False
        outages.answered(server)
        outages.over(what)
        return True

    def _define_keys(self) -> None:
        if self._keys:
            add_keys(self._engine, self._keys)
        with transaction(self._engine) as connection:
            key_definitions(connection)
            # Detect a missing privilege now, instead of with the first row and at each retry.
            check_may_record(connection)

    def _probe_broker(self) -> None:
        # Queries a stream, not a super stream: this is harmless while the broker starts.
        with suppress(NotFound):
            self._group.follower.reader.bounds(self._names[0])

    def _find_streams(self, stop: threading.Event) -> None:
        reader = self._group.follower.reader
        for name in self._names:
            if stop.is_set():
                return
            if self._is_super.get(name, True):
                self._find(reader, name)
        if not self._has_checked:
            self._group.broker.check([stream.name for stream in self._group.streams()])
            self._has_checked = True

    def _find(self, reader: StreamReader, name: str) -> None:
        """Record the stream or partitions of a name. A name of no stream is logged, and retried later."""
        partitions = reader.partitions(name)
        for partition in partitions:
            self._group.add(partition, super_stream=name)
        if partitions:
            self._is_super[name] = True
            self._group.progress.pop(name, None)
        elif name not in self._is_super:
            try:
                if not reader.routes("", name):
                    reader.bounds(name)
            except NotFound as error:
                self._group.outages.failed(f"recording of stream {name!r}", error)
                self._group.progress_of(name).show(None)
            else:
                self._group.outages.over(f"recording of stream {name!r}")
                self._group.add(name)
                self._is_super[name] = False


def shared_name(vhost: str, names: Iterable[str]) -> str:
    """Return the name that all recorders of the same streams share. It is short enough for an index."""
    wanted = sorted(set(names))
    name = f"{vhost} {','.join(wanted)}"
    if len(name.encode()) <= SHARED_NAME_BYTES_MAX:
        return name
    return f"{len(wanted)} streams {hashlib.sha256(name.encode()).hexdigest()}"


def set_record_time(broker: str | Broker, database: AnyDatabase, name: str, *, on: bool) -> None:
    """Switch the recording of a stream's times on or off, from now on. Recorders apply it within two seconds.

    Queries the broker only if the stream was never recorded, so that a misspelled name is not stored.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.
        name: The name of a stream or of one partition.
        on: Whether the times of its messages are recorded.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: the broker has no such stream, or this user may not read it; nothing
            was written.
        BrokerUnavailable, DatabaseUnavailable: nothing was written; safe to repeat.
    """
    checked_name("name", name)
    address = BrokerAddress.of(broker)
    with as_engine(database) as engine:
        try:
            switch_record_time(engine, address.vhost, name, on=on)
        except StreamNotFound:
            with StreamReader.open(address) as reader:
                reader.bounds(name)
            with transaction(engine) as connection:
                ensure_stream(connection, address.vhost, name)
            switch_record_time(engine, address.vhost, name, on=on)
