"""The store of a collector that keeps nothing: for tests and throw-away use."""

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from uuid import UUID

from relatum.collecting._ports import Advance, Entry, Followed, Result, Stored
from relatum.errors import ConfigurationError, Conflict
from relatum.ids import MessageId
from relatum.outcomes import Outcome, OutcomeStatus, least_advanced, unknown

if TYPE_CHECKING:
    import sqlalchemy as sa

FINISHED_MAX: Final = 100_000
"""Final outcomes kept; the oldest are forgotten first."""


class MemoryStore:
    """Keeps states in this process alone: it has one member, and nothing outlives it. Thread-safe.

    Args:
        name: The collector's name.
        finished_max: Final outcomes kept.
    """

    def __init__(self, name: str, finished_max: int = FINISHED_MAX) -> None:
        self.name = name
        self.server = ""
        self._finished_max = finished_max
        self._lock = threading.Lock()
        self._records: dict[MessageId, Outcome] = {}
        self._places: dict[str, list[MessageId]] = {}
        self._finished: dict[MessageId, None] = {}
        self._positions: dict[str, Followed] = {}

    def open(self, types: Collection[str], lease_s: float) -> int:
        """The one member's id."""
        return 1

    def renew(self, member: int) -> bool:
        """Nobody else could mind."""
        return True

    def close(self, member: int) -> None:
        """Nobody is there to take over."""

    def follow(self, member: int, stream: str, initial: int) -> Followed | None:
        """The position to go on from."""
        with self._lock:
            is_new = stream not in self._positions
            return replace(self._positions.setdefault(stream, Followed(initial)), is_new=is_new)

    def held(self, member: int) -> frozenset[str]:
        """None: there is no other member."""
        return frozenset()

    def begin_anew(self, member: int, stream: str, initial: int) -> None:
        """Forget what is known of the stream."""
        self._go_on(stream, -1, initial)

    def last_collected(self, stream: str, until: int) -> tuple[int, str] | None:
        """The last message up to an offset that is remembered."""
        with self._lock:
            offsets = [place.offset for place in self._records if place.stream == stream and place.offset <= until]
            if not offsets:
                return None
            return max(offsets), self._records[MessageId(stream, max(offsets))].message_id

    def cut_back(self, member: int, stream: str, behind: int) -> None:
        """Forget what lay behind an offset."""
        self._go_on(stream, behind, behind + 1)

    def _go_on(self, stream: str, behind: int, next_offset: int) -> None:
        with self._lock:
            for place in [place for place in self._records if place.stream == stream and place.offset > behind]:
                self._drop(place)
            self._positions[stream] = Followed(next_offset)

    def unfollow(self, member: int, stream: str) -> None:
        """Nobody else follows."""

    def add(self, member: int, entries: Sequence[Entry], advance: Advance | None = None) -> Stored:
        """Keep messages as collected, and move the position."""
        now = datetime.now(UTC)
        with self._lock:
            if advance is not None:
                followed = self._positions.get(advance.stream)
                if followed is None or followed.next_offset != advance.from_offset:
                    raise Conflict(f"the position of {advance.stream!r} is not {advance.from_offset}")
                self._positions[advance.stream] = Followed(advance.to_offset, advance.known_by or followed.known_by)
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
        self._records[entry.place] = outcome
        self._places.setdefault(entry.message_id, []).append(entry.place)

    def forward(self, member: int, bulk_id: int, places: Collection[MessageId]) -> Stored:
        """Note another attempt."""
        now = datetime.now(UTC)
        with self._lock:
            for place in places:
                known = self._records[place]
                self._records[place] = replace(
                    known, status=OutcomeStatus.FORWARDED, attempts=known.attempts + 1, forwarded_at=now
                )
        return Stored(frozenset(places), now)

    def finish(
        self, member: int, bulk_id: int, results: Sequence[Result], *, connection: "sa.Connection | None" = None
    ) -> Stored:
        """Keep what an attempt came to."""
        now = datetime.now(UTC)
        with self._lock:
            for result in results:
                known, finished_at = self._records[result.place], now if result.status.is_final else None
                self._records[result.place] = replace(
                    known, status=result.status, reason=result.reason, finished_at=finished_at
                )
                if finished_at is not None:
                    self._finished[result.place] = None
            self._forget()
        return Stored(frozenset(result.place for result in results), now)

    def _forget(self) -> None:
        """Drop the oldest final outcomes beyond what is kept."""
        while len(self._finished) > self._finished_max:
            self._drop(next(iter(self._finished)))

    def _drop(self, place: MessageId) -> None:
        self._finished.pop(place, None)
        message_id = self._records.pop(place).message_id
        self._places[message_id].remove(place)
        if not self._places[message_id]:
            del self._places[message_id]

    def give_back(self, member: int, places: Collection[MessageId]) -> bool:
        """Nobody else would have them."""
        return False

    def came_through(self, token: UUID) -> bool:
        """No answer is ever lost.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("a collector in memory has no transaction whose commit could be in doubt")

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
                message_id: [self._records[place] for place in self._places.get(message_id, ())]
                for message_id in message_ids
            }
        return {
            message_id: least_advanced(outcomes) if outcomes else unknown(message_id)
            for message_id, outcomes in found.items()
        }

    def end_in(self, seconds: float) -> None:
        """Nothing is waited for."""

    def dispose(self) -> None:
        """Nothing is held."""
