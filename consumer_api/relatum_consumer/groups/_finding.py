"""Finding whole groups: those that are in the streams now and then, if asked for, those that become complete later."""

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
from relatum_consumer.lookups.waiting import POLL_S_MAX, POLL_S_MIN, Rest

WINDOW_OFFSETS: Final = 131_072
"""Offsets of a stream whose rows are asked for at once; each row takes about 200 bytes while it is held."""

FIRST_GROUPS: Final = 64
"""Groups whose rows are asked for at first, while nothing is known of how large groups are."""

GROUPS_AT_ONCE: Final = 2_048
"""Groups whose rows are asked for at once: what follows many small groups may be large ones."""


def whole_groups(catalog: Catalog, options: GroupOptions) -> Generator[Group | Rest, None, None]:
    """Each complete group, once."""
    view = look(catalog, options.names, complete=options.complete)
    for batch in batches(view, options):
        yield from deliver(catalog.servers, batch, options)
    if options.follow:
        yield from _completed_later(catalog, view, options)


def batches(view: View, options: GroupOptions) -> Iterator[list[Assembled]]:
    """The groups that are there in their order, complete or not, as many at a time as are read in one pass.

    How large groups are shows only when their rows are there, so each batch is put together step by step.
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
            # Several members may be candidates for one group's place: it is given at that one which is its head.
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
    """The members that may be the head of a group, in the order of arrival.

    In logical order those are the messages of number 1, in physical order all messages of groups.
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
    """How long to rest between two looks: longer each time, until nothing has come for the time given.

    `idle_s`: Seconds until it ends; None for never. `longest_s`: The longest rest.
    """

    def __init__(self, idle_s: float | None, longest_s: float = POLL_S_MAX) -> None:
        self._idle_s = idle_s
        self._longest_s = longest_s
        self.begin()

    def begin(self) -> None:
        """Something has come, or is asked for: count from now on."""
        self._since, self._pause_s = time.monotonic(), POLL_S_MIN

    @property
    def is_over(self) -> bool:
        """Whether nothing has come for the time given."""
        return self._left_s() <= 0

    def rest(self) -> Rest:
        """The rest until the next look."""
        rest = Rest(max(0.0, min(self._pause_s, self._left_s())))
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        return rest

    def _left_s(self) -> float:
        return self._longest_s if self._idle_s is None else self._since + self._idle_s - time.monotonic()


def _completed_later(catalog: Catalog, view: View, options: GroupOptions) -> Generator[Group | Rest, None, None]:
    """Groups as they become complete, each once, until none has come for the time given.

    A message that arrives can complete a group whose place is anywhere. So each new part of a stream is looked at for
    the groups it touches, and those are given that are complete with it and were not before. Nothing is remembered of
    the groups themselves.
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
    """The streams that are recorded further than the view goes, each with its new end. New streams join the view."""
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
    """The groups that are complete with what came, and were not before `low` of the stream."""
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
