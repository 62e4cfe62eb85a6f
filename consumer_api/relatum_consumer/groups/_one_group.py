"""Queries of one group by its id (messages, one number, position), and reports of incomplete and of newest groups."""

import time
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, get_args

from relatum.common.checks import checked_choice, checked_count, checked_name, checked_seconds
from relatum.errors import InvalidInput
from relatum.keys import moment
from relatum.membership import GROUP_KEY, GroupPosition, Membership, checked_group_id, checked_sequence
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.groups._assembly import Assembled, GroupOrder, View, assemble, group_key, named, present_view
from relatum_consumer.groups._reading import Group, GroupPage, GroupReport, as_group, floors_of, read_group, read_on
from relatum_consumer.lookups.answer import Answer
from relatum_consumer.lookups.answering import ANSWER_MESSAGES_MAX, retry_if_replaced
from relatum_consumer.lookups.arguments import Names, names_of
from relatum_consumer.lookups.by_key import Question, answer
from relatum_consumer.lookups.catalog import Catalog, Wanted
from relatum_consumer.lookups.proof import evidence
from relatum_consumer.lookups.servers import Servers
from relatum_consumer.lookups.telemetry import Lookups, lookup

_Names = tuple[str, ...] | None

_PAGE_GROUPS_MAX = 1_000
"""Maximum number of groups on one page."""

_ROUNDS = 5
"""Maximum number of queries for one page."""

_AFTER_ALL_IDS = "g"
"""Sorts after all ids, which are hexadecimal digits."""


def assembled(
    catalog: Catalog, group_id: str, names: _Names, *, order: GroupOrder = "logical", complete: bool
) -> tuple[Assembled, dict[str, Any]]:
    """Return a group's present state, and the fields of its position that describe the streams searched."""
    key_id = group_key(catalog)
    catalog.check_names(names)
    known = evidence(catalog, names, [key_id]) if complete else None
    recorded = catalog.streams(names)
    if names is None and not recorded:
        catalog.nothing_recorded()
    view = View.of_table(catalog.servers, key_id, recorded)
    if known is not None:
        view.add_unrecorded(known, group_id)
    rows = view.members_of([group_id]).get(group_id, [])
    if known is not None:
        known.check_present(catalog, names, [key_id])
    floors = floors_of(catalog.servers, (row[3] for row in rows), is_named=names is not None)
    group = assemble(group_id, rows, order, floors)
    streams = {stream.name for stream in recorded} | {*(names or ()), *(known.streams if known else ())}
    if names is None:
        streams |= {stream.super_stream for stream in recorded if stream.super_stream is not None}
    refused = {each.stream for each in known.unreadable_streams} if known else set()
    return group, {
        "streams": tuple(sorted(streams - refused)),
        "is_of_all": names is None and not refused,
        "is_proven": known is not None and not known.unproven and not refused,
    }


def position_of(servers: Servers, group: Assembled, *, is_named: bool) -> GroupPosition:
    """Return a group's position. Copies that an exchange routed to other streams are not duplicates."""
    numbers = {member.sequence for member in named(group.duplicates)}
    duplicated = tuple(member for member in named(group.rows) if member.sequence in numbers)
    if len({member.stream for member in named(duplicated + group.duplicates)}) < 2:
        return group.position
    part = replace(group, rows=duplicated, expired=())
    with closing(read_on(servers, part.retained)) as reading:
        read, messages = read_group(reading, part, "logical", is_named=is_named)
    if read is not part:
        return group.position
    return as_group(part, messages).position


def _group(catalog: Catalog, group_id: str, names: _Names, *, order: GroupOrder, complete: bool) -> Group:
    found, searched = assembled(catalog, group_id, names, order=order, complete=complete)
    with closing(read_on(catalog.servers, found.retained)) as reading:
        found, messages = read_group(reading, found, order, is_named=names is not None)
    return as_group(replace(found, position=replace(found.position, **searched)), messages)


def _position(catalog: Catalog, group_id: str, names: _Names, *, complete: bool) -> GroupPosition:
    found, searched = assembled(catalog, group_id, names, complete=complete)
    return replace(position_of(catalog.servers, found, is_named=names is not None), **searched)


# The separator sorts after all digits. With it, the bound sorts after the longer ids that begin with this id, which
# other publishers may write; the id alone would sort before them.
_BEFORE: Final = "walk.group_id || '|' COLLATE \"C\""

