"""One group by its id: how far it is, its messages, one of its numbers; and the groups that are not complete."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, Final

from relatum.checks import checked_count, checked_name, checked_seconds
from relatum.errors import InvalidInput
from relatum.keys import moment
from relatum.limits import INTEGER_MAX
from relatum.membership import GROUP_KEY, GroupPosition, Membership, checked_group_id, checked_sequence
from relatum.reading import StreamBounds
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.groups._assembly import Assembled, GroupOrder, Row, assemble, named
from relatum_consumer.groups._group import Group, GroupPage, GroupReport
from relatum_consumer.groups._options import check_order
from relatum_consumer.groups._reading import as_group, floor_of, read_group, read_on
from relatum_consumer.groups._view import View, group_key, look
from relatum_consumer.lookups.answer import Answer
from relatum_consumer.lookups.answering import ANSWER_MESSAGES_MAX, again_if_replaced
from relatum_consumer.lookups.arguments import Names, names_of
from relatum_consumer.lookups.by_key import Question, answer
from relatum_consumer.lookups.catalog import Catalog, Wanted
from relatum_consumer.lookups.proof import all_ends, evidence
from relatum_consumer.lookups.servers import Servers

_Names = tuple[str, ...] | None

_IDS_AT_ONCE = 1_000
"""Groups whose rows are asked for at once for a report."""

_ROUNDS = 5
"""How often a page is filled up."""

_BEHIND_ALL = "g"
"""Sorts behind all ids, which are hexadecimal digits."""


# --- one group --------------------------------------------------------------------------------------------


def assembled(
    catalog: Catalog, group_id: str, names: _Names, *, order: GroupOrder = "logical", complete: bool
) -> tuple[Assembled, dict[str, Any]]:
    """A group as it is now, and the fields of its position that say which streams were searched."""
    key_id = group_key(catalog)
    catalog.check_names(names)
    known = evidence(catalog, names, [key_id]) if complete else None
    recorded = catalog.streams(names)
    if names is None and not recorded:
        catalog.nothing_recorded()
    view = View.of_table(catalog.servers, key_id, recorded)
    if known is not None:
        view.gaps = tuple(known.uncovered)
        view.add_unrecorded(group_id)
    rows = view.members_of([group_id]).get(group_id, [])
    group = assemble(group_id, rows, order, _floors(catalog.servers, rows, is_named=names is not None))
    streams = {stream.name for stream in recorded} | {*(names or ()), *(known.streams if known else ())}
    if names is None:
        streams |= {stream.super_stream for stream in recorded if stream.super_stream is not None}
    refused = {each.stream for each in known.unreadable_streams} if known else set()
    return group, {
        "streams": tuple(sorted(streams - refused)),
        "is_of_all": names is None and not refused,
        "is_proven": known is not None and not known.unproven and not refused,
    }


def _floors(servers: Servers, rows: Sequence[Row], *, is_named: bool) -> dict[str, int]:
    """The first retained offset of each stream that has members."""
    floors: dict[str, int] = {}
    streams = sorted({row[3] for row in rows})
    for stream, bounds in all_ends(servers, streams, is_named=is_named).items():
        if bounds is None:
            floors[stream] = INTEGER_MAX
        else:
            # Of one that this user may not read, the table knows what was recorded.
            floors[stream] = floor_of(stream, bounds) if isinstance(bounds, StreamBounds) else 0
    return floors


def position(catalog: Catalog, group_id: str, streams: Names, *, complete: bool) -> GroupPosition:
    """How far a group is."""
    names = names_of("streams", streams)
    found, searched = assembled(catalog, checked_group_id(group_id), names, complete=complete)
    return replace(settled(catalog.servers, found, is_named=names is not None), **searched)


def settled(servers: Servers, group: Assembled, *, is_named: bool) -> GroupPosition:
    """A group's position; copies that an exchange routed to other streams are no duplicates."""
    numbers = {member.sequence for member in named(group.duplicates)}
    disputed = tuple(member for member in named(group.rows) if member.sequence in numbers)
    if len({member.stream for member in named(disputed + group.duplicates)}) < 2:
        return group.position
    alone = replace(group, rows=disputed, expired=())
    with closing(read_on(servers, alone.retained)) as reading:
        read, messages = read_group(reading, alone, "logical", is_named=is_named)
    if read is not alone:
        return group.position
    return as_group(alone, messages).position


