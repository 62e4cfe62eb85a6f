"""How a consumer finds groups: each recorded part of its streams is scanned once, by the first member to reach it."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from relatum.limits import INTEGER_MAX
from relatum.store.coverage import CoverageRow, Range, merged, missing
from relatum.store.database import sql
from relatum_consumer.groups._assembly import Assembled, Member, assemble, in_arrival, named
from relatum_consumer.groups._consumer import SharedConsumer, scanned_of
from relatum_consumer.groups._view import View, group_key
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.proof import coverage_by_stream

WINDOW_OFFSETS: Final = 8_192
"""Offsets of a stream that are scanned at once. Each message may belong to another group, so one statement may store
as many groups. In a stream with few groups, a window takes a millisecond."""

GROUPS_AT_ONCE: Final = 500
"""Groups whose rows one statement returns, and which are held until each is assembled."""


@dataclass(frozen=True, slots=True)
class UnscannedRange:
    """A part of a stream that is recorded and not scanned.

    Attributes:
        stream_id: The stream.
        coverage_id: The range of the coverage that contains it, which must still exist when it is stored as scanned.
        grows: The start of the scanned range that ends where this part begins; if there is none, its own start.
        start: Its first offset.
        stop: The offset after its last.
    """

    stream_id: int
    coverage_id: int
    grows: int
    start: int
    stop: int


def unscanned_ranges(
    rows: Iterable[CoverageRow], scanned: Sequence[Range], key_id: int, low: int = 0
) -> list[UnscannedRange]:
    """Return the parts of a stream that are recorded for a key from an offset on and not scanned, ordered by offset."""
    known = merged(scanned)
    ends = {stop: start for start, stop in scanned}
    found = []
    for row in rows:
        if row.holds(key_id):
            for start, stop in missing((max(row.from_offset, low), row.to_offset), known):
                found.append(UnscannedRange(row.stream_id, row.coverage_id, ends.get(start, start), start, stop))
    return found


def _upsert(where: str) -> str:
    """Make the statement that stores groups. States only advance: a member with older rows cannot undo a newer state.

    A state is overwritten if the group's first message was in a stream that is not among `present`, since it was
    deleted or declared again.
    """
    return f"""
      INSERT INTO relatum.group_states (rank, first_offset, stream_id, state, group_id, consumer_id)
      SELECT wanted.*, :consumer_id::int
      FROM unnest(
        :ranks::bigint[], :first_offsets::bigint[], :stream_ids::int[], :states::text[], :group_ids::text[]
      ) AS wanted (rank, first_offset, stream_id, state, group_id)
      {where}
      ORDER BY wanted.group_id
      ON CONFLICT (consumer_id, group_id) DO UPDATE SET
        rank = excluded.rank, first_offset = excluded.first_offset, stream_id = excluded.stream_id,
        state = excluded.state, touched_at = clock_timestamp(), done_at = NULL, holder = NULL, lease_expires_at = NULL,
        given = 0
      WHERE group_states.state = 'open' OR NOT (group_states.stream_id = ANY (:present::int[]))
      RETURNING group_id
    """


# One statement is one round trip and one transaction. It stores a window as scanned together with the groups that the
# window touched, and only if no other member scanned it first. So a member that dies leaves nothing half done.
WRITE_DOWN: Final = sql(
    f"""
    WITH moved AS (
      INSERT INTO relatum.group_scans (from_offset, to_offset, consumer_id, stream_id)
      SELECT :from_offset::bigint, :to_offset::bigint, :consumer_id::int, :stream_id::int
      WHERE EXISTS (
          SELECT * FROM relatum.coverage
          WHERE coverage_id = :coverage_id::bigint AND to_offset >= :to_offset::bigint
        )
        AND EXISTS (SELECT * FROM relatum.group_consumers WHERE consumer_id = :consumer_id::int)
      ON CONFLICT (consumer_id, stream_id, from_offset) DO UPDATE SET to_offset = excluded.to_offset
      WHERE group_scans.to_offset = :expected::bigint
      RETURNING to_offset
    ), noted AS (
      {_upsert("WHERE EXISTS (SELECT * FROM moved)")}
    ), gone AS (
      DELETE FROM relatum.group_states
      WHERE consumer_id = :consumer_id::int AND group_id = ANY (:outside::text[]) AND state = 'open'
        AND EXISTS (SELECT * FROM moved)
      RETURNING group_id
    )
    SELECT count(*) FROM moved
    """
)
"""Stores a window as scanned, and its groups. Returns one row: the number of windows stored, 1 or 0.