NEWEST: Final = sql(f"""
    WITH RECURSIVE walk (group_id, step) AS (
      SELECT :before::text COLLATE "C", 0
      UNION ALL
      SELECT last.group_id, walk.step + 1
      FROM walk
      CROSS JOIN LATERAL (
        SELECT split_part(r.value, '|', 1) COLLATE "C" AS group_id
        FROM relatum.relationships r
        WHERE r.key_id = :key_id::smallint AND r.value < {_BEFORE}
          AND {part_may_hold_values("r", ":key_id::smallint", "''", _BEFORE)}
        ORDER BY r.value DESC
        LIMIT 1
      ) AS last
      WHERE walk.step < :most::bigint
    )
    SELECT group_id FROM walk WHERE step > 0 ORDER BY step""")
"""Selects up to `most` ids of groups below `before`, in descending order of ids: the newest groups first.

Each id takes one probe of each part's index, for the greatest value below all values of the previous group.
"""

_SEQUENCE: Final = "split_part(r.value, '|', 2)"
_IS_RETAINED: Final = "r.stream_offset >= (:floors::bigint[])[array_position(:stream_ids::int[], r.stream_id)]"
"""A subscript, not a join: with a join, the planner may read the rows stream by stream, or repeatedly."""

# Other publishers may set the same headers to any value, and such a value must not count as a missing number. Checking
# the length and the digits takes a tenth of the time of a regular expression.
UNFINISHED: Final = sql(f"""
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
    LIMIT :limit::bigint""")
"""Selects the ids of the incomplete or unsound groups in the streams `stream_ids`: at most `limit`, oldest first.

A group is complete and sound if its only last number is its highest, as many numbers are present, and retention has
dropped none of its messages (`floors` are the streams' first retained offsets). Groups without retained messages are
left out, and so are groups whose first message has a time of `before` or later. The query reads every row of the key.
An id may be invalid, since other publishers may set the same headers.
"""


def _candidates(view: View, before: int) -> list[str]:
    """Return the ids of groups that are incomplete or unsound in the table, and of groups with unrecorded messages."""
    floors = [view.floors[stream] for stream in view.numbers]
    parameters = {"key_id": view.key_id, "stream_ids": list(view.numbers.values()), "floors": floors}
    rows = view.servers.rows(UNFINISHED, parameters | {"before": before, "limit": ANSWER_MESSAGES_MAX + 1})
    if len(rows) > ANSWER_MESSAGES_MAX:
        raise InvalidInput(
            f"more than {ANSWER_MESSAGES_MAX:,} groups are incomplete: name one stream, or raise older_than="
        )
    return list(dict.fromkeys([*(group_id for (group_id,) in rows), *view.unrecorded_groups]))


def _times(found: Assembled) -> list[int]:
    return [row[5] for row in found.members if row[5] is not None]


def _report(servers: Servers, found: Assembled, *, is_named: bool) -> GroupReport:
    times = _times(found)
    first, last = (moment(min(times)), moment(max(times))) if times else (None, None)
    members = sorted(named(found.retained), key=lambda each: (each.time_us or 0, each.stream, each.offset))
    position = position_of(servers, found, is_named=is_named)
    return GroupReport(found.group_id, position, first, last, tuple(member.id for member in members))


