"""Which broker streams are recorded from: another one's stream of the same name is not recorded. See docs/adr/0043."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final
from uuid import UUID

import sqlalchemy as sa

from relatum.errors import ReadTimeout, RelatumError, StreamUnavailable
from relatum.reading import BrokerIdentity, StreamReader, another_broker, claimed_identity
from relatum.recording.tails import after_loss
from relatum.store.catalog import StreamRow, ensure_streams, streams_named
from relatum.store.database import sql, transaction
from relatum.store.members import RECORDERS

UNKNOWN_S: Final = 60.0
"""Seconds before a broker that could not tell its id is asked again."""

_ADOPT: Final = sql(f"""
    UPDATE relatum.streams SET broker_id = :broker_id::uuid
    WHERE stream_id = ANY (:stream_ids::integer[]) AND (broker_id IS NULL
        OR broker_id <> :broker_id::uuid AND NOT {RECORDERS.is_held} AND NOT EXISTS (
            SELECT FROM relatum.coverage c WHERE c.stream_id = streams.stream_id AND c.last_offset IS NOT NULL))""")
"""Assigns streams to a broker, if theirs was unknown, or nothing is recorded of them and no recorder holds them."""

_OF_OTHERS: Final = sql("""
    SELECT s.name, b.broker_id, b.cluster_name
    FROM relatum.streams s JOIN relatum.brokers b ON b.broker_id = s.broker_id
    WHERE s.stream_id = ANY (:stream_ids::integer[]) AND b.broker_id IS DISTINCT FROM :broker_id::uuid""")

_NOTE_BROKER: Final = sql("""
    INSERT INTO relatum.brokers AS b (broker_id, cluster_name) VALUES (:broker_id::uuid, :cluster_name::text)
    ON CONFLICT (broker_id) DO UPDATE SET cluster_name = excluded.cluster_name
    WHERE b.cluster_name <> excluded.cluster_name""")


class OwnBroker:
    """The broker that a recorder reads from, and which streams are its own. Thread-safe.

    `reader` gives the reader for questions. All methods but `is_not_of` wait for servers.
    """

    def __init__(self, engine: sa.Engine, vhost: str, reader: Callable[[], StreamReader]) -> None:
        self._engine = engine
        self._vhost = vhost
        self._reader = reader
        self._identity = BrokerIdentity(None, "")
        self._ask_at = 0.0
        self._asking = threading.Lock()

    def is_not_of(self, broker_id: UUID | None) -> bool:
        """Whether a stream with that broker's id is known to be another broker's."""
        return BrokerIdentity(broker_id, "").contradicts(self._identity)

    def find(
        self, sought: Sequence[tuple[str, str | None, bool]]
    ) -> tuple[dict[str, StreamRow], dict[str, RelatumError]]:
        """The rows of streams by name, and errors for those that are another broker's.

        `sought`: Each stream's name, its super stream, and whether the broker has confirmed that it exists: only then
        one without a row gets one.
        """
        rows = self._rows([name for name, _, _ in sought])
        have_one = {row.name for row in rows}
        ours = {name: super_stream for name, super_stream, is_there in sought if is_there or name in have_one}
        with transaction(self._engine) as connection:
            rows = ensure_streams(connection, self._vhost, ours)
        doubted = [row for row in rows if row.broker_id is None or row.broker_id != self._identity.broker_id]
        others: dict[str, RelatumError] = {}
        if doubted:
            others = self._others(doubted)
            rows = self._rows(list(ours))
        return {row.name: row for row in rows}, others

    def check(self, names: Sequence[str]) -> None:
        """Raise if all streams are another broker's."""
        others = self._others(self._rows(names))
        if others and len(others) == len(names):
            raise next(iter(others.values()))

    def is_stream_of(self, row: StreamRow) -> bool:
        """Whether a stream that changed is still that of a row, cut back if it lost its end."""
        # Another broker may have taken this one's address.
        self._identity = claimed_identity(self._reader())
        return not self.is_not_of(row.broker_id) and after_loss(self._engine, self._reader(), row)

    def _rows(self, names: Sequence[str]) -> list[StreamRow]:
        with transaction(self._engine) as connection:
            return streams_named(connection, self._vhost, names, partitions=False)

    def _others(self, rows: Sequence[StreamRow]) -> dict[str, RelatumError]:
        reader = self._reader()
        with self._asking:
            if self._identity.broker_id is None and time.monotonic() >= self._ask_at:
                with suppress(StreamUnavailable, ReadTimeout):
                    self._identity = claimed_identity(reader)
                self._ask_at = time.monotonic() + UNKNOWN_S
            identity = self._identity
        if identity.broker_id is None:
            return {}
        adopted = {"stream_ids": [row.stream_id for row in rows], "broker_id": identity.broker_id}
        with transaction(self._engine) as connection:
            note_broker(connection, identity)
            connection.execute(_ADOPT, adopted)
            return _strangers(connection, rows, identity)


def _strangers(
    connection: sa.Connection, rows: Sequence[StreamRow], identity: BrokerIdentity
) -> dict[str, RelatumError]:
    """Errors for the streams that are another broker's, by name."""
    wanted = {"stream_ids": [row.stream_id for row in rows], "broker_id": identity.broker_id}
    return {
        name: another_broker(name, BrokerIdentity(broker_id, cluster_name), identity)
        for name, broker_id, cluster_name in connection.execute(_OF_OTHERS, wanted)
    }


def note_broker(connection: sa.Connection, identity: BrokerIdentity) -> None:
    """Write down a broker that is known, with what its cluster is called now."""
    connection.execute(_NOTE_BROKER, {"broker_id": identity.broker_id, "cluster_name": identity.cluster_name})


def check_broker(
    engine: sa.Engine, reader: StreamReader, row: StreamRow, identity: BrokerIdentity | None = None
) -> None:
    """Raise `AnotherBroker` if a stream is not this broker's. Nothing is written.

    `identity`: The broker; None asks it, where the stream is known to be of one.
    """
    if row.broker_id is None:
        return
    identity = identity or reader.identity()
    if not BrokerIdentity(row.broker_id, "").contradicts(identity):
        return
    with transaction(engine) as connection:
        for error in _strangers(connection, [row], identity).values():
            raise error