`moved` is the scanned range that grew: a new one, or the one that ended where the window begins. Nothing is written if
another member has scanned from `expected` on, or if the range `coverage_id` of the coverage no longer contains the
window, as after a stream has lost its tail.
"""

WRITE_DOWN_AGAIN: Final = sql(_upsert(""))
"""Stores groups outside any window. Returns their ids."""


class Scanner:
    """Scans recorded messages that no member has scanned."""

    def __init__(self, catalog: Catalog, consumer: SharedConsumer) -> None:
        self._catalog = catalog
        self._servers = catalog.servers
        self._consumer = consumer
        self._view = View.of_table(catalog.servers, 0, ())
        self.scanned_at = -math.inf
        """When the last scan began, by `time.monotonic`."""

    def stream_of(self, stream_id: int) -> str | None:
        """Return the name of a stream as of the last scan; None if it is no longer read."""
        return next((name for name, number in self._view.numbers.items() if number == stream_id), None)

    def run(self) -> None:
        """Scan the streams up to the end of what is recorded now."""
        began = time.monotonic()
        key_id = group_key(self._catalog)
        self._catalog.check_names(self._consumer.names)
        present = self._catalog.streams(self._consumer.names)
        # Unrecorded messages are not in the table. Rows count up to whatever is recorded when they are queried.
        self._view = View.of_table(self._servers, key_id, present)
        rows = coverage_by_stream(self._servers, present)
        scanned = scanned_of(self._servers, self._consumer, self._view.numbers.values())
        for stream in present:
            number, low = stream.stream_id, self._consumer.low(stream.stream_id)
            for stretch in unscanned_ranges(rows.get(number, ()), scanned.get(number, ()), key_id, low):
                if not self._scan(stream.name, stretch):
                    break  # Another member was first. The next scan finds the rest.
        self.scanned_at = began

    def groups(self, group_ids: Iterable[str]) -> Iterator[Assembled]:
        """Yield each group once, from its present rows. A group without rows is incomplete."""
        ids = iter(sorted(set(group_ids)))
        while part := list(islice(ids, GROUPS_AT_ONCE)):
            members = self._view.members_of(part)
            for group_id in part:
                yield assemble(group_id, members.pop(group_id, ()), self._consumer.order)

    def write_down_again(self, group_id: str) -> None:
        """Store a group's present state outside any window, since the stored one may be outdated."""
        self._servers.rows(WRITE_DOWN_AGAIN, self._states([group_id]))

    def _scan(self, stream: str, stretch: UnscannedRange) -> bool:
        """Scan a stretch, window after window. False if another member was first."""
        for at in range(stretch.start, stretch.stop, WINDOW_OFFSETS):
            to = min(stretch.stop, at + WINDOW_OFFSETS)
            touched = self._view.between(stream, at, to)
            window = {"from_offset": stretch.grows, "expected": at, "to_offset": to}
            source = {"stream_id": stretch.stream_id, "coverage_id": stretch.coverage_id}
            states = self._states(member.group_id for member in touched)
            ((counted,),) = self._servers.rows(WRITE_DOWN, states | window | source)
            if not counted:
                return False
        return True

    def _states(self, group_ids: Iterable[str]) -> dict[str, object]:
        rows: list[tuple[int, int, int, str, str]] = []
        outside = []
        for group in self.groups(group_ids):
            if not group.rows:
                continue
            first = group.head or named(in_arrival(group.retained))[0]
            number = self._view.numbers[first.stream]
            if group.head is not None and not self._consumer.admits(first, number):
                outside.append(group.group_id)
            else:
                state = "ready" if group.is_complete else "open"
                rows.append((self._rank(first), first.offset, number, state, group.group_id))
        names = ("ranks", "first_offsets", "stream_ids", "states", "group_ids")
        columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
        mine = {"consumer_id": self._consumer.consumer_id, "present": list(self._view.numbers.values())}
        return columns | mine | {"outside": outside}

    def _rank(self, first: Member) -> int:
        if self._consumer.names == (first.stream,):
            return first.offset
        return INTEGER_MAX if first.time_us is None else first.time_us
