"""Assembles groups from the rows of their members, in a view of the streams.

A view queries, like every proof, first the streams' ends from the broker and then the coverage. So every message that
was in the streams at the first query is in the table, or is read from its stream.
"""

import logging
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Final, Literal, NamedTuple, Self, TypeAlias

from relatum.common.ids import MessageId
from relatum.common.limits import GROUP_ID_BYTES, INTEGER_MAX, INTEGER_MIN
from relatum.errors import InvalidInput, KeyNotDefined
from relatum.membership import GROUP_KEY, Anomaly, GroupPosition, Membership, assess, membership, parse_value
from relatum.reading import Message
from relatum.store.coverage import Range, missing
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_offsets, part_may_hold_values
from relatum.store.rows import array_text
from relatum_consumer.lookups.answer import UnreadableStream
from relatum_consumer.lookups.catalog import Catalog, PresentStream
from relatum_consumer.lookups.proof import Evidence, evidence
from relatum_consumer.lookups.servers import Servers

logger = logging.getLogger("relatum.groups")

GroupOrder: TypeAlias = Literal["logical", "physical"]

_FINAL: Final = (Anomaly.EXPIRED, Anomaly.TWO_LASTS, Anomaly.PAST_LAST)
"""Anomalies that no further message can resolve. The first that applies is reported."""

Row: TypeAlias = tuple[str, int, bool, str, int, int | None]
"""The fields of a `Member`, as a plain tuple. A hundred thousand rows are held in memory. Python's garbage collector
skips plain tuples of texts and numbers, but visits instances of a class repeatedly: tuples take a tenth of the time."""


class Member(NamedTuple):
    """A message of a group, as its row describes it. The first three fields are those of a `Membership`."""

    group_id: str
    sequence: int
    last: bool
    stream: str
    offset: int
    time_us: int | None

    @property
    def id(self) -> MessageId:
        return MessageId(self.stream, self.offset)


def named(rows: Iterable[Row]) -> list[Member]:
    return [Member(*row) for row in rows]


stream_and_offset: Final = itemgetter(3, 4)

Place: TypeAlias = tuple[int, str, int]
"""A message's position in the order of arrival across streams: the latest time in its stream up to the message, stream
and offset. So a stream's messages are ordered by offset, regardless of their times, and streams are merged by time."""


class Clock:
    """Computes the places of messages. Pass each stream's messages in the order of offsets."""

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}

    def place(self, row: Row) -> Place:
        """Return the place of a stream's next message. Without a time, it has the time of the previous one."""
        _, _, _, stream, offset, time_us = row
        reached = self._reached.get(stream, INTEGER_MIN)
        if time_us is not None and time_us > reached:
            self._reached[stream] = reached = time_us
        return reached, stream, offset


