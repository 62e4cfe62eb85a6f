"""The streams that are read, as they stand: their ends, what is recorded of them, and the members that are not.

The order of the steps is that of every proof: the ends are taken from the broker first, the coverage after that. What
lay in the streams at that moment is then in the table or is read from the stream itself.
"""

import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from relatum.errors import InvalidInput, KeyNotDefined
from relatum.limits import GROUP_ID_BYTES, INTEGER_MAX
from relatum.membership import GROUP_KEY, membership, parse_value
from relatum.reading import Message
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.groups._assembly import Member, Row, by_group, distinct
from relatum_consumer.groups._options import UNRECORDED_MEMBERS_MAX
from relatum_consumer.lookups.answer import UnreadableStream
from relatum_consumer.lookups.catalog import Catalog, PresentStream
from relatum_consumer.lookups.proof import Uncovered, evidence
from relatum_consumer.lookups.servers import Servers

GROUP_ID_LENGTH: Final = 2 * GROUP_ID_BYTES
"""Characters of a group's id."""

_LOW: Final = "wanted.group_id || '|' COLLATE \"C\""
_HIGH: Final = "wanted.group_id || '}' COLLATE \"C\""
"""`}` is the character after `|`. All values of a group, `<group id>|<sequence>|<last>`, lie between the two: they are
one short range of the index `relationships_lookup`."""

# Offset 0 keeps PostgreSQL from joining it in another way than group by group. And of a stream that was never analyzed
# PostgreSQL expects no row: for each group it would look through all of the stream, by the index of offsets, which
# cannot be used for `stream_id + 0`.
MEMBERS: Final = sql(
    f"""
    SELECT found.value, found.stream_id, found.stream_offset, found.time_us
    FROM unnest(:group_ids::text[]) AS wanted (group_id)
    CROSS JOIN LATERAL (
      SELECT r.value, r.stream_id, r.stream_offset, r.time_us
      FROM relatum.relationships r
      WHERE r.key_id = :key_id::smallint AND r.value >= {_LOW} AND r.value < {_HIGH}
        AND {part_may_hold_values("r", ":key_id::smallint", _LOW, _HIGH)}
        AND r.stream_id + 0 = ANY (:stream_ids::int[])
      OFFSET 0
    ) AS found
    """
)
"""Rows of the groups `group_ids` in the streams `stream_ids`: value, stream id, offset, time, in no order.

One probe a group, for the range of values that begin with its id, of each part that may hold it: one or two, where ids
are in the order of time.
"""

logger = logging.getLogger("relatum.groups")


@dataclass(slots=True)
class View:
    """The streams meant, and how far they are read.

    Attributes:
        servers: What is asked.
        key_id: The number of the key of groups.
        stream_ids: Streams by their number in the database.
        floors: The first retained offset by stream.
        stops: The offset by stream before which messages count.
        unrecorded: Members that are in the streams and not in the table, by stream, in the order of offsets.
        unrecorded_groups: The same by group.
        gaps: What is retained and not in the table.
    """

    servers: Servers
    key_id: int
    stream_ids: dict[int, str]
    floors: dict[str, int]
    stops: dict[str, int]
    unrecorded: dict[str, list[Member]] = field(default_factory=dict)
    unrecorded_groups: dict[str, list[Member]] = field(default_factory=dict)
    gaps: tuple[Uncovered, ...] = ()

    @classmethod
    def of_table(cls, servers: Servers, key_id: int, recorded: Sequence[PresentStream]) -> Self:
        """All that the table has of streams, whatever they retain."""
        names = {stream.stream_id: stream.name for stream in recorded}
        return cls(servers, key_id, names, {}, dict.fromkeys(names.values(), INTEGER_MAX))

    def hold(self, members: Iterable[Member]) -> None:
        """Count members that are not in the table."""
        self.unrecorded = defaultdict(list)
        for member in sorted(members, key=lambda each: (each.stream, each.offset)):
            self.unrecorded[member.stream].append(member)
        self.unrecorded_groups = by_group(each for held in self.unrecorded.values() for each in held)

    def unrecorded_between(self, stream: str, low: int, high: int) -> Sequence[Member]:
        """Those of a stream from one offset to before another."""
        held = self.unrecorded.get(stream, [])
        return held[bisect_left(held, low, key=_offset) : bisect_left(held, high, key=_offset)]

    def members_of(self, group_ids: Sequence[str]) -> dict[str, list[Row]]:
        """All rows of groups, by group; those of none are left out."""
        rows = self.servers.rows(
            MEMBERS,
            {"key_id": self.key_id, "group_ids": list(group_ids), "stream_ids": list(self.stream_ids)},
        )
        names, stops = self.stream_ids, self.stops
        groups: dict[str, list[Row]] = defaultdict(list)
        # Of all groups the same few dozen: taken apart once each.
        ends: dict[str, tuple[int, bool] | None] = {}
        for value, stream_id, offset, time_us in rows:
            # All begin with the id of one of the groups.
            group_id, end = value[:GROUP_ID_LENGTH], value[GROUP_ID_LENGTH:]
            if end not in ends:
                place = parse_value(value)
                ends[end] = None if place is None else place[1:]
            stream = names[stream_id]
            if (numbered := ends[end]) is not None and offset < stops[stream]:
                groups[group_id].append((group_id, *numbered, stream, offset, time_us))
        if self.unrecorded_groups:
            for group_id in group_ids:
                if held := self.unrecorded_groups.get(group_id):
                    groups[group_id] = distinct((*groups[group_id], *held))
        return groups


