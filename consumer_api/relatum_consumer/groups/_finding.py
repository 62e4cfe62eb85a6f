"""Finds the groups that are complete now, groups that become complete later (`follow`), and a consumer's groups.

The members of a consumer share the scan: each newly recorded part of a stream is scanned once, by one member.
"""

import heapq
import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from relatum.common.limits import INTEGER_MAX
from relatum.errors import NotFound
from relatum.reading import StreamBounds
from relatum.store.coverage import CoverageRow, Range, covered, merged, missing
from relatum.store.database import sql
from relatum_consumer.groups._assembly import (
    GROUPS_AT_ONCE,
    Assembled,
    Clock,
    Member,
    Place,
    Row,
    View,
    assemble,
    group_key,
    in_arrival,
    present_view,
    stream_and_offset,
    warn_left_out,
)
from relatum_consumer.groups._consumer import SharedConsumer, scanned_of
from relatum_consumer.groups._options import BATCH_MESSAGES, GroupOptions, StartPosition
from relatum_consumer.groups._reading import Group, deliver
from relatum_consumer.lookups.answering import retry_if_replaced
from relatum_consumer.lookups.catalog import Catalog, PresentStream, replaced
from relatum_consumer.lookups.proof import all_ends, coverage_by_stream
from relatum_consumer.lookups.waiting import POLL_S_MAX, POLL_S_MIN, Pause

WINDOW_OFFSETS: Final = 131_072
"""Offsets of a stream in one query of its rows. A row takes about 200 bytes of memory."""

FIRST_GROUPS: Final = 64
"""Groups in the first query of members, while the size of groups is unknown."""


def whole_groups(catalog: Catalog, options: GroupOptions) -> Generator[Group | Pause, None, None]:
    """Yield each complete group once."""
    attempt = partial(present_view, catalog, options.names, complete=options.complete)
    view, known = retry_if_replaced(catalog, attempt, leaves_out=options.names is None)
    for batch in batches(view, options):
        yield from deliver(catalog.servers, batch, options)
    known.check_present(catalog, options.names, [view.key_id])
    if options.follow:
        yield from _completed_later(catalog, view, options)


def batches(view: View, options: GroupOptions) -> Iterator[list[Assembled]]:
    """Yield the present groups in their order, complete or not, in batches, each of which is read in one pass."""
    start_position = StartPosition.of(options.start)
    candidates = _candidates(view, options, start_position.offset)
    batch: list[Assembled] = []
    messages, mean = 0, BATCH_MESSAGES / FIRST_GROUPS
    while part := list(islice(candidates, min(GROUPS_AT_ONCE, max(1, int((BATCH_MESSAGES - messages) / mean))))):
        ids = dict.fromkeys(row[0] for row in part)
        groups = {group.group_id: group for group in view.groups(ids, options.order)}
        for row in part:
            group = groups[row[0]]
            # A group may have several candidates: it is added at the candidate that is its head.
            if group.head is None or stream_and_offset(group.head) != stream_and_offset(row):
                continue
            if start_position.admits(group.head):
                batch.append(group)
        found = max(len(part), sum(len(group.members) for group in groups.values()))
        mean = max(1.0, found / len(part))
        messages += found
        if messages >= BATCH_MESSAGES:
            yield batch
            batch, messages = [], 0
    yield batch


def _candidates(view: View, options: GroupOptions, start: int) -> Iterator[Row]:
    """Yield the rows that may be a group's head, in the order of arrival: in logical order, those with number 1."""
    clock, firsts_only = Clock(), options.order == "logical"

    def of_stream(stream: str) -> Iterator[tuple[Place, Row]]:
        begin = max(start, view.floors.get(stream, 0))
        for low, high in windows((max(begin, low), high) for low, high in view.seen[stream]):
            for row in view.between(stream, low, high, firsts_only=firsts_only):
                yield clock.place(row), row

    return (row for _, row in heapq.merge(*map(of_stream, sorted(view.seen))))


