"""A collector's row, its members, and the rows of the streams they follow: where each transaction begins."""

import threading
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from relatum.collecting import _member_statements as statements
from relatum.collecting._bulk import Advance
from relatum.errors import Conflict


class CollectorSources:
    """Which row the collector has, and each of its streams. Thread-safe."""

    def __init__(self, name: str, vhost: str, keep_s: int | None) -> None:
        self.name = name
        self.vhost = vhost
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._collector: int | None = None
        self._ids: dict[str, int] = {}

    def collector_id(self, connection: sa.Connection) -> int:
        """The collector's row, made where it is not there."""
        if self._collector is None:
            self._collector = self.ensure(connection)
        return self._collector

    def ensure(self, connection: sa.Connection) -> int:
        """As `collector_id`; and the last member that joins decides for how long messages are remembered."""
        named = {"of_vhost": self.vhost, "named": self.name}
        row = connection.execute(statements.find_collector, named).one_or_none()
        if row is None:
            connection.execute(statements.add_collector, {**named, "kept_s": self._keep_s})
            row = connection.execute(statements.find_collector, named).one()
        if row.keep_s != self._keep_s:
            connection.execute(statements.set_keep, {"in_collector": row.collector_id, "kept_s": self._keep_s})
        return int(row.collector_id)

    def lock(self, connection: sa.Connection, stream: str) -> Any:
        """The stream's row, made where it is not there, for us alone until the transaction ends."""
        named = {"in_collector": self.collector_id(connection), "of_stream": stream}
        row = connection.execute(statements.lock_source, named).one_or_none()
        if row is None:
            connection.execute(
                statements.add_source, {"in_collector": self.collector_id(connection), "of_stream": stream}
            )
            row = connection.execute(statements.lock_source, named).one()
        return row

    def hold(self, connection: sa.Connection, member: int) -> datetime:
        """Keep the member from being removed until the transaction ends; gives the transaction's time."""
        at: datetime | None = connection.execute(statements.hold_member, {"of_member": member}).scalar_one_or_none()
        if at is None:
            raise Conflict(f"member {member} of {self.name!r} is gone: others took over what it had")
        return at

    def ids(self, connection: sa.Connection, streams: Collection[str]) -> dict[str, int]:
        """The ids of the streams' present rows, made where they are not there."""
        if not streams:
            return {}
        collector = self.collector_id(connection)
        query = {"in_collector": collector, "streams": sorted(streams)}
        found = _source_ids(connection, query)
        if missing := streams - found.keys():
            for stream in sorted(missing):
                connection.execute(statements.add_source, {"in_collector": collector, "of_stream": stream})
            found = _source_ids(connection, query)
        return found

    def known(self, connection: sa.Connection, streams: Collection[str]) -> dict[str, int]:
        """The ids of rows that messages of ours were added or taken over with."""
        with self._lock:
            known = {stream: self._ids[stream] for stream in streams if stream in self._ids}
        return known if len(known) == len(streams) else known | self.ids(connection, set(streams) - known.keys())

    def remember(self, sources: Mapping[str, int]) -> None:
        """Know the rows of streams from now on."""
        with self._lock:
            self._ids.update(sources)

    def advance(self, connection: sa.Connection, member: int, advance: Advance) -> tuple[bool, int]:
        """Move the position by compare-and-set; False where this very call has done so before. And the stream's row."""
        known = advance.known_by
        moved = connection.execute(
            statements.advance,
            {
                "in_collector": self.collector_id(connection),
                "of_stream": advance.stream,
                "of_member": member,
                "passed_over_types": sorted(advance.passed_over_types),
                "expected": advance.from_offset,
                "to": advance.to_offset,
                "more_passed_over": advance.passed_over,
                "is_known": known is not None,
                "known_offset": known and known.offset,
                "known_fingerprint": known and known.fingerprint,
                "known_chunk_ms": known and known.chunk_ms,
            },
        )
        moved_id = moved.scalar_one_or_none()
        if moved_id is not None:
            return True, moved_id
        source = self.lock(connection, advance.stream)
        if (source.member_id, source.position) == (member, advance.to_offset):
            return False, source.source_id
        raise Conflict(
            f"the position of {advance.stream!r} in {self.name!r} is not {advance.from_offset}, or another member "
            "follows the stream, or has executors of what would be passed over; nothing was written"
        )


def _source_ids(connection: sa.Connection, query: Mapping[str, Any]) -> dict[str, int]:
    return {row.stream: row.source_id for row in connection.execute(statements.find_sources, query)}
