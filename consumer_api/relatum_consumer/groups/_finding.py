"""Finding whole groups: what lies in the streams now, and then, if asked, what completes later."""

import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

import sqlalchemy as sa

from relatum.ids import MessageId
from relatum.membership import parse_value
from relatum.reading import StreamBounds
from relatum.store.coverage import CoverageRow, covered
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_offsets
from relatum_consumer.groups._assembly import NEVER_US, Assembled, Clock, GroupOrder, Member, Place, assemble
from relatum_consumer.groups._group import Group
from relatum_consumer.groups._options import (
    BATCH_MESSAGES,
    FIRST_GROUPS,
    GROUPS_AT_ONCE,
    WINDOW_OFFSETS,
    GroupOptions,
)
from relatum_consumer.groups._reading import deliver
from relatum_consumer.groups._view import View, look, say_left_out
from relatum_consumer.lookups.arguments import time_us_of
from relatum_consumer.lookups.catalog import Catalog, PresentStream, replaced
from relatum_consumer.lookups.proof import coverage_by_stream, ends_of
from relatum_consumer.lookups.waiting import POLL_S_MAX, POLL_S_MIN, Rest


class Candidate(NamedTuple):
    """A message at which a group may stand."""

    place: Place
    group_id: str

    @property
    def id(self) -> MessageId:
        """Where it lies."""
        return MessageId(self.place.stream, self.place.offset)


class Scan:
    """The messages of streams at which groups may stand, in the order of arrival.

    In logical order those are the messages of number 1, in physical order all messages of groups.
    """

    def __init__(self, view: View, order: GroupOrder, start: int | None) -> None:
        self._view = view
        self._firsts_only = order == "logical"
        self._start = start or 0
        self._clock = Clock()
        self._at: dict[str, int] = {}
        self._buffers: dict[str, deque[Candidate]] = {}

    def take(self, count: int) -> list[Candidate]:
        """The next so many; fewer at the streams' ends."""
        taken: list[Candidate] = []
        while len(taken) < count:
            buffers = []
            for stream in sorted(self._view.stops):
                buffer = self._buffers.setdefault(stream, deque())
                if not buffer:
                    self._fill(stream, buffer)
                if buffer:
                    buffers.append(buffer)
            if not buffers:
                break
            _merge(buffers, taken, count)
        return taken

    def _fill(self, stream: str, buffer: deque[Candidate]) -> None:
        """Read windows until one has something in it."""
        view = self._view
        while not buffer:
            low = self._at.get(stream)
            if low is None:
                low = max(self._start, view.floors.get(stream, 0))
            stop = view.stops[stream]
            if low >= stop:
                return
            high = min(stop, low + WINDOW_OFFSETS)
            buffer.extend(self._window(stream, low, high))
            self._at[stream] = high

    def _window(self, stream: str, low: int, high: int) -> list[Candidate]:
        members = rows_between(self._view, stream, low, high, firsts_only=self._firsts_only)
        return [Candidate(self._clock.place(*member[3:]), member.group_id) for member in members]


def _merge(buffers: list[deque[Candidate]], taken: list[Candidate], count: int) -> None:
    """Take the earliest from the buffers until one is empty or there are enough."""
    if len(buffers) == 1:
        (buffer,) = buffers
        taken.extend(buffer.popleft() for _ in range(min(count - len(taken), len(buffer))))
        return
    while len(taken) < count:
        buffer = min(buffers, key=lambda each: each[0].place)
        taken.append(buffer.popleft())
        if not buffer:
            return


def _rows_between(more: str) -> sa.TextClause:
    in_parts = part_may_hold_offsets("r", ":stream_id::int", ":low::bigint", ":high::bigint")
    return sql(
        f"""
        SELECT r.value, r.stream_offset, r.time_us
        FROM relatum.relationships r
        WHERE r.stream_id = :stream_id::int
          AND r.stream_offset >= :low::bigint AND r.stream_offset < :high::bigint
          AND r.key_id = :key_id::smallint
          AND {in_parts} {more}
        ORDER BY r.stream_offset
        """
    )


# Rows arrive in the order of offsets, so what a part of a stream holds is found by the index `relationships_offsets`.
ROWS_BETWEEN: Final = _rows_between("")
"""Rows of the key `key_id` in one stream from offset `low` to before `high`: value, offset, time, by offset."""