class OneGroupMethods:
    """The methods of `Relations` that read one group or report groups."""

    _catalog: Catalog
    _lookups: Lookups

    def incomplete_groups(
        self, streams: Names = None, *, older_than: timedelta | float, complete: bool = True
    ) -> list[GroupReport]:
        """Return reports of the groups that are incomplete or contradictory, oldest first.

        A report is definite if its `position.is_proven`: otherwise the group may have more messages, for example in a
        stream that cannot be read. The log names such streams. A group that retention has begun to drop has the anomaly
        `expired`; after its rows were pruned, its first numbers are missing.

        Args:
            streams: As for `groups`.
            older_than: Minimum age of a group's first message: a `timedelta` or seconds. Groups without times are old.
            complete: True (default) also reads retained messages that are not recorded yet, including all messages that
                were published before the key `message_group` was defined. False reads only recorded messages.

        Raises:
            InvalidInput: there are more than 100,000 such groups.
        """
        with self._lookups.counted("incomplete_groups", None):
            seconds = older_than.total_seconds() if isinstance(older_than, timedelta) else older_than
            names, age_s = names_of("streams", streams), checked_seconds("older_than", seconds)
            before = time.time_ns() // 1_000 - round(age_s * 1_000_000)
            attempt = partial(self._incomplete_groups, names, before, complete=complete)
            return retry_if_replaced(self._catalog, attempt, leaves_out=names is None)

    def _incomplete_groups(self, names: tuple[str, ...] | None, before: int, *, complete: bool) -> list[GroupReport]:
        view, known = present_view(self._catalog, names, complete=complete)
        reports: list[GroupReport] = []
        for found in view.groups(_candidates(view, before), "physical"):
            times = _times(found)
            # Duplicates alone are not reported. A group that retention has begun to drop is reported, whether or not
            # its rows have been pruned.
            is_sound = not found.rows or (found.is_complete and found.flaw is None)
            if not is_sound and (not times or min(times) < before):
                reports.append(_report(self._catalog.servers, found, is_named=names is not None))
        known.check_present(self._catalog, names, [view.key_id])
        is_proven = complete and not (known.unproven or known.unreadable_streams)
        reports = [replace(each, position=replace(each.position, is_proven=is_proven)) for each in reports]
        return sorted(reports, key=lambda each: (each.first_seen is not None, each.first_seen, each.group_id))

    @lookup
    def group(
        self, group_id: str, *, streams: Names = None, order: GroupOrder = "logical", complete: bool = True
    ) -> Group:
        """Return one group, complete or not; `group.position` has its progress and anomalies.

        Args:
            group_id: 48 hexadecimal digits.
            streams: As for `groups`.
            order: As for `groups`.
            complete: True (default) also reads retained messages that are not recorded yet.

        Returns:
            The group; it is empty if the group has no messages.

        Raises:
            InvalidGroup: the id is invalid.
        """
        checked_choice("order", order, get_args(GroupOrder))
        names = names_of("streams", streams)
        attempt = partial(_group, self._catalog, checked_group_id(group_id), names, order=order, complete=complete)
        return retry_if_replaced(self._catalog, attempt, leaves_out=names is None)

    @lookup
    def grouped(self, group_id: str, sequence: int, *, streams: Names = None, complete: bool = False) -> Answer:
        """Return the messages of a group with one number: several if there are duplicates, oldest first.

        Args:
            group_id: 48 hexadecimal digits.
            sequence: The number, from 1 to 999,999,999.
            streams: As for `groups`.
            complete: As for `find`.

        Returns:
            The messages and the status, as `find` returns them.

        Raises:
            InvalidGroup: the id or the number is invalid.
        """
        names = names_of("streams", streams)
        place = checked_group_id(group_id), checked_sequence(sequence)
        group_key(self._catalog)
        values = [Membership(*place, last).value for last in (False, True)]
        definition = self._catalog.definition(GROUP_KEY.name)
        question = Question(tuple(Wanted(definition, value) for value in values), names)
        return answer(self._catalog, question, complete=complete)

    @lookup
    def group_position(self, group_id: str, *, streams: Names = None, complete: bool = True) -> GroupPosition:
        """Return a group's position, with which a publisher continues the group after a failure.

        Args:
            group_id: 48 hexadecimal digits.
            streams: As for `groups`. To continue the group, name the streams to which its messages go. None (default)
                searches the recorded streams: after a kill, a new stream may not be recorded yet, so
                `MessageGroup.resume` refuses such a position.
            complete: True (default) also reads retained messages that are not recorded yet. With False the position may
                be too old to continue from: the publisher would send duplicates.

        Returns:
            The position, with the streams searched; for a group without messages, the position of a new group.

        Raises:
            InvalidGroup: the id is invalid.
        """
        names = names_of("streams", streams)
        attempt = partial(_position, self._catalog, checked_group_id(group_id), names, complete=complete)
        return retry_if_replaced(self._catalog, attempt, leaves_out=names is None)

    @lookup
    def _newest_groups(self, streams: Names = None, *, before: str | None = None, limit: int = 100) -> GroupPage:
        """Return a page of recorded groups, complete or not, for the web page; the newest groups first.

        It reads only the index, in the order of ids, which begin with the creation time. `before` is `next` of the
        previous page. A `limit` of 0 returns only the unrecorded ranges. A page may be short although another follows.
        """
        names = names_of("streams", streams)
        most = checked_count("limit", limit, least=0, most=_PAGE_GROUPS_MAX)
        bound: str | None = _AFTER_ALL_IDS if before is None else checked_name("before", before)
        attempt = partial(present_view, self._catalog, names, complete=False)
        view, known = retry_if_replaced(self._catalog, attempt, leaves_out=names is None)
        if not most:
            return GroupPage((), before, tuple(known.uncovered))
        reports: list[GroupReport] = []
        # The ids include groups of other streams and virtual hosts, so the rounds are limited: a page may be short.
        for _ in range(_ROUNDS):
            wanted = most - len(reports)
            rows = self._catalog.servers.rows(NEWEST, {"key_id": view.key_id, "before": bound, "most": wanted})
            ids = [group_id for (group_id,) in rows]
            # Skip groups without retained messages.
            found = [group for group in view.groups(ids, "physical") if group.rows]
            reports += [_report(self._catalog.servers, group, is_named=names is not None) for group in found]
            bound = ids[-1] if len(ids) == wanted else None
            if bound is None or len(reports) == most:
                break
        return GroupPage(tuple(reports), bound, tuple(known.uncovered))