def windows(ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield the parts of ranges, each of at most `WINDOW_OFFSETS`."""
    for start, stop in ranges:
        for low in range(start, stop, WINDOW_OFFSETS):
            yield low, min(stop, low + WINDOW_OFFSETS)


class IdleBackoff:
    """Exponential backoff between two polls, and the idle timeout: `idle_s` seconds; None: no timeout."""

    def __init__(self, idle_s: float | None, longest_s: float = POLL_S_MAX) -> None:
        self._idle_s = math.inf if idle_s is None else idle_s
        self._longest_s = longest_s
        self.begin()

    def begin(self) -> None:
        """Restart both, because a group was found or the caller asks for the next one."""
        self._until, self._pause_s = time.monotonic() + self._idle_s, POLL_S_MIN

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def pause(self) -> Pause:
        pause = Pause(max(0.0, min(self._pause_s, self._until - time.monotonic())))
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        return pause


def _completed_later(catalog: Catalog, view: View, options: GroupOptions) -> Generator[Group | Pause, None, None]:
    """Yield groups as they become complete, each once, until the idle timeout has passed.

    A new message can complete any group. So for each newly recorded part of a stream, this queries the groups that have
    messages in it, and yields those that are complete with the part and were not without it. It stores no group states.
    """
    idle = IdleBackoff(options.idle_timeout_s)
    left_out: set[int] = set()
    while not idle.is_over:
        yield idle.pause()
        for stream, ranges in _newly_recorded(catalog, view, options, left_out):
            for window in windows(ranges):
                touched = view.between(stream, *window)
                view.seen[stream] = merged([*view.seen[stream], window])
                found = [group for _, group in sorted(_completed(view, touched, stream, window, options))]
                if found:
                    yield from deliver(catalog.servers, found, options)
                    idle.begin()


def _newly_recorded(
    catalog: Catalog, view: View, options: GroupOptions, left_out: set[int]
) -> list[tuple[str, list[Range]]]:
    """Return the streams' recorded ranges that the view has not seen; add new streams to the view."""
    catalog.check_in_force([view.key_id])
    present = catalog.streams(options.names)
    for stream in present:
        if view.numbers.get(stream.name, stream.stream_id) != stream.stream_id:
            raise replaced(stream.name, max((end for _, end in view.seen[stream.name]), default=0))
        if stream.name in view.numbers or stream.stream_id in left_out:
            continue
        bounds = all_ends(catalog.servers, [stream.name], is_named=options.names is not None)[stream.name]
        if isinstance(bounds, StreamBounds):
            first = bounds.first or 0
            view.numbers[stream.name] = stream.stream_id
            view.floors.setdefault(stream.name, first)
            view.seen.setdefault(stream.name, [(0, first)])
        else:
            left_out.add(stream.stream_id)
            if bounds is not None:
                warn_left_out(bounds)
    rows = coverage_by_stream(catalog.servers, present)
    return [
        (name, [gap for each in covered(rows.get(number, ()), view.key_id) for gap in missing(each, view.seen[name])])
        for name, number in sorted(view.numbers.items())
    ]


def _completed(
    view: View, touched: Iterable[Row], stream: str, window: Range, options: GroupOptions
) -> Iterator[tuple[Place, Assembled]]:
    """Yield the groups that are complete now, and were not without the stream's messages in the window."""
    start_position = StartPosition.of(options.start)
    for group in view.groups(dict.fromkeys(row[0] for row in touched), options.order):
        if group.was_complete and group.head is not None and start_position.admits(group.head):
            before = [row for row in group.members if row[3] != stream or not window[0] <= row[4] < window[1]]
            if not assemble(group.group_id, before).was_complete:
                yield Clock().place(group.head), group


SCAN_OFFSETS: Final = 8_192
"""Offsets of a stream in one window of a scan. If each message is of a different group, one statement stores as many
groups. In a stream with few groups, a window takes a millisecond."""


class UnscannedRange(NamedTuple):
    """A part of a stream, from `start` to before `stop`, that is recorded and not scanned.

    `coverage_id`: The coverage's row that contains it, and must still exist when it is stored as scanned. `grows`: The
    start of the scanned range that ends at `start` and is extended by this part; without one, `start`.
    """

    stream_id: int
    coverage_id: int
    grows: int
    start: int
    stop: int


def unscanned_ranges(
    rows: Iterable[CoverageRow], scanned: Sequence[Range], key_id: int, low: int = 0
) -> list[UnscannedRange]:
    """Return the parts of a stream, from `low` on, that are recorded for a key and not scanned, ordered by offset."""
    known = merged(scanned)
    ends = {stop: start for start, stop in scanned}
    found = []
    for row in rows:
        if row.holds(key_id):
            for start, stop in missing((max(row.from_offset, low), row.to_offset), known):
                found.append(UnscannedRange(row.stream_id, row.coverage_id, ends.get(start, start), start, stop))
    return found


def _upsert(where: str) -> str:
    """Return SQL that stores groups' states. It overwrites only the state "open", so states only advance.

    It overwrites any state of a group whose first message was in a stream that was declared again or forgotten since.
    The table says which: this member's view may be older than a stream in which another member has found the group.
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
      WHERE group_states.state = 'open' OR NOT EXISTS (
        SELECT * FROM relatum.streams s WHERE s.stream_id = group_states.stream_id AND s.replaced_at IS NULL
      )
      RETURNING group_id
    """


# One statement stores a window as scanned, together with the states of the groups that have messages in it, if no other
# member has scanned it. So a member that dies leaves no partial result.
STORE_WINDOW: Final = sql(f"""
    WITH moved AS (
      INSERT INTO relatum.group_scans (from_offset, to_offset, consumer_id, stream_id)
      SELECT :from_offset::bigint, :to_offset::bigint, :consumer_id::int, :stream_id::int
      WHERE EXISTS (
          SELECT * FROM relatum.coverage
          WHERE coverage_id = :coverage_id::bigint AND to_offset >= :to_offset::bigint
        )
        AND EXISTS (SELECT * FROM relatum.group_consumers WHERE consumer_id = :consumer_id::int)
        AND EXISTS (SELECT * FROM relatum.keys WHERE key_id = :key_id::smallint AND removed_at IS NULL)
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
    SELECT count(*), EXISTS (SELECT * FROM relatum.group_consumers WHERE consumer_id = :consumer_id::int) FROM moved""")
"""Stores a window as scanned, and the states of its groups. Returns the number of windows stored, 1 or 0, and whether
the consumer exists.

`moved` is the scanned range with the window: a new one, or the one that ended where the window begins. Nothing is
written if another member has scanned from `expected` on, if the coverage's row `coverage_id` no longer contains the
window, for example after a stream has lost its tail, or if the key was removed.
"""

STORE_STATES: Final = sql(_upsert(""))
"""Stores groups' states without a window. Returns the groups' ids."""


class Scanner:
    """Scans the recorded messages that no member has scanned."""

    def __init__(self, catalog: Catalog, consumer: SharedConsumer) -> None:
        self._catalog = catalog
        self._consumer = consumer
        self._view: View
        self.scanned_at = -math.inf
        """When the last scan began, by `time.monotonic`."""

    def refresh(self) -> Sequence[PresentStream]:
        """Read which streams are recorded now, for the view. It has no end: it includes all rows that exist."""
        key_id = group_key(self._catalog)
        # A window is scanned once, so the view must not leave out a stream: its groups would never be complete.
        present = self._catalog.streams(self._consumer.names, even_replaced=True)
        self._view = View.of_table(self._catalog.servers, key_id, present)
        return present

    def run(self) -> None:
        """Scan the streams up to the end of their recorded parts."""
        began = time.monotonic()
        self._catalog.check_names(self._consumer.names)
        present = self.refresh()
        rows = coverage_by_stream(self._catalog.servers, present)
        # A view that is older than the coverage may lack a stream with messages of the groups that are scanned.
        self.refresh()
        key_id = self._view.key_id
        scanned = scanned_of(self._catalog.servers, self._consumer, [stream.stream_id for stream in present])
        for stream in present:
            if self._view.numbers.get(stream.name) != stream.stream_id:
                continue  # The view lacks this stream, and what is scanned once is never scanned again.
            number, low = stream.stream_id, self._consumer.low(stream.stream_id)
            for unscanned in unscanned_ranges(rows.get(number, ()), scanned.get(number, ()), key_id, low):
                if not self._scan(stream.name, unscanned):
                    break  # Another member scans this stream; the next scan finds the rest.
        self.scanned_at = began

    def groups(self, group_ids: Iterable[str]) -> Iterator[Assembled]:
        """Yield each group once, assembled from its present rows, if any."""
        return self._view.groups(sorted(set(group_ids)), self._consumer.order)

    def store_state(self, group_id: str) -> None:
        """Store a group's present state, because the stored state may be outdated."""
        self._catalog.servers.rows(STORE_STATES, self._states([group_id]))

    def _scan(self, stream: str, unscanned: UnscannedRange) -> bool:
        """Scan a range, window after window. Returns False if another member was first; raises `NotFound`."""
        source = {"stream_id": unscanned.stream_id, "coverage_id": unscanned.coverage_id, "key_id": self._view.key_id}
        for start in range(unscanned.start, unscanned.stop, SCAN_OFFSETS):
            stop = min(unscanned.stop, start + SCAN_OFFSETS)
            touched = self._view.between(stream, start, stop)
            window = {"from_offset": unscanned.grows, "expected": start, "to_offset": stop}
            wanted = window | source | self._states(row[0] for row in touched)
            # It may wait for a repair, and must then see what that has changed.
            ((stored, exists),) = self._catalog.servers.rows(STORE_WINDOW, wanted, in_transaction=True)
            if not exists:
                name = self._consumer.name
                raise NotFound(f"the group consumer {name!r} was deleted: start its members again to create it")
            if not stored:
                return False
        return True

    def _states(self, group_ids: Iterable[str]) -> dict[str, object]:
        rows: list[tuple[int, int, int, str, str]] = []
        outside = []
        for group in self.groups(group_ids):
            if not group.rows:
                continue
            first = Member(*(group.head or in_arrival(group.retained)[0]))
            number = self._view.numbers[first.stream]
            if group.head is not None and not self._consumer.admits(first, number):
                outside.append(group.group_id)
            else:
                state = "ready" if group.is_complete else "open"
                is_only_stream = self._consumer.names == [first.stream]
                rank = first.offset if is_only_stream else INTEGER_MAX if first.time_us is None else first.time_us
                rows.append((rank, first.offset, number, state, group.group_id))
        names = ("ranks", "first_offsets", "stream_ids", "states", "group_ids")
        columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
        return columns | {"consumer_id": self._consumer.consumer_id, "outside": outside}