def group(catalog: Catalog, group_id: str, streams: Names, order: GroupOrder, *, complete: bool) -> Group:
    """What there is of a group."""
    check_order(order)
    names = names_of("streams", streams)
    asked = partial(_group, catalog, checked_group_id(group_id), names, order=order, complete=complete)
    return again_if_replaced(catalog, asked, leaves_out=names is None)


def _group(catalog: Catalog, group_id: str, names: _Names, *, order: GroupOrder, complete: bool) -> Group:
    found, searched = assembled(catalog, group_id, names, order=order, complete=complete)
    with closing(read_on(catalog.servers, found.retained)) as reading:
        found, messages = read_group(reading, found, order, is_named=names is not None)
    return as_group(replace(found, position=replace(found.position, **searched)), messages)


def grouped(catalog: Catalog, group_id: str, sequence: int, streams: Names, *, complete: bool) -> Answer:
    """The messages of one number of a group: those that are its last, and those that are not."""
    names = names_of("streams", streams)
    place = checked_group_id(group_id), checked_sequence(sequence)
    group_key(catalog)
    values = [Membership(*place, last).value for last in (False, True)]
    definition = catalog.definition(GROUP_KEY.name)
    question = Question(tuple(Wanted(definition, value) for value in values), names)
    return answer(catalog, question, complete=complete)


# --- many groups, as reports ------------------------------------------------------------------------------


def incomplete(catalog: Catalog, streams: Names, older_than: timedelta | float, *, complete: bool) -> list[GroupReport]:
    """The groups that are not complete, or not sound, and whose first message is old enough; oldest first."""
    seconds = older_than.total_seconds() if isinstance(older_than, timedelta) else older_than
    names, age_s = names_of("streams", streams), checked_seconds("older_than", seconds)
    before = time.time_ns() // 1_000 - round(age_s * 1_000_000)
    view = look(catalog, names, complete=complete)
    ids = iter(_suspects(view, before))
    reports: list[GroupReport] = []
    while part := list(islice(ids, _IDS_AT_ONCE)):
        for group_id, rows in view.members_of(part).items():
            found = assemble(group_id, rows, "physical", view.floors)
            times = _times(found)
            # What is gone altogether is no cause for concern, nor are duplicates alone. What retention has begun to
            # take is no whole group any more, whether or not its rows have been pruned.
            is_whole = not found.rows or (found.is_complete and found.flaw is None)
            if not is_whole and (not times or min(times) < before):
                reports.append(_report(catalog.servers, found, is_named=names is not None))
    return sorted(reports, key=lambda each: (each.first_seen is not None, each.first_seen, each.group_id))


# Each step is by the id alone: no other group has values between the id and its own values.
NEWEST: Final = sql(
    f"""
    WITH RECURSIVE walk (group_id, step) AS (
      SELECT :before::text COLLATE "C", 0
      UNION ALL
      SELECT last.group_id, walk.step + 1
      FROM walk
      CROSS JOIN LATERAL (
        SELECT split_part(r.value, '|', 1) COLLATE "C" AS group_id
        FROM relatum.relationships r
        WHERE r.key_id = :key_id::smallint AND r.value < walk.group_id
          AND {part_may_hold_values("r", ":key_id::smallint", "''", "walk.group_id")}
        ORDER BY r.value DESC
        LIMIT 1
      ) AS last
      WHERE walk.step < :most::bigint
    )
    SELECT group_id FROM walk WHERE step > 0 ORDER BY step
    """
)
"""Ids of groups that come before `before` in the order of ids, which is that of time, the last first: `most`.

Each takes one probe of each part's index: the greatest value before all of the group that was found last.
"""


