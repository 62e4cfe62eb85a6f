"""How a consumer learns of groups: each recorded part of its streams is looked at once, by the first member there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from relatum.limits import INTEGER_MAX
from relatum.store.coverage import CoverageRow, Range, merged, missing
from relatum.store.database import sql
from relatum_consumer.groups._assembly import Assembled, Member, assemble, in_arrival
from relatum_consumer.groups._consumer import SharedConsumer, scanned_of
from relatum_consumer.groups._finding import rows_between
from relatum_consumer.groups._view import View, group_key
from relatum_consumer.lookups.catalog import Catalog, PresentStream
from relatum_consumer.lookups.proof import coverage_by_stream

WINDOW_OFFSETS_MIN: Final = 1_000
"""Offsets of the smallest window: where each message is one of a group of its own, a thousand groups are looked at."""

WINDOW_OFFSETS_MAX: Final = 1_000_000
"""Offsets of the largest window, for streams in which few messages are in groups."""

WINDOW_ROWS: Final = 4_000
"""Rows a window is to have; the next is made larger or smaller accordingly."""

GROUPS_AT_ONCE: Final = 500
"""Groups whose rows are asked for in one statement, and held until it is clear what each of them is."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a stream that is recorded and not scanned.

    Attributes:
        stream_id: The stream.
        coverage_id: The range of the coverage it is in; that must still be there when it counts as scanned.
        grows: The beginning of the scanned range that ends where this begins; where there is none, its own beginning.
        start: Its first offset.
        stop: The offset behind it.
    """

    stream_id: int
    coverage_id: int
    grows: int
    start: int
    stop: int


def stretches(rows: Iterable[CoverageRow], scanned: Sequence[Range], key_id: int, low: int = 0) -> list[Stretch]:
    """What of one stream is recorded for a key, from an offset on, and not scanned yet; in the order of offsets."""
    known = merged(scanned)
    ends = {stop: start for start, stop in scanned}
    found = []
    for row in rows:
        if row.holds(key_id):
            for start, stop in missing((max(row.from_offset, low), row.to_offset), known):
                found.append(Stretch(row.stream_id, row.coverage_id, ends.get(start, start), start, stop))
    return found


def _upsert(where: str) -> str:
    """Write groups down. They only ever go forward: a member with older rows cannot take back what another found.

    What became of a group whose first message lay in a stream that was declared again, and so is none of `present`,
    says nothing of a group in the new one.
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


# What must happen together is one statement, which is one round trip and commits by itself: a window counts as scanned
# in the statement that writes down the groups it touched, and only if nobody else scanned it first. So a member that
# dies between two statements leaves nothing half done.
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
"""Counts a window as scanned and writes down its groups: one row, the number of windows counted, 1 or 0.

`moved` is the scanned range that grew: a new one, or the one that ended where the window begins. Nothing is written
where another member has scanned from `expected` on, or where the range of the coverage `coverage_id` that the window
was read from is not there any more, as after a stream has lost its tail.
"""

WRITE_DOWN_AGAIN: Final = sql(_upsert(""))
"""Writes down groups outside any window; their ids."""