def in_arrival(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in the order of arrival: by offset within a stream; streams are merged by time, then by name."""
    by_offset = sorted(rows, key=stream_and_offset)
    if not by_offset or by_offset[0][3] == by_offset[-1][3]:
        return by_offset
    return sorted(by_offset, key=Clock().place)


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each message: its row in the table and one made from the message may differ in the time."""
    return list({stream_and_offset(row): row for row in rows}.values())


@dataclass(frozen=True, slots=True)
class Assembled:
    """A group, assembled from its rows.

    Attributes:
        rows: The retained rows in the requested order, one for each number: the first that arrived.
        duplicates: Later rows with the same numbers, in the order of arrival.
        expired: Rows of messages that retention has dropped, in the order of arrival.
        was_complete: Whether each number from 1 to the last is present, or was present until retention dropped it.
        head: The row whose place is the group's place. In logical order, the first row with number 1; in physical
            order, the first row that arrived. None if there is none.
    """

    group_id: str
    position: GroupPosition
    rows: tuple[Row, ...]
    duplicates: tuple[Row, ...] = ()
    expired: tuple[Row, ...] = ()
    was_complete: bool = True
    head: Row | None = None

    @property
    def retained(self) -> tuple[Row, ...]:
        """The rows whose messages are retained, in the order of reading: duplicates last."""
        return self.rows + self.duplicates

    @property
    def members(self) -> tuple[Row, ...]:
        """All rows, also of messages that retention has dropped."""
        return self.retained + self.expired

    @property
    def is_complete(self) -> bool:
        """Whether each number from 1 to the last is present and retained."""
        return self.position.is_complete

    @property
    def flaw(self) -> Anomaly | None:
        """The first anomaly that forbids delivery, even of a complete group; None if there is none."""
        anomalies = self.position.anomalies
        return next((each for each in _FINAL if each in anomalies), None) if anomalies else None


def assemble(
    group_id: str, rows: Iterable[Row], order: GroupOrder = "logical", floors: Mapping[str, int] | None = None
) -> Assembled:
    """Assemble a group from its rows, in any order. `floors`: The first retained offsets; None: nothing has expired."""
    arrived = in_arrival(rows)
    expired = [row for row in arrived if row[4] < floors.get(row[3], 0)] if floors else []
    if expired and floors:
        arrived = [row for row in arrived if row[4] >= floors.get(row[3], 0)]
    chosen: dict[int, Row] = {}
    duplicates = tuple(row for row in arrived if chosen.setdefault(row[1], row) is not row)
    # The dictionary is in the order of arrival.
    ordered = list(chosen.values()) if order == "physical" else [chosen[number] for number in sorted(chosen)]
    position = assess(group_id, arrived, expired=expired)
    return Assembled(
        group_id,
        position,
        tuple(ordered),
        duplicates,
        tuple(expired),
        assess(group_id, arrived + expired).is_complete if expired else position.is_complete,
        next(iter(ordered), None) if order == "physical" else chosen.get(1),
    )


GROUPS_AT_ONCE: Final = 1_000
"""Maximum number of groups in one query of members; their rows are held in memory until each group is assembled."""

UNRECORDED_MEMBERS_MAX: Final = 500_000
"""Maximum number of unrecorded members in memory, 200 bytes each; if there are more, no recorder or back-fill runs."""

_LOW: Final = "wanted.group_id || '|' COLLATE \"C\""
_HIGH: Final = "wanted.group_id || '}' COLLATE \"C\""
"""`}` is the character after `|`, so all values of a group, `<group id>|<sequence>|<last>`, are between these two: one
short range of the index `relationships_lookup`."""

# The aggregate makes PostgreSQL join group by group. `stream_id + 0` stops it from using the index of offsets: for a
# stream that was never analyzed it expects no rows there, and would search the whole stream for each group.
MEMBERS: Final = sql(f"""
    SELECT wanted.group_id, found.*
    FROM unnest(:group_ids::text[]) AS wanted (group_id)
    CROSS JOIN LATERAL (
      SELECT
        array_agg(substr(r.value, {2 * GROUP_ID_BYTES + 2})) AS places, array_agg(r.stream_id) AS stream_ids,
        array_agg(r.stream_offset) AS stream_offsets, array_agg(r.time_us) AS times_us
      FROM relatum.relationships r
      WHERE r.key_id = :key_id::smallint AND r.value >= {_LOW} AND r.value < {_HIGH}
        AND {part_may_hold_values("r", ":key_id::smallint", _LOW, _HIGH)}
        AND r.stream_id + 0 = ANY (:stream_ids::int[])
    ) AS found
    WHERE found.places IS NOT NULL""")
"""Selects the members of the groups `group_ids` in the streams `stream_ids`, one row a group, since each row costs the
driver time: the group's id, and unordered arrays of values (without the id), stream ids, offsets and times.

Each group takes one index probe of each part that may hold its values: one or two parts, if ids are in time order.
"""

# The index `relationships_offsets` finds the rows of a range of offsets.
ROWS_BETWEEN: Final = sql(f"""
    SELECT r.value, r.stream_offset, r.time_us
    FROM relatum.relationships r
    WHERE r.stream_id = :stream_id::int
      AND r.stream_offset >= :low::bigint AND r.stream_offset < :high::bigint
      AND r.key_id = :key_id::smallint
      AND {part_may_hold_offsets("r", ":stream_id::int", ":low::bigint", ":high::bigint")}
      AND (NOT :firsts_only::boolean OR split_part(r.value, '|', 2) = '1')
    ORDER BY r.stream_offset""")
"""Selects the rows of a key in one stream from offset `low` to before `high`, by offset: value, offset, time. With
`firsts_only`, it selects only rows with number 1."""


@dataclass(slots=True)
class View:
    """The streams to read, each as far as it is seen.

    For each stream, `numbers` has its id in the database, `floors` its first retained offset, and `seen` the ranges of
    offsets that the view includes. `unrecorded_groups` are the members in the retained ranges that are not recorded.
    """

    servers: Servers
    key_id: int
    numbers: dict[str, int]
    floors: dict[str, int]
    seen: dict[str, list[Range]]
    unrecorded_groups: dict[str, list[Member]] = field(default_factory=partial(defaultdict, list))
    _unrecorded: list[Member] = field(default_factory=list)

    @classmethod
    def of_table(cls, servers: Servers, key_id: int, recorded: Sequence[PresentStream]) -> Self:
        """Return a view of all rows of streams, including those of messages that retention has dropped."""
        numbers = {stream.name: stream.stream_id for stream in recorded}
        return cls(servers, key_id, numbers, {}, {name: [(0, INTEGER_MAX)] for name in numbers})

    def add_unrecorded(self, known: Evidence, group_id: str | None = None) -> None:
        """Read the members of all groups, or of one group, from the unrecorded ranges."""
        found: list[Member] = []

        def consider(message: Message) -> None:
            place = membership(message.headers)
            if place is None or group_id not in (None, place.group_id):
                return
            found.append(Member(*place, message.stream, message.offset, message.time_us))
            if len(found) > UNRECORDED_MEMBERS_MAX:
                raise InvalidInput(
                    f"more than {UNRECORDED_MEMBERS_MAX:,} messages of groups are not recorded yet: run a recorder or "
                    "a back-fill, or pass complete=False to use only recorded messages"
                )

        known.scan(self.servers, consider)
        self._unrecorded = sorted(found, key=stream_and_offset)
        for member in self._unrecorded:
            self.unrecorded_groups[member.group_id].append(member)

    def between(self, stream: str, low: int, high: int, *, firsts_only: bool = False) -> list[Row]:
        """Return a stream's rows from `low` to before `high`, by offset. `firsts_only`: Only rows with number 1."""
        unrecorded = self._unrecorded
        first, stop = (bisect_left(unrecorded, (stream, offset), key=stream_and_offset) for offset in (low, high))
        part = unrecorded[first:stop]
        members: dict[int, Row] = {each.offset: each for each in part if not firsts_only or each.sequence == 1}
        if (number := self.numbers.get(stream)) is not None:
            window = {"stream_id": number, "low": low, "high": high, "firsts_only": firsts_only}
            rows = self.servers.rows(ROWS_BETWEEN, window | {"key_id": self.key_id})
            for value, offset, time_us in rows:
                if (place := parse_value(value)) is not None:
                    members[offset] = (*place, stream, offset, time_us)
        return [members[offset] for offset in sorted(members)]

    def members_of(self, group_ids: Sequence[str]) -> dict[str, list[Row]]:
        """Return the rows of all members of the groups, by group. Groups without members are left out."""
        rows = self.servers.rows(
            MEMBERS,
            {"key_id": self.key_id, "group_ids": array_text(group_ids), "stream_ids": list(self.numbers.values())},
        )
        # An offset is in one of the ascending ranges if an odd number of their bounds is not above it.
        streams = {number: (name, list(chain(*self.seen[name]))) for name, number in self.numbers.items()}
        groups: dict[str, list[Row]] = defaultdict(list)
        # The same few dozen places recur in all groups: parse each once.
        known: dict[str, Membership | None] = {}
        for group_id, *columns in rows:
            if parse_value(f"{group_id}|1|true") is None:
                continue  # Not an id, but another publisher's header, which must not enter `known`.
            members = groups[group_id]
            for place, number, offset, time_us in zip(*columns, strict=True):
                if place not in known:
                    known[place] = parse_value(f"{group_id}|{place}")
                found = known[place]
                stream, bounds = streams[number]
                if found is not None and bisect_right(bounds, offset) % 2:
                    members.append((group_id, found[1], found[2], stream, offset, time_us))
        for group_id in self.unrecorded_groups.keys() & group_ids:
            groups[group_id] = distinct((*groups[group_id], *self.unrecorded_groups[group_id]))
        return groups

    def groups(self, group_ids: Iterable[str], order: GroupOrder = "logical") -> Iterator[Assembled]:
        """Yield each group, assembled from its present rows, if any."""
        ids = iter(group_ids)
        while part := list(islice(ids, GROUPS_AT_ONCE)):
            members = self.members_of(part)
            for group_id in part:
                yield assemble(group_id, members.pop(group_id, ()), order, self.floors)


def group_key(catalog: Catalog) -> int:
    """Return the id of the key that finds groups."""
    definition = None
    with suppress(KeyNotDefined):
        definition = catalog.definition(GROUP_KEY.name)
    if definition is None or definition.sources != GROUP_KEY.sources or definition.type != GROUP_KEY.type:
        raise KeyNotDefined(
            f"groups need the key {GROUP_KEY.name!r}, which is not defined, or is defined differently: "
            "call relatum.intercept(…, keys=[…, relatum.GROUP_KEY]), or run "
            f"`relatum keys add {GROUP_KEY.name} --source {' --source '.join(GROUP_KEY.sources)}`; "
            "then back-fill older messages",
            key=GROUP_KEY.name,
        )
    return definition.key_id


def present_view(catalog: Catalog, names: tuple[str, ...] | None, *, complete: bool) -> tuple[View, Evidence]:
    """Return a view of the streams at this moment, and its evidence. `complete` also reads what is not recorded."""
    key_id = group_key(catalog)
    catalog.check_names(names)
    known = evidence(catalog, names, [key_id], needs_firsts=True, is_proof=complete)
    for left_out in known.unreadable_streams:
        warn_left_out(left_out)
    unseen: dict[str, list[Range]] = defaultdict(list)
    for gap in () if complete else known.uncovered:
        unseen[gap.stream].append((gap.start, gap.stop))
    view = View(
        catalog.servers,
        key_id,
        {stream.name: stream.stream_id for stream in known.recorded if stream.name in known.ends},
        {stream: ends.first or 0 for stream, ends in known.ends.items()},
        {stream: missing((0, ends.end), unseen[stream]) for stream, ends in known.ends.items()},
    )
    if complete:
        view.add_unrecorded(known)
        for stream in sorted(known.unproven):
            text = "the stream %r may have more messages: its leader is unreachable, or a batch cannot be unpacked"
            logger.warning(text, stream)
    return view, known


def warn_left_out(found: UnreadableStream) -> None:
    """Warn that a stream is left out: groups with messages in it look incomplete."""
    logger.warning("the stream %r is left out: %s", found.stream, found.reason)
