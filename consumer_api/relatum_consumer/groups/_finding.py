"""Finds complete groups: first those complete now, then, with `follow`, those that become complete later."""

import heapq
import time
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Final

from relatum.reading import StreamBounds
from relatum.store.coverage import covered
from relatum_consumer.groups._assembly import (
    Assembled,
    Clock,
    Member,
    Place,
    assemble,
    stream_and_offset,
)
from relatum_consumer.groups._group import Group
from relatum_consumer.groups._options import BATCH_MESSAGES, Beginning, GroupOptions
from relatum_consumer.groups._reading import deliver
from relatum_consumer.groups._view import View, look, warn_left_out
from relatum_consumer.lookups.catalog import Catalog, replaced
from relatum_consumer.lookups.proof import coverage_by_stream, ends_of
from relatum_consumer.lookups.waiting import POLL_S_MAX, POLL_S_MIN, Pause

WINDOW_OFFSETS: Final = 131_072
"""Offsets of a stream whose rows are queried at once. A row takes about 200 bytes of memory."""

FIRST_GROUPS: Final = 64
"""Groups whose rows are queried at first, when the size of groups is still unknown."""

GROUPS_AT_ONCE: Final = 2_048
"""Groups whose rows are queried at once, at most: large groups may follow many small ones."""


def whole_groups(catalog: Catalog, options: GroupOptions) -> Generator[Group | Pause, None, None]:
    """Yield each complete group once."""
    view = look(catalog, options.names, complete=options.complete)
    for batch in batches(view, options):
        yield from deliver(catalog.servers, batch, options)
    if options.follow:
        yield from _completed_later(catalog, view, options)


def batches(view: View, options: GroupOptions) -> Iterator[list[Assembled]]:
    """Yield the present groups in their order, complete or not, in batches that are read in one pass.

    The size of a group is known only with its rows, so a batch is assembled step by step.
    """
    beginning = Beginning.of(options.start)
    candidates = _candidates(view, options, beginning.offset)
    batch: list[Assembled] = []
    messages, mean = 0, BATCH_MESSAGES / FIRST_GROUPS
    while part := list(islice(candidates, min(GROUPS_AT_ONCE, max(1, int((BATCH_MESSAGES - messages) / mean))))):
        members = view.members_of(list(dict.fromkeys(each.group_id for each in part)))
        groups = {id_: assemble(id_, rows, options.order, view.floors) for id_, rows in members.items()}
        for each in part:
            group = groups.get(each.group_id)
            # A group may have several candidates. It belongs to the candidate that is its head.
            if group is None or group.head is None or stream_and_offset(group.head) != stream_and_offset(each):
                continue
            if beginning.admits(group.head):
                batch.append(group)
        found = max(len(part), sum(map(len, members.values())))
        mean = max(1.0, found / len(part))
        messages += found
        if messages >= BATCH_MESSAGES:
            yield batch
            batch, messages = [], 0
    yield batch


def _candidates(view: View, options: GroupOptions, start: int) -> Iterator[Member]:
    """Yield the members that may be the head of a group, in the order of arrival.

    In logical order these are messages with number 1, in physical order all messages of groups.
    """
    clock, firsts_only = Clock(), options.order == "logical"

    def of_stream(stream: str) -> Iterator[tuple[Place, Member]]:
        low, stop = max(start, view.floors.get(stream, 0)), view.stops[stream]
        for at in range(low, stop, WINDOW_OFFSETS):
            for member in view.between(stream, at, min(stop, at + WINDOW_OFFSETS), firsts_only=firsts_only):
                yield clock.place(member), member

    return (member for _, member in heapq.merge(*map(of_stream, sorted(view.stops))))


# --- following --------------------------------------------------------------------------------------------


class Idle:
    """Exponential backoff between two polls, and the idle timeout.

    `idle_s`: The timeout in seconds; None for never. `longest_s`: The longest rest in seconds.
    """

    def __init__(self, idle_s: float | None, longest_s: float = POLL_S_MAX) -> None:
        self._idle_s = idle_s
        self._longest_s = longest_s
        self.begin()

    def begin(self) -> None:
        """Restart the timeout and the backoff: a group arrived, or the caller asks for the next."""
        self._since, self._pause_s = time.monotonic(), POLL_S_MIN

    @property
    def is_over(self) -> bool:
        """Whether the idle timeout has passed."""
        return self._left_s() <= 0

    def rest(self) -> Pause:
        """Return the rest until the next poll."""
        rest = Pause(max(0.0, min(self._pause_s, self._left_s())))
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        return rest

    def _left_s(self) -> float:
        return self._longest_s if self._idle_s is None else self._since + self._idle_s - time.monotonic()


def _completed_later(catalog: Catalog, view: View, options: GroupOptions) -> Generator[Group | Pause, None, None]:
    """Yield groups as they become complete, each once, until the idle timeout has passed.

    A new message can complete a group with any place. So each new part of a stream is searched for the groups it
    touches, and the groups that are complete with it and were not before are yielded. No state of groups is kept.
    """
    idle = Idle(options.idle_timeout_s)
    left_out: set[int] = set()
    while not idle.is_over:
        yield idle.rest()
        for stream, end in _recorded_further(catalog, view, options, left_out):
            while (low := view.stops[stream]) < end:
                high = min(end, low + WINDOW_OFFSETS)
                touched = view.between(stream, low, high)
                view.stops[stream] = high
                found = sorted(_completed(view, touched, stream, low, options), key=_place)
                if found:
                    yield from deliver(catalog.servers, found, options)
                    idle.begin()


def _recorded_further(catalog: Catalog, view: View, options: GroupOptions, left_out: set[int]) -> list[tuple[str, int]]:
    """Return the streams that are recorded beyond the view, each with its new end. New streams join the view."""
    present = catalog.streams(options.names)
    for stream in present:
        if view.numbers.get(stream.name, stream.stream_id) != stream.stream_id:
            raise replaced(stream.name, view.stops[stream.name])
        if stream.name in view.numbers or stream.stream_id in left_out:
            continue
        bounds = ends_of(catalog.servers, stream.name, is_named=options.names is not None)
        if isinstance(bounds, StreamBounds):
            first = bounds.first or 0
            view.numbers[stream.name] = stream.stream_id
            view.floors.setdefault(stream.name, first)
            view.stops.setdefault(stream.name, first)
        else:
            left_out.add(stream.stream_id)
            if bounds is not None:
                warn_left_out(bounds)
    rows = coverage_by_stream(catalog.servers, present)
    ranges = {name: covered(rows.get(number, ()), view.key_id) for name, number in view.numbers.items()}
    return sorted((name, parts[-1][1]) for name, parts in ranges.items() if parts and parts[-1][1] > view.stops[name])


def _completed(
    view: View, touched: Iterable[Member], stream: str, low: int, options: GroupOptions
) -> Iterator[Assembled]:
    """Yield the groups that are complete with the new messages, and were not without those from `low` on."""
    beginning = Beginning.of(options.start)
    ids = list(dict.fromkeys(member.group_id for member in touched))
    for group_id, rows in view.members_of(ids).items() if ids else ():
        group = assemble(group_id, rows, options.order, view.floors)
        if group.was_complete and beginning.admits(group.head):
            before = [row for row in rows if row[3] != stream or row[4] < low]
            if not assemble(group_id, before).was_complete:
                yield group


def _place(group: Assembled) -> Place:
    assert group.head is not None, "it was admitted"
    return Clock().place(group.head)