FIRSTS_BETWEEN: Final = _rows_between("AND split_part(r.value, '|', 2) = '1'")
"""The same, of number 1."""


def rows_between(view: View, stream: str, low: int, high: int, *, firsts_only: bool) -> list[Member]:
    """The members that lie in a part of a stream, in the order of offsets; `firsts_only` those of number 1."""
    members = {
        member.offset: member
        for member in view.unrecorded_between(stream, low, high)
        if not firsts_only or member.sequence == 1
    }
    for stream_id, name in view.stream_ids.items():
        if name == stream:
            rows = view.servers.rows(
                FIRSTS_BETWEEN if firsts_only else ROWS_BETWEEN,
                {"key_id": view.key_id, "stream_id": stream_id, "low": low, "high": high},
            )
            for value, offset, time_us in rows:
                place = parse_value(value)
                if place is not None:
                    members[offset] = Member(*place, stream, offset, time_us)
    return [members[offset] for offset in sorted(members)]


def whole_groups(catalog: Catalog, options: GroupOptions) -> Generator[Group | Rest, None, None]:
    """Give each complete group once."""
    view = look(catalog, options.names, complete=options.complete)
    offset = None if isinstance(options.start, datetime) else options.start
    scan = Scan(view, options.order, offset)
    batches = Batches(view, scan, options)
    while (batch := batches.next()) is not None:
        yield from deliver(catalog.servers, batch, options)
    if options.follow:
        yield from Following(catalog, view, options).run()


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where reading begins: groups that stand before it are left out."""

    offset: int = 0
    since_us: int | None = None

    @classmethod
    def of(cls, options: GroupOptions) -> "Beginning":
        """The beginning that was asked for."""
        if isinstance(options.start, datetime):
            return cls(since_us=time_us_of(options.start))
        return cls(options.start or 0)

    def admits(self, head: Member | None) -> bool:
        """Whether a group that stands at a message is meant."""
        if head is None or head.offset < self.offset:
            return False
        return self.since_us is None or (head.time_us is not None and head.time_us >= self.since_us)


class Batches:
    """The groups of a scan in their order, so many at a time as are read in one pass.

    How large groups are shows only when their rows are there, so each batch is put together step by step.
    """

    def __init__(self, view: View, scan: Scan, options: GroupOptions) -> None:
        self._view = view
        self._scan = scan
        self._order = options.order
        self._beginning = Beginning.of(options)
        self._mean = BATCH_MESSAGES / FIRST_GROUPS

    def next(self) -> list[Assembled] | None:
        """The next groups, complete or not; None at the end of the scan."""
        batch: list[Assembled] = []
        messages = 0
        while messages < BATCH_MESSAGES:
            count = min(GROUPS_AT_ONCE, max(1, int((BATCH_MESSAGES - messages) / self._mean)))
            candidates = self._scan.take(count)
            if not candidates:
                return batch if messages else None
            found, rows = self._assembled(candidates)
            self._mean = max(1.0, rows / len(candidates))
            messages += rows
            batch += found
        return batch

    def _assembled(self, candidates: Sequence[Candidate]) -> tuple[list[Assembled], int]:
        """The groups that stand at the candidates, in order, and how many rows that took."""
        ids = list(dict.fromkeys(each.group_id for each in candidates))
        members = self._view.members_of(ids)
        groups = {id_: assemble(id_, rows, self._order, self._view.floors) for id_, rows in members.items()}
        found: list[Assembled] = []
        for each in candidates:
            group = groups.get(each.group_id)
            if group is None or group.head is None or group.head.id != each.id:
                # Of several messages at which a group may stand, it stands at one: elsewhere it is not given.
                continue
            if self._beginning.admits(group.head):
                found.append(group)
        return found, max(len(candidates), sum(map(len, members.values())))


# --- following --------------------------------------------------------------------------------------------


def _place(group: Assembled) -> Place:
    head = group.head
    assert head is not None, "a group that stands nowhere is not given"
    return Place(NEVER_US if head.time_us is None else head.time_us, head.stream, head.offset)


class Ends:
    """How far the streams are recorded while they grow."""

    def __init__(self, catalog: Catalog, view: View, names: tuple[str, ...] | None) -> None:
        self._catalog = catalog
        self._view = view
        self._names = names
        self._gone: set[int] = set()

    def beyond(self) -> list[tuple[str, int]]:
        """The streams that are recorded further than the view goes, each with its new end."""
        view = self._view
        present = self._catalog.streams(self._names)
        known = {name: stream_id for stream_id, name in view.stream_ids.items()}
        for stream in present:
            if known.get(stream.name, stream.stream_id) != stream.stream_id:
                raise replaced(stream.name, view.stops[stream.name])
            if stream.stream_id not in view.stream_ids and stream.stream_id not in self._gone:
                self._join(stream)
        rows = coverage_by_stream(self._catalog.servers, present)
        ends = ((name, _end(rows.get(stream_id, ()), view.key_id)) for stream_id, name in view.stream_ids.items())
        return sorted((name, end) for name, end in ends if end > view.stops[name])

    def _join(self, stream: PresentStream) -> None:
        """Take in a stream that is recorded since the last look."""
        bounds = ends_of(self._catalog.servers, stream.name, is_named=self._names is not None)
        if not isinstance(bounds, StreamBounds):
            if bounds is not None:
                say_left_out(bounds)
            self._gone.add(stream.stream_id)
            return
        first = bounds.first or 0
        self._view.stream_ids[stream.stream_id] = stream.name
        self._view.floors.setdefault(stream.name, first)
        self._view.stops.setdefault(stream.name, first)


def _end(rows: Iterable[CoverageRow], key_id: int) -> int:
    ranges = covered(rows, key_id)
    return ranges[-1][1] if ranges else 0


class Idle:
    """How long to rest between two looks: longer each time, until nothing has come for the time given."""

    def __init__(self, idle_s: float | None) -> None:
        self._idle_s = idle_s
        self._since = time.monotonic()
        self._pause = POLL_S_MIN

    def next(self, *, was_busy: bool) -> Rest | None:
        """The rest until the next look; None when it is time to end."""
        if was_busy:
            self._since = time.monotonic()
            self._pause = POLL_S_MIN
        left = POLL_S_MAX if self._idle_s is None else self._since + self._idle_s - time.monotonic()
        if left <= 0:
            return None
        rest = Rest(min(self._pause, left))
        self._pause = min(2 * self._pause, POLL_S_MAX)
        return rest


class Following:
    """Groups as they complete, each once.

    A message that arrives can complete a group that stands anywhere. So each new part of a stream is looked at for the
    groups it touches, and those are given that are complete with it and were not before. Nothing is remembered of the
    groups themselves.
    """

    def __init__(self, catalog: Catalog, view: View, options: GroupOptions) -> None:
        self._view = view
        self._options = options
        self._ends = Ends(catalog, view, options.names)
        self._beginning = Beginning.of(options)

    def run(self) -> Generator[Group | Rest, None, None]:
        """Give groups until none has come for the time given."""
        idle = Idle(self._options.idle_timeout_s)
        was_given = False
        while (rest := idle.next(was_busy=was_given)) is not None:
            yield rest
            was_given = False
            for stream, end in self._ends.beyond():
                was_given = (yield from self._advance(stream, end)) or was_given

    def _advance(self, stream: str, end: int) -> Generator[Group, None, bool]:
        """Move one stream's end on, part by part, and give what completes with it."""
        view = self._view
        given = False
        while (low := view.stops[stream]) < end:
            high = min(end, low + WINDOW_OFFSETS)
            rows = rows_between(view, stream, low, high, firsts_only=False)
            view.stops[stream] = high
            found = self._completed(rows, stream, low)
            if found:
                yield from deliver(view.servers, sorted(found, key=_place), self._options)
                given = True
        return given

    def _completed(self, rows: Iterable[Member], stream: str, low: int) -> list[Assembled]:
        """The groups that are complete with the rows, and were not before `low` of the stream."""
        ids = list(dict.fromkeys(row.group_id for row in rows))
        members = self._view.members_of(ids) if ids else {}
        found = []
        for group_id, all_rows in members.items():
            group = assemble(group_id, all_rows, self._options.order, self._view.floors)
            if not group.was_complete or not self._beginning.admits(group.head):
                continue
            before = [row for row in all_rows if row[3] != stream or row[4] < low]
            if not assemble(group_id, before).was_complete:
                found.append(group)
        return found
