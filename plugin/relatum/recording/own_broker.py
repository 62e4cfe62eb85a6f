"""The broker that streams are recorded from. A stream of that name on another broker is refused. See docs/adr/0043."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from uuid import UUID

import sqlalchemy as sa

from relatum.errors import ReadTimeout, RelatumError, StreamUnavailable
from relatum.reading import BrokerIdentity, StreamReader, another_broker, claimed_identity
from relatum.recording.tails import after_loss
from relatum.store.catalog import StreamRow, ensure_streams, streams_named
from relatum.store.database import sql, transaction
from relatum.store.members import RECORDERS

if TYPE_CHECKING:
    from relatum.recording.stream_recording import StreamRecording

UNKNOWN_S: Final = 60.0
"""Seconds before a broker whose id is unknown is asked for it again."""

_ADOPT: Final = sql(f"""
    UPDATE relatum.streams SET broker_id = :broker_id::uuid
    WHERE stream_id = ANY (:stream_ids::integer[]) AND (broker_id IS NULL
        OR broker_id <> :broker_id::uuid AND NOT {RECORDERS.is_held} AND NOT EXISTS (
            SELECT FROM relatum.coverage c WHERE c.stream_id = streams.stream_id AND c.last_offset IS NOT NULL))""")
"""Assigns streams to a broker if theirs is unknown, or if nothing is recorded of them and no recorder holds them."""

_OF_OTHERS: Final = sql("""
    SELECT s.name, b.broker_id, b.cluster_name
    FROM relatum.streams s JOIN relatum.brokers b ON b.broker_id = s.broker_id
    WHERE s.stream_id = ANY (:stream_ids::integer[]) AND b.broker_id IS DISTINCT FROM :broker_id::uuid""")

_NOTE_BROKER: Final = sql("""
    INSERT INTO relatum.brokers AS b (broker_id, cluster_name) VALUES (:broker_id::uuid, :cluster_name::text)
    ON CONFLICT (broker_id) DO UPDATE SET cluster_name = excluded.cluster_name
    WHERE b.cluster_name <> excluded.cluster_name""")


class OwnBroker:
    """The broker that a recorder reads from, and which streams belong to it. Thread-safe.

    `reader` returns a reader for queries. All methods except `is_not_of` wait for servers.
    """

    def __init__(self, engine: sa.Engine, vhost: str, reader: Callable[[], StreamReader]) -> None:
        self._engine = engine
        self._vhost = vhost
        self._reader = reader
        self._identity = BrokerIdentity(None, "")
        self._ask_at = 0.0

    def is_not_of(self, broker_id: UUID | None) -> bool:
        """Return whether a broker id is known to be another broker's."""
        return BrokerIdentity(broker_id, "").contradicts(self._identity)

    def find(self, streams: Sequence["StreamRecording"]) -> dict["StreamRecording", StreamRow | RelatumError | None]:
        """Return the rows of streams, or an error for a stream of another broker.

        A missing row is added only if the broker has confirmed that the stream exists.
        """
        have_one = {row.name for row in self._rows([each.name for each in streams])}
        ours = {each.name: each.super_stream for each in streams if each.is_there or each.name in have_one}
        with transaction(self._engine) as connection:
            rows = ensure_streams(connection, self._vhost, ours)
        doubted = [row for row in rows if row.broker_id is None or row.broker_id != self._identity.broker_id]
        others: dict[str, RelatumError] = {}
        if doubted:
            others = self._others(doubted)
            rows = self._rows(list(ours))
        found = {row.name: row for row in rows} | others
        return {each: found.get(each.name) for each in streams}

    def check(self, names: Sequence[str]) -> None:
        """Raise if all streams belong to another broker."""
        others = self._others(self._rows(names))
        if others and len(others) == len(names):
            raise next(iter(others.values()))

    def is_stream_of(self, row: StreamRow) -> bool:
        """Return whether a changed stream still belongs to its row; if it lost its end, the table is cut back."""
        # Another broker may have taken this one's address.
        self._identity = claimed_identity(self._reader())
        return not self.is_not_of(row.broker_id) and after_loss(self._engine, self._reader(), row)

    def _rows(self, names: Sequence[str]) -> list[StreamRow]:
        with transaction(self._engine) as connection:
            return streams_named(connection, self._vhost, names, partitions=False)

    def _others(self, rows: Sequence[StreamRow]) -> dict[str, RelatumError]:
        reader = self._reader()
        if self._identity.broker_id is None and time.monotonic() >= self._ask_at:
            with suppress(StreamUnavailable, ReadTimeout):
                self._identity = claimed_identity(reader)
            self._ask_at = time.monotonic() + UNKNOWN_S
        identity = self._identity
        if identity.broker_id is None:
            return {}
        adopted = {"stream_ids": [row.stream_id for row in rows], "broker_id": identity.broker_id}
        with transaction(self._engine) as connection:
            connection.execute(_NOTE_BROKER, {"broker_id": identity.broker_id, "cluster_name": identity.cluster_name})
            connection.execute(_ADOPT, adopted)
            return _strangers(connection, rows, identity)


def _strangers(
    connection: sa.Connection, rows: Sequence[StreamRow], identity: BrokerIdentity
) -> dict[str, RelatumError]:
    """Return errors for the streams of another broker, by name."""
    wanted = {"stream_ids": [row.stream_id for row in rows], "broker_id": identity.broker_id}
    return {
        name: another_broker(name, BrokerIdentity(broker_id, cluster_name), identity)
        for name, broker_id, cluster_name in connection.execute(_OF_OTHERS, wanted)
    }


def check_broker(
    engine: sa.Engine, reader: StreamReader, row: StreamRow, identity: BrokerIdentity | None = None
) -> None:
    """Raise `AnotherBroker` if a stream belongs to another broker. Nothing is written.

    `identity`: The broker's identity. None: ask the broker, if the stream's broker is known.
    """
    if row.broker_id is None:
        return
    identity = identity or reader.identity()
    if not BrokerIdentity(row.broker_id, "").contradicts(identity):
        return
    with transaction(engine) as connection:
        for error in _strangers(connection, [row], identity).values():
            raise error
