"""The broker that a stream is recorded from. Another broker's stream of that name is refused. See docs/adr/0043."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from uuid import UUID

import sqlalchemy as sa

from relatum.errors import ReadTimeout, RelatumError, StreamUnavailable
from relatum.reading import BrokerIdentity, StreamReader, another_broker, claimed_identity, concerns_broker
from relatum.recording.tails import cut_back_or_replace
from relatum.store.catalog import StreamRow, ensure_streams, streams_named
from relatum.store.database import sql, transaction
from relatum.store.members import RECORDERS

if TYPE_CHECKING:
    from relatum.recording.stream_recording import StreamRecording

UNKNOWN_S: Final = 60.0
"""Seconds between two queries for the broker's id while it is unknown."""

_ADOPT: Final = sql(f"""
    UPDATE relatum.streams SET broker_id = :broker_id::uuid
    WHERE stream_id = ANY (:stream_ids::integer[]) AND (broker_id IS NULL
        OR broker_id <> :broker_id::uuid AND NOT {RECORDERS.is_held} AND NOT EXISTS (
            SELECT FROM relatum.coverage c WHERE c.stream_id = streams.stream_id AND c.last_offset IS NOT NULL))""")
"""Assigns a stream to a broker if its broker is unknown, or if no message is recorded and no recorder holds it."""

_OF_OTHERS: Final = sql("""
    SELECT s.name, b.broker_id, b.cluster_name
    FROM relatum.streams s JOIN relatum.brokers b ON b.broker_id = s.broker_id
    WHERE s.stream_id = ANY (:stream_ids::integer[]) AND b.broker_id IS DISTINCT FROM :broker_id::uuid""")

_STORE_BROKER: Final = sql("""
    INSERT INTO relatum.brokers AS b (broker_id, cluster_name) VALUES (:broker_id::uuid, :cluster_name::text)
    ON CONFLICT (broker_id) DO UPDATE SET cluster_name = excluded.cluster_name
    WHERE b.cluster_name <> excluded.cluster_name""")


class OwnBroker:
    """The broker that a recorder reads from, and the streams that belong to it. Thread-safe.

    All methods except `is_other` block.
    """

    def __init__(self, engine: sa.Engine, vhost: str, reader: StreamReader) -> None:
        self._engine = engine
        self._vhost = vhost
        self._reader = reader
        self._identity = BrokerIdentity(None, "")
        self._query_at = 0.0

    def is_other(self, broker_id: UUID | None) -> bool:
        """Return whether a broker id is known to be another broker's."""
        return BrokerIdentity(broker_id, "").contradicts(self._identity)

    def find(self, streams: Sequence["StreamRecording"]) -> dict["StreamRecording", StreamRow | RelatumError | None]:
        """Return the rows of streams, or an error for a stream of another broker.

        A missing row is added if the broker has confirmed that the stream exists; otherwise None is returned for it.
        """
        existing = {row.name for row in self._rows([each.name for each in streams])}
        known = {each.name: each.super_stream for each in streams if each.is_confirmed or each.name in existing}
        with transaction(self._engine) as connection:
            rows = ensure_streams(connection, self._vhost, known)
        unconfirmed = [row for row in rows if row.broker_id is None or row.broker_id != self._identity.broker_id]
        others: dict[str, RelatumError] = {}
        if unconfirmed:
            others = self._errors_of_others(unconfirmed)
            rows = self._rows(list(known))
        found = {row.name: row for row in rows} | others
        return {each: found.get(each.name) for each in streams}

    def check(self, names: Sequence[str]) -> None:
        """Raise if all streams belong to another broker."""
        others = self._errors_of_others(self._rows(names))
        if others and len(others) == len(names):
            raise next(iter(others.values()))

    def is_stream_of(self, row: StreamRow) -> bool:
        """Return whether a changed stream still belongs to its row. If it lost its end, cut the table back."""
        # Another broker may have this address now.
        self._identity = claimed_identity(self._reader)
        return not self.is_other(row.broker_id) and cut_back_or_replace(self._engine, self._reader, row)

    def _rows(self, names: Sequence[str]) -> list[StreamRow]:
        with transaction(self._engine) as connection:
            return streams_named(connection, self._vhost, names, partitions=False)

    def _errors_of_others(self, rows: Sequence[StreamRow]) -> dict[str, RelatumError]:
        if self._identity.broker_id is None and time.monotonic() >= self._query_at:
            with suppress(StreamUnavailable, ReadTimeout):
                self._identity = claimed_identity(self._reader)
            self._query_at = time.monotonic() + UNKNOWN_S
        identity = self._identity
        if identity.broker_id is None:
            return {}
        adopted = {"stream_ids": [row.stream_id for row in rows], "broker_id": identity.broker_id}
        with transaction(self._engine) as connection:
            connection.execute(_STORE_BROKER, {"broker_id": identity.broker_id, "cluster_name": identity.cluster_name})
            connection.execute(_ADOPT, adopted)
            return _other_broker_errors(connection, rows, identity)


def _other_broker_errors(
    connection: sa.Connection, rows: Sequence[StreamRow], identity: BrokerIdentity
) -> dict[str, RelatumError]:
    """Return errors for the streams of another broker, by name."""
    wanted = {"stream_ids": [row.stream_id for row in rows], "broker_id": identity.broker_id}
    return {
        name: another_broker(name, BrokerIdentity(broker_id, cluster_name), identity)
        for name, broker_id, cluster_name in connection.execute(_OF_OTHERS, wanted)
    }


def errors_of_others(engine: sa.Engine, reader: StreamReader, rows: Sequence[StreamRow]) -> dict[str, RelatumError]:
    """Return `AnotherBroker` for each stream of another broker, by name. Writes nothing.

    If the broker's identity cannot be read now, the streams that belong to some broker get that error instead.
    """
    owned = [row for row in rows if row.broker_id is not None]
    if not owned:
        return {}
    try:
        identity = reader.identity()
    except RelatumError as error:
        if concerns_broker(error):
            raise
        return {row.name: error for row in owned}
    if identity.broker_id is None:
        return {}
    with transaction(engine) as connection:
        return _other_broker_errors(connection, owned, identity)


def check_broker(engine: sa.Engine, reader: StreamReader, row: StreamRow) -> None:
    """Raise the error of `errors_of_others` for a stream."""
    for error in errors_of_others(engine, reader, [row]).values():
        raise error