def newest(catalog: Catalog, streams: Names, before: str | None, limit: int) -> GroupPage:
    """Groups as they are recorded, the newest first."""
    names = names_of("streams", streams)
    most = checked_count("limit", limit, least=0, most=_IDS_AT_ONCE)
    at: str | None = _BEHIND_ALL if before is None else checked_name("before", before)
    view = look(catalog, names, complete=False)
    if not most:
        return GroupPage((), before, view.gaps)
    reports: list[GroupReport] = []
    # Groups of other streams and virtual hosts are among them: a page ends after some rounds even if it is not full.
    for _ in range(_ROUNDS):
        wanted = most - len(reports)
        rows = catalog.servers.rows(NEWEST, {"key_id": view.key_id, "before": at, "most": wanted})
        ids = [group_id for (group_id,) in rows]
        members = view.members_of(ids)
        for group_id in ids:
            found = assemble(group_id, members.get(group_id, ()), "physical", view.floors)
            # What is gone altogether is none any more.
            if found.rows:
                reports.append(_report(catalog.servers, found, is_named=names is not None))
        at = (ids[-1] or None) if len(ids) == wanted else None
        if at is None or len(reports) == most:
            break
    return GroupPage(tuple(reports), at, view.gaps)


_SEQUENCE: Final = "split_part(r.value, '|', 2)"
_IS_RETAINED: Final = "r.stream_offset >= (:floors::bigint[])[array_position(:stream_ids::int[], r.stream_id)]"
"""A subscript and no join: which would tempt the planner to read the rows stream by stream, or again and again."""

# Other publishers may set the same headers to anything: such a value must not count as a number that is missing. A
# look at length and digits costs a tenth of a regular expression.
UNFINISHED: Final = sql(
    f"""
    SELECT split_part(r.value, '|', 1) AS group_id
    FROM relatum.relationships r
    WHERE r.key_id = :key_id::smallint AND r.stream_id = ANY (:stream_ids::int[])
      AND length({_SEQUENCE}) BETWEEN 1 AND 9 AND translate({_SEQUENCE}, '0123456789', '') = ''
      AND left({_SEQUENCE}, 1) <> '0' AND split_part(r.value, '|', 3) IN ('true', 'false')
    GROUP BY split_part(r.value, '|', 1)
    HAVING (
        min({_SEQUENCE}::bigint) FILTER (WHERE split_part(r.value, '|', 3) = 'true')
          IS DISTINCT FROM max({_SEQUENCE}::bigint)
        OR count(DISTINCT {_SEQUENCE}::bigint) <> max({_SEQUENCE}::bigint)
        OR NOT bool_and({_IS_RETAINED})
      )
      AND bool_or({_IS_RETAINED})
      AND coalesce(min(r.time_us) < :before::bigint, true)
    ORDER BY min(r.time_us) NULLS FIRST
    LIMIT :limit::bigint
    """
)
"""Ids of the groups in the streams `stream_ids` that are not whole, or not sound: at most `limit`, oldest first.

Whole and sound is a group whose one last number is its highest, whose numbers are as many, and of which the streams
have dropped no message: `floors` are their first retained offsets. What is gone altogether is left out. Only groups
whose first message is of a time before `before`, or of none. It reads every row of the key. An id may be none: other
publishers set the same headers.
"""


def _suspects(view: View, before: int) -> list[str]:
    """Ids of groups that the table does not show as whole, and of those that are not recorded yet."""
    floors = [view.floors[stream] for stream in view.numbers]
    parameters = {"key_id": view.key_id, "stream_ids": list(view.numbers.values()), "floors": floors}
    rows = view.servers.rows(UNFINISHED, parameters | {"before": before, "limit": ANSWER_MESSAGES_MAX + 1})
    if len(rows) > ANSWER_MESSAGES_MAX:
        raise InvalidInput(
            f"more than {ANSWER_MESSAGES_MAX:,} groups are not complete: ask for one stream, or for older ones"
        )
    return list(dict.fromkeys([*(group_id for (group_id,) in rows), *view.unrecorded_groups]))


def _times(found: Assembled) -> list[int]:
    members = named((*found.retained, *found.expired))
    return [member.time_us for member in members if member.time_us is not None]


def _report(servers: Servers, found: Assembled, *, is_named: bool) -> GroupReport:
    """What is known of a group."""
    times = _times(found)
    first, last = (moment(min(times)), moment(max(times))) if times else (None, None)
    members = sorted(named(found.retained), key=lambda each: (each.time_us or 0, each.stream, each.offset))
    position = settled(servers, found, is_named=is_named)
    return GroupReport(found.group_id, position, first, last, tuple(member.id for member in members))
