"""Message groups: unfinished groups with their missing numbers, group consumers, and one group with its messages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Final, Literal

from pydantic import Field

from relatum.common.ids import MessageId
from relatum.common.waiting import within
from relatum.errors import InvalidInput, RelatumError
from relatum.membership import GROUP_KEY, Anomaly, GroupPosition, Membership, membership
from relatum.reading import Message
from relatum_consumer import GroupConsumerStatus
from relatum_consumer.groups import GroupReport
from relatum_consumer.lookups.proof import Uncovered
from relatum_consumer.web.endpoint import endpoint, failure_text
from relatum_consumer.web.messages import MessageRow, message_rows
from relatum_consumer.web.parameters import Number, Parameters, TextList, cursor_of, read_cursor
from relatum_consumer.web.site import Site

GROUPS_CACHE_S: Final = 10.0
"""Seconds for which lists are cached: each list scans all rows of the group key, about a million a second."""

CONSUMERS_LISTED: Final = 10
CONSUMERS_S: Final = 3.0
"""Seconds that a page may spend on counting its consumers' groups."""

UNRECORDED_READ: Final = 20_000
"""Maximum offsets not recorded for the group key that an answer reads from the streams, in about 100 ms. If there are
more, the answer covers only recorded messages, and names the unrecorded parts."""

_PLACES_LISTED: Final = 5
_RANGES_LISTED: Final = 20
_EXPIRED_LISTED: Final = 100


def _position(site: Site, position: GroupPosition) -> GroupPosition:
    """Return a group's position for display: its id is a digest if the group key is masked."""
    group_id = site.masking.shown(GROUP_KEY.name, position.group_id)
    return replace(position, group_id=group_id, missing=position.missing[:_RANGES_LISTED])


def _report(site: Site, report: GroupReport) -> GroupReport:
    position = _position(site, report.position)
    return GroupReport(position.group_id, position, report.first_seen, report.last_seen, report.places[:_PLACES_LISTED])


def _is_contradictory(position: GroupPosition) -> bool:
    """Whether no message can complete the group. Duplicates contradict nothing: the first message is used."""
    return any(each is not Anomaly.DUPLICATE for each in position.anomalies)


async def _unrecorded_backlog(site: Site, streams: tuple[str, ...] = ()) -> tuple[Uncovered, ...]:
    """Return the offsets not recorded for the group key if they are too many to read; otherwise none."""
    found = (await site.relations._newest_groups(streams or None, limit=0)).unrecorded
    return found if sum(each.stop - each.start for each in found) > UNRECORDED_READ else ()


def _membership_of(message: Message) -> Membership:
    found = membership(message.headers)
    if found is None:
        raise InvalidInput(f"the message {message.id} belongs to no group")
    return found


async def _group_id_at(site: Site, place: MessageId) -> str:
    return _membership_of(await site.relations.read(*place)).group_id


# --- groups -----------------------------------------------------------------------------------------------


class GroupsParameters(Parameters):
    show: Literal["unfinished", "all"] = Field(
        "unfinished", description="Unfinished groups; or all groups, newest first."
    )
    stream: TextList = Field((), description="Streams and super streams; all recorded ones by default.")
    older_s: Number = Field(0, description="For unfinished groups: minimum age of the first message, in seconds.")
    limit: int = Field(500, ge=1, le=500, description="Maximum groups.")
    cursor: str = Field("", description="For all groups: `next` of the previous page.")


@dataclass(frozen=True, slots=True)
class GroupsAnswer:
    """A page of all groups, newest first; or of the unfinished groups, with their counts.

    Among the unfinished groups, incomplete groups come before contradictory groups and groups that lost a message, each
    oldest first. A group's id is a digest if the group key is masked: request such a group by one of its messages.
    Each group has its first five `places` and the first twenty ranges of `missing`. `unrecorded` has the first twenty
    of `unrecorded_count` ranges of offsets that are not recorded and may hold messages of groups. `consumers` has the
    first ten of `consumers_count`, each with its status, or the reason why its status is unknown.
    """

    groups: tuple[GroupReport, ...]
    incomplete: int | None
    contradictory: int | None
    unrecorded: tuple[Uncovered, ...]
    unrecorded_count: int
    consumers: dict[str, GroupConsumerStatus | str]
    consumers_count: int
    next: str | None