def _offset(member: Member) -> int:
    return member.offset


def group_key(catalog: Catalog) -> int:
    """The number of the key by which groups are found."""
    try:
        definition = catalog.definition(GROUP_KEY.name)
    except KeyNotDefined:
        definition = None
    if definition is None or definition.sources != GROUP_KEY.sources or definition.type != GROUP_KEY.type:
        raise KeyNotDefined(
            f"groups are found by the key {GROUP_KEY.name!r}, which is not defined here, or as something else: "
            "give relatum.intercept(…, keys=[…, relatum.GROUP_KEY]), or run "
            f"`relatum keys add {GROUP_KEY.name} --source {' --source '.join(GROUP_KEY.sources)}`; "
            "then back-fill what is older",
            key=GROUP_KEY.name,
        )
    return definition.key_id


def look(catalog: Catalog, names: tuple[str, ...] | None, *, complete: bool) -> View:
    """The streams as they stand now."""
    key_id = group_key(catalog)
    catalog.check_names(names)
    streams = evidence(catalog, names, [key_id], needs_firsts=True, is_proof=complete)
    for refused in streams.refused:
        say_left_out(refused)
    gaps = streams.uncovered
    view = View(
        catalog.servers,
        key_id,
        {stream.stream_id: stream.name for stream in streams.recorded if stream.name in streams.ends},
        {stream: ends.first or 0 for stream, ends in streams.ends.items()},
        {stream: ends.end for stream, ends in streams.ends.items()},
    )
    view.gaps = tuple(gaps)
    if complete:
        view.hold(_unrecorded(view, gaps))
    else:
        _leave_out(view, gaps)
    return view


def say_left_out(found: UnreadableStream) -> None:
    """Say that groups are given without a stream's messages: those that have some there are not complete."""
    logger.warning("the stream %r is left out: %s", found.stream, found.reason)


def _leave_out(view: View, gaps: Sequence[Uncovered]) -> None:
    """Let each stream end where its recorded part does."""
    for gap in reversed(gaps):
        if gap.stop >= view.stops[gap.stream]:
            view.stops[gap.stream] = gap.start


def _unrecorded(view: View, gaps: Sequence[Uncovered]) -> list[Member]:
    members: list[Member] = []
    for gap in gaps:
        stop = min(gap.stop, view.stops[gap.stream])
        if gap.start < stop:
            members += view.servers.scan(gap.stream, gap.start, stop, member_of)
        if len(members) > UNRECORDED_MEMBERS_MAX:
            raise InvalidInput(
                f"more than {UNRECORDED_MEMBERS_MAX:,} messages of groups are not recorded yet: run a recorder or a "
                "back-fill, or ask with complete=False for what is recorded"
            )
    return members


def member_of(message: Message) -> Member | None:
    """A message's place in its group and in its stream; None where it is in no group."""
    place = membership(message.headers)
    return None if place is None else Member(*place, message.stream, message.offset, message.time_us)
