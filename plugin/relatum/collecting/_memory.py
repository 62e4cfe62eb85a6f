"""The store of a collector that keeps nothing: for tests and throw-away use."""

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from relatum._ids import MessageId
from relatum.collecting._outcome import Outcome, OutcomeStatus
from relatum.collecting._ports import Advance, Entry, Result, Stored, least_advanced, unknown
from relatum.errors import ConfigurationError, Conflict

if TYPE_CHECKING:
    import sqlalchemy as sa

FINISHED_MAX: Final = 100_000
"""Final outcomes kept; the oldest are forgotten first."""


@dataclass(slots=True)
class _Record:
    outcome: Outcome
    bulk_id: str | None = None


class MemoryStore:
    """Keeps states in this process alone: it has one member, and nothing outlives it. Thread-safe.

    Args:
        name: The collector's name.
        finished_max: Final outcomes kept.
    """

    def __init__(self, name: str, finished_max: int = FINISHED_MAX) -> None:
        self.name = name
        self._finished_max = finished_max
        self._lock = threading.Lock()
        self._records: dict[MessageId, _Record] = {}
        self._places: dict[str, list[MessageId]] = {}
        self._finished: dict[MessageId, None] = {}
        self._positions: dict[str, int] = {}

    def open(self, lease_s: float) -> int:
        """The one member's id."""
        return 1

    def renew(self, member: int) -> bool:
        """Nobody else could mind."""
        return True

    def close(self, member: int) -> None:
        """Nobody is there to take over."""

    def follow(self, member: int, stream: str, initial: int) -> int | None:
        """The position to go on from."""
        with self._lock:
            return self._positions.setdefault(stream, initial)

    def unfollow(self, member: int, stream: str) -> None:
        """Nobody else follows."""

    def add(self, member: int, entries: Sequence[Entry], advance: Advance | None = None) -> Stored:
        """Keep messages as collected, and move the position."""
        now = datetime.now(UTC)
        with self._lock:
            if advance is not None:
                if self._positions.get(advance.stream) != advance.from_offset:
                    raise Conflict(f"the position of {advance.stream!r} is not {advance.from_offset}")
                self._positions[advance.stream] = advance.to_offset
            new = [entry for entry in entries if entry.place not in self._records]
            for entry in new:
                self._keep(entry, now)
        return Stored(frozenset(entry.place for entry in new), now)

    def _keep(self, entry: Entry, now: datetime) -> None:
        outcome = Outcome(
            entry.message_id,
            OutcomeStatus.COLLECTED,
            self.name,
            entry.type,
            entry.place.stream,
            entry.place.offset,
            collected_at=now,
        )
        self._records[entry.place] = _Record(outcome)
        self._places.setdefault(entry.message_id, []).append(entry.place)

    def forward(self, member: int, bulk_id: str, places: Collection[MessageId]) -> Stored:
        """Note another attempt."""
        now = datetime.now(UTC)
        with self._lock:
            for place in places:
                record = self._records[place]
                record.bulk_id = bulk_id
                record.outcome = replace(
                    record.outcome,
                    status=OutcomeStatus.FORWARDED,
                    attempts=record.outcome.attempts + 1,
                    forwarded_at=now,
                )
        return Stored(frozenset(places), now)

    def finish(
        self, member: int, bulk_id: str, results: Sequence[Result], *, connection: "sa.Connection | None" = None
    ) -> Stored:
        """Keep what an attempt came to."""
        now = datetime.now(UTC)
        with self._lock:
            for result in results:
                record = self._records[result.place]
                finished_at = now if result.status.is_final else None
                record.outcome = replace(
                    record.outcome, status=result.status, reason=result.reason, finished_at=finished_at
                )
                if finished_at is not None:
                    self._finished[result.place] = None
            self._forget()
        return Stored(frozenset(result.place for result in results), now)

    def _forget(self) -> None:
        """Drop the oldest final outcomes beyond what is kept."""
        while len(self._finished) > self._finished_max:
            place = next(iter(self._finished))
            del self._finished[place]
            message_id = self._records.pop(place).outcome.message_id
            self._places[message_id].remove(place)
            if not self._places[message_id]:
                del self._places[message_id]

    def transaction(self) -> "AbstractContextManager[sa.Connection]":
        """There is none.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("a collector in memory has no transaction to join: give it a database")

    def take_over(self, member: int, types: Collection[str], entries_max: int) -> list[Entry]:
        """Nothing: there is no other member."""
        return []

    def outcomes_of(self, message_ids: Collection[str]) -> Mapping[str, Outcome]:
        """The outcome of each id."""
        with self._lock:
            found = {
                message_id: [self._records[place].outcome for place in self._places.get(message_id, ())]
                for message_id in message_ids
            }
        return {
            message_id: least_advanced(outcomes) if outcomes else unknown(message_id)
            for message_id, outcomes in found.items()
        }

    def dispose(self) -> None:
        """Nothing is held."""