@endpoint(
    "/groups",
    "Unfinished message groups with their missing numbers, or all groups; and the group consumers.",
    empty="key_not_defined",
)
async def groups(site: Site, query: GroupsParameters) -> GroupsAnswer:
    page: Sequence[GroupReport]
    cursor = incomplete = contradictory = None
    if query.show == "all":
        after = read_cursor(query.cursor, tuple[str, Number])
        # The cursor names a message of the last group: the group's id may be secret, and cursors are in URLs.
        before = None if after is None else await _group_id_at(site, MessageId(*after))
        load = partial(site.relations._newest_groups, query.stream or None, limit=query.limit)
        newest = await load(before=before)
        # A page is empty if it passed only groups of other streams and virtual hosts.
        while newest.next is not None and not newest.groups:
            newest = await load(before=newest.next)
        page, unrecorded = newest.groups, newest.unrecorded
        cursor = None if newest.next is None else cursor_of(*page[-1].places[0])
    else:
        unrecorded = await _unrecorded_backlog(site, query.stream)
        reports = await _unfinished(site, query, complete=not unrecorded)
        contradictory = sum(_is_contradictory(each.position) for each in reports)
        incomplete, page = len(reports) - contradictory, reports[: query.limit]
    names = await site.relations.group_consumers()
    return GroupsAnswer(
        groups=tuple(_report(site, each) for each in page),
        incomplete=incomplete,
        contradictory=contradictory,
        unrecorded=unrecorded[:_RANGES_LISTED],
        unrecorded_count=len(unrecorded),
        consumers=await _consumers(site, names[:CONSUMERS_LISTED]),
        consumers_count=len(names),
        next=cursor,
    )


async def _unfinished(site: Site, query: GroupsParameters, *, complete: bool) -> Sequence[GroupReport]:
    older_s = query.older_s
    load = partial(site.relations.incomplete_groups, query.stream or None, older_than=older_s, complete=complete)
    with within(site.options.timeout_s):
        reports = await site.cached(("groups", query.stream, older_s, complete), GROUPS_CACHE_S, load)
    # Groups without a time count as oldest.
    oldest = datetime.min.replace(tzinfo=UTC)
    return sorted(
        reports, key=lambda each: (_is_contradictory(each.position), each.first_seen or oldest, each.places[:1])
    )


async def _consumers(site: Site, names: Sequence[str]) -> dict[str, GroupConsumerStatus | str]:
    found: dict[str, GroupConsumerStatus | str] = {}
    with within(CONSUMERS_S):
        for name in names:
            load = partial(site.relations.group_consumer_status, name)
            try:
                found[name] = await site.cached(("group consumer", name), GROUPS_CACHE_S, load)
            except RelatumError as error:
                found[name] = failure_text(site, error)
    return found


# --- one group --------------------------------------------------------------------------------------------


class GroupParameters(Parameters):
    id: str = Field("", description="The group's id, 48 hexadecimal digits.")
    of_stream: str = Field("", description="Instead of an id: the stream of a message of the group …")
    of_offset: Number | None = Field(None, description="… and its offset.")
    limit: int = Field(100, ge=1, le=1_000, description="Messages on a page.")
    cursor: Number = Field(0, description="`next` of the previous page.")


@dataclass(frozen=True, slots=True)
class GroupMessage:
    """A message of a group, with its number in the group."""

    sequence: int
    is_last: bool
    is_duplicate: bool
    message: MessageRow


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """A group, and a page of its messages by number. `expired`: the ids of messages that retention has dropped."""

    group: GroupPosition
    results: tuple[GroupMessage, ...]
    expired: tuple[MessageId, ...]
    next: int | None


@endpoint("/groups/group", "A message group, with its messages by number.")
async def group(site: Site, query: GroupParameters) -> GroupAnswer:
    group_id = query.id
    if query.of_offset is not None:
        group_id = await _group_id_at(site, MessageId(query.of_stream, query.of_offset))
    if not group_id:
        raise InvalidInput("id is missing: give the group's id, 48 hexadecimal digits")
    found = await site.relations.group(group_id, complete=not await _unrecorded_backlog(site))
    numbered = [(_membership_of(each), each) for each in (*found, *found.duplicates)]
    numbered.sort(key=lambda each: (each[0].sequence, each[1].id))
    stop = query.cursor + query.limit
    page = numbered[query.cursor : stop]
    duplicates = {each.id for each in found.duplicates}
    rows = message_rows(site, [message for _, message in page])
    return GroupAnswer(
        group=_position(site, found.position),
        results=tuple(
            GroupMessage(number.sequence, number.last, message.id in duplicates, row)
            for (number, message), row in zip(page, rows, strict=True)
        ),
        expired=found.expired[:_EXPIRED_LISTED],
        next=stop if stop < len(numbered) else None,
    )
