"""Going through streams for the messages that groups stand at: window after window, streams merged by time."""

from collections import deque
from typing import Final, NamedTuple

import sqlalchemy as sa

from relatum.ids import MessageId
from relatum.membership import parse_value
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_offsets
from relatum_consumer.groups.reading._assembly import Clock, GroupOrder, Member, Place
from relatum_consumer.groups.reading._group_options import WINDOW_OFFSETS
from relatum_consumer.groups.reading._streams_view import View


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
