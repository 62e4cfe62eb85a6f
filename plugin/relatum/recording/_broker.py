"""Which broker streams are recorded from: another one's stream of the same name is not recorded. See docs/adr/0043."""

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final
from uuid import UUID

import sqlalchemy as sa

from relatum.errors import AccessRefused, NotFound, ReadTimeout, RelatumError, StreamUnavailable
from relatum.reading import (
    Agreement,
    BrokerIdentity,
    Position,
    StreamReader,
    agreement,
    another_broker,
    claimed_identity,
)
from relatum.store.catalog import StreamRow
from relatum.store.coverage import coverage_of, last_position
from relatum.store.database import sql
from relatum.store.members import RECORDERS
from relatum.store.translation import translated_errors

UNKNOWN_S: Final = 60.0
"""Seconds after which a broker whose id could not be told is asked again."""

_ADOPT: Final = """
    UPDATE relatum.streams SET broker_id = :broker_id::uuid
    WHERE stream_id = :stream_id::integer AND broker_id IS NOT DISTINCT FROM :before::uuid"""

_ADOPT_KNOWN: Final = sql(_ADOPT)
_ADOPT_UNHELD: Final = sql(f"{_ADOPT} AND NOT {RECORDERS.is_held}")

_OF_OTHERS: Final = sql("""
    SELECT s.name, b.broker_id, b.cluster_name
    FROM relatum.streams s JOIN relatum.brokers b ON b.broker_id = s.broker_id
    WHERE s.stream_id = ANY (:stream_ids::integer[]) AND b.broker_id IS DISTINCT FROM :broker_id::uuid""")

_NOTE_BROKER: Final = sql("""
    INSERT INTO relatum.brokers AS b (broker_id, cluster_name) VALUES (:broker_id::uuid, :cluster_name::text)
    ON CONFLICT (broker_id) DO UPDATE SET cluster_name = excluded.cluster_name
    WHERE b.cluster_name <> excluded.cluster_name""")


class OwnBroker:
    """The broker that a recorder reads from. Threads may share it."""

    def __init__(self) -> None:
        self.identity = BrokerIdentity(None, "")
        self._ask_at = 0.0
        self._asking = threading.Lock()

    def ask(self, reader: StreamReader) -> BrokerIdentity:
        """Which broker it is, once it is known without asking again. Where nobody can tell now it is unknown."""
        with self._asking:
            if self.identity.broker_id is None and time.monotonic() >= self._ask_at:
                with suppress(StreamUnavailable, ReadTimeout):
                    self.ask_anew(reader)
                self._ask_at = time.monotonic() + UNKNOWN_S
            return self.identity

    def ask_anew(self, reader: StreamReader) -> None:
        """See whether it still is the same: another one may have taken its address."""
        self.identity = claimed_identity(reader)

    def is_not_of(self, broker_id: UUID | None) -> bool:
        """Whether a stream with that broker's id is known to be another broker's."""
        return BrokerIdentity(broker_id, "").contradicts(self.identity)


def adopt(
    engine: sa.Engine, reader: StreamReader, rows: Iterable[StreamRow], identity: BrokerIdentity
) -> dict[str, RelatumError]:
    """Note whose the streams are: those of which it is not known, and another broker's whose very messages are here.

    A broker that lost its id, or is a copy of another one, has them. What has no messages recorded is anybody's.
    """
    others = [row for row in rows if row.broker_id != identity.broker_id]
    if identity.broker_id is None or not others:
        return {}
    with translated_errors(), engine.begin() as connection:
        ranges = coverage_of(connection, [row.stream_id for row in others])
    known = {row: last_position([each for each in ranges if each.stream_id == row.stream_id]) for row in others}
    ours: list[StreamRow] = []
    unknown: dict[str, RelatumError] = {}
    for row, position in known.items():
        try:
            if position is None or _is_here(reader, row, position):
                ours.append(row)
        except StreamUnavailable as error:
            unknown[row.name] = error
    with translated_errors(), engine.begin() as connection:
        note_broker(connection, identity)
        for row in ours:
            # Where nothing is recorded of it, somebody may be about to.
            is_new = known[row] is None and row.broker_id is not None
            adopted = {"stream_id": row.stream_id, "before": row.broker_id, "broker_id": identity.broker_id}
            connection.execute(_ADOPT_UNHELD if is_new else _ADOPT_KNOWN, adopted)
        return _strangers(connection, others, identity) | unknown


def _is_here(reader: StreamReader, row: StreamRow, position: Position) -> bool:
    """Whether the message that was recorded last is in this broker's stream."""
    found = None
    with suppress(NotFound, AccessRefused):
        found = agreement(reader, row.name, position)
    if found is Agreement.UNKNOWN and row.broker_id is not None:
        message = f"whether {row.name!r} is the stream that was recorded cannot be told now: its leader does not answer"
        raise StreamUnavailable(message, stream=row.name)
    # Without the time of its chunk it could be the same message, published to both brokers.
    return found is Agreement.SAME and (row.broker_id is None or position.chunk_ms is not None)


def _strangers(
    connection: sa.Connection, rows: Sequence[StreamRow], identity: BrokerIdentity
) -> dict[str, RelatumError]:
    """Those of the streams that are another broker's now, each with the error that says so."""
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
    """See that a stream is this broker's, for who is about to compare or fill it. Nothing is written.

    `identity`: The broker; None asks it, where the stream is known to be of one.
    """
    if row.broker_id is None:
        return
    identity = identity or reader.identity()
    if not BrokerIdentity(row.broker_id, "").contradicts(identity):
        return
    with translated_errors(), engine.begin() as connection:
        position = last_position(coverage_of(connection, [row.stream_id]))
        found = _strangers(connection, [row], identity)
    if found and (position is None or not _is_here(reader, row, position)):
        raise found[row.name]