class Scanner:
    """Scans what is recorded and was not scanned by any member."""

    def __init__(self, catalog: Catalog, consumer: SharedConsumer) -> None:
        self._catalog = catalog
        self._consumer = consumer
        self._width = WINDOW_ROWS
        self._view = View.of_table(catalog.servers, 0, ())
        self._stream_ids: dict[str, int] = {}
        self._by_offset = False

    @property
    def present(self) -> Mapping[int, str]:
        """The streams read, as they were at the last look: names by number."""
        return self._view.stream_ids

    def run(self) -> bool:
        """Scan up to where the streams are recorded now; whether there was anything."""
        present = self._look()
        rows = coverage_by_stream(self._catalog.servers, present)
        scanned = scanned_of(self._catalog.servers, self._consumer, self._view.stream_ids)
        is_any = False
        for stream in present:
            low = self._consumer.low(stream.stream_id)
            of_stream = rows.get(stream.stream_id, [])
            for stretch in stretches(of_stream, scanned.get(stream.stream_id, []), self._view.key_id, low):
                is_any = True
                if not self._scan(stream.name, stretch):
                    break  # Another member did; what is left shows at the next look.
        return is_any

    def groups(self, group_ids: Iterable[str]) -> dict[str, Assembled]:
        """Groups as their rows show them now; one of which there are none is incomplete."""
        ids = sorted(set(group_ids))
        found: dict[str, Assembled] = {}
        for at in range(0, len(ids), GROUPS_AT_ONCE):
            part = ids[at : at + GROUPS_AT_ONCE]
            members = self._view.members_of(part)
            for group_id in part:
                found[group_id] = assemble(group_id, members.get(group_id, ()), self._consumer.order)
        return found

    def write_down_again(self, group_ids: Iterable[str]) -> None:
        """Write down what groups are now, outside any window: where what was written may be older."""
        noted = Noted()
        self._note(noted, self.groups(group_ids))
        self._catalog.servers.rows(WRITE_DOWN_AGAIN, self._parameters(noted))

    def _look(self) -> list[PresentStream]:
        key_id = group_key(self._catalog)
        names = self._consumer.names
        self._catalog.check_names(names)
        present = self._catalog.streams(names)
        # What is not recorded yet is not in the table; what is, counts up to wherever it is recorded by then.
        self._view = View.of_table(self._catalog.servers, key_id, present)
        self._stream_ids = {stream.name: stream.stream_id for stream in present}
        self._by_offset = names is not None and len(names) == 1 and names[0] in self._stream_ids
        return present

    def _scan(self, stream: str, stretch: Stretch) -> bool:
        """Scan a stretch, window after window; False where another member was first."""
        at = stretch.start
        while at < stretch.stop:
            to = min(stretch.stop, at + self._width)
            rows = rows_between(self._view, stream, at, to, firsts_only=False)
            touched = {member.membership.group_id for member in rows}
            noted = Noted()
            ids = sorted(touched)
            for first in range(0, len(ids), GROUPS_AT_ONCE):
                self._note(noted, self.groups(ids[first : first + GROUPS_AT_ONCE]))
            window = {"from_offset": stretch.grows, "expected": at, "to_offset": to}
            source = {"stream_id": stretch.stream_id, "coverage_id": stretch.coverage_id}
            ((counted,),) = self._catalog.servers.rows(
                WRITE_DOWN,
                {**self._parameters(noted), **window, **source, "outside": noted.outside},
            )
            if not counted:
                return False
            self._width = next_width(self._width, len(rows), is_full=to - at == self._width)
            at = to
        return True

    def _note(self, noted: "Noted", groups: Mapping[str, Assembled]) -> None:
        for group_id, group in groups.items():
            arrived = in_arrival((*group.members, *group.duplicates))
            if not arrived:
                continue
            first = group.head or arrived[0]
            stream_id = self._stream_ids[first.stream]
            if group.head is not None and not self._consumer.admits(group.head, stream_id):
                noted.outside.append(group_id)
                continue
            state = "ready" if group.is_complete else "open"
            noted.rows.append((self._rank(first), first.offset, stream_id, state, group_id))

    def _rank(self, first: Member) -> int:
        if self._by_offset:
            return first.offset
        return INTEGER_MAX if first.time_us is None else first.time_us

    def _parameters(self, noted: "Noted") -> dict[str, object]:
        known = {"consumer_id": self._consumer.consumer_id, "present": list(self._view.stream_ids)}
        return known | noted.columns


@dataclass(frozen=True, slots=True)
class Noted:
    """What is to be written down of groups."""

    rows: list[tuple[int, int, int, str, str]] = field(default_factory=list)
    """Rank, first offset, stream id, state and id of each group."""
    outside: list[str] = field(default_factory=list)
    """Groups that stand before the consumer's start."""

    @property
    def columns(self) -> dict[str, object]:
        """The rows as a statement takes them."""
        names = ("ranks", "first_offsets", "stream_ids", "states", "group_ids")
        return {name: [row[at] for row in self.rows] for at, name in enumerate(names)}


def next_width(width: int, rows: int, *, is_full: bool) -> int:
    """How many offsets the next window has, after one of so many with so many rows."""
    if rows > 2 * WINDOW_ROWS:
        return max(WINDOW_OFFSETS_MIN, width // 2)
    if is_full and 2 * rows < WINDOW_ROWS:
        return min(WINDOW_OFFSETS_MAX, 2 * width)
    return width
