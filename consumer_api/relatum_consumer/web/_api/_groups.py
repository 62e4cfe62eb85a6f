"""Message groups: those that are not whole, what each lacks, the consumers that share them, and one group."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final, TypeAlias

from relatum.errors import RelatumError
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.membership import GROUP_KEY
from relatum.waiting import within
from relatum_consumer.groups import GroupConsumerStatus, GroupPage, GroupReport
from relatum_consumer.web._api._cursors import cursor_of, read_cursor
from relatum_consumer.web._api._group_facts import (
    NARROWER,
    GroupFacts,
    answered,
    group_facts,
    id_at,
    is_much,
    is_unsound,
    recorded_by_key,
)
from relatum_consumer.web._api._shown import Place
from relatum_consumer.web._endpoint import Endpoint, ms_since, words_of
from relatum_consumer.web._parameters import Parameter
from relatum_consumer.web._site import Site

GROUPS_KEPT_S: Final = 10.0
"""Seconds for which the list is kept: every row of the key is looked at for it, a second for each million."""

CONSUMERS_LISTED: Final = 10
CONSUMERS_S: Final = 3.0
"""Seconds for all consumers of the page together: what they know of their groups is counted."""

_PLACES_LISTED: Final = 5
_RANGES_LISTED: Final = 20
_DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class GroupsAsked:
    """Which groups, page by page."""

    show: Annotated[
        str, Parameter("Those that are not whole; or all, the newest first.", choices=("unfinished", "all"))
    ] = "unfinished"

    stream: Annotated[
        tuple[str, ...], Parameter("Streams and super streams; all that are recorded where left out.")
    ] = ()
    older_s: Annotated[
        int,
        Parameter(
            "Of those that are not whole: only groups whose first message is so many seconds old.",
            least=0,
            most=3650 * _DAY_S,
        ),
    ] = 3_600
    limit: Annotated[int, Parameter("Groups of a page.", least=1, most=500)] = 50
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group; `places` are the first messages of `places_count`."""

    group: GroupFacts
    first_seen: datetime | None
    last_seen: datetime | None
    places: tuple[Place, ...]
    places_count: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a consumer, and how many groups it has claimed."""

    holder: str
    claimed: int
    is_alive: bool
    lease_expires_at: datetime


@dataclass(frozen=True, slots=True)
class GroupsByState:
    """How many groups a consumer knows in a state: open (not complete), ready, claimed, done, dead."""

    state: str
    count: int


@dataclass(frozen=True, slots=True)
class GroupConsumerRow:
    """A consumer that shares groups; `error` says why no more is known of it. `lag_offsets` is of all its streams."""

    name: str
    error: str
    counts: tuple[GroupsByState, ...]
    oldest_waiting_at: datetime | None
    oldest_open_at: datetime | None
    lag_offsets: int
    members: tuple[GroupMember, ...]


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """Offsets from `start` to before `stop` of a stream that are not recorded by the key of groups."""

    stream: str
    start: int
    stop: int
    href: str


@dataclass(frozen=True, slots=True)
class GroupsAnswer:
    """A page of groups: all, the newest first; or those that are not whole, with how many there are.

    Of those that are not whole the incomplete ones come first, then the unsound ones, the oldest first of each.
    What is told is as recorded where there is much that is not: the first twenty such parts are `unrecorded`, of
    `unrecorded_count`. A group of which a part lies there may be whole. `consumers` are the first ten of
    `consumers_count`.
    """

    groups: tuple[GroupRow, ...]
    incomplete: int | None
    unsound: int | None
    older_s: int
    unrecorded: tuple[Unrecorded, ...]
    unrecorded_count: int
    consumers: tuple[GroupConsumerRow, ...]
    consumers_count: int
    next: str | None
    next_href: str | None
    took_ms: float


async def groups(site: Site, asked: GroupsAsked) -> GroupsAnswer:
    """Answer one page."""
    began = time.perf_counter()
    definitions = await site.keys()
    with answered(site):
        page, cursor, recorded, counts = await (_newest if asked.show == "all" else _unfinished)(site, asked)
    unrecorded = () if recorded is None else recorded.unrecorded
    names, consumers = await _consumers(site)
    return GroupsAnswer(
        groups=tuple(_group_row(site, definitions, each) for each in page),
        incomplete=None if counts is None else counts[0],
        unsound=None if counts is None else counts[1],
        older_s=asked.older_s,
        unrecorded=tuple(
            Unrecorded(each.stream, each.start, each.stop, site.links.stream(each.stream))
            for each in unrecorded[:_RANGES_LISTED]
        ),
        unrecorded_count=len(unrecorded),
        consumers=consumers,
        consumers_count=names,
        next=cursor,
        next_href=cursor and site.links.asked("/groups", replace(asked, cursor=cursor)),
        took_ms=ms_since(began),
    )


_Page: TypeAlias = tuple[Sequence[GroupReport], str | None, GroupPage | None, tuple[int, int] | None]
"""Groups, the next page's cursor, what says what is not recorded, and how many there are, incomplete and unsound."""


async def _newest(site: Site, asked: GroupsAsked) -> _Page:
    after = read_cursor(asked.cursor, str, str, int)
    before = None
    if after is not None:
        group_id, stream, offset = after
        before = group_id or await id_at(site, MessageId(stream, offset))
    found = await site.relations._newest_groups(asked.stream or None, before=before, limit=asked.limit)
    cursor = None
    if found.next is not None and not await _is_masked(site):
        cursor = cursor_of(found.next, "", 0)
    elif found.next is not None and found.groups:
        # An id that is secret is none of a link: the last group goes by a message.
        cursor = cursor_of("", *found.groups[-1].places[0])
    return found.groups, cursor, found, None


async def _unfinished(site: Site, asked: GroupsAsked) -> _Page:
    after = read_cursor(asked.cursor, int, str, str, int)
    recorded = await recorded_by_key(site, asked.stream)
    complete = not is_much(recorded)
    ask = partial(site.relations.incomplete_groups, asked.stream or None, older_than=asked.older_s, complete=complete)
    with within(site.options.timeout_s):
        reports = await site.lately(("groups", asked.stream, asked.older_s, complete), GROUPS_KEPT_S, ask)
    found = sorted(((_rank(each), each) for each in reports), key=lambda each: each[0])
    left = [each for each in found if after is None or each[0] > tuple(after)]
    page = left[: asked.limit]
    cursor = cursor_of(*page[-1][0]) if len(left) > len(page) else None
    unsound = sum(is_unsound(each.position) for each in reports)
    told = None if complete else recorded
    return [each for _, each in page], cursor, told, (len(reports) - unsound, unsound)


async def _is_masked(site: Site) -> bool:
    return any(each.name == GROUP_KEY.name and site.masking.is_masked(each) for each in await site.keys())


def _rank(report: GroupReport) -> tuple[int, str, str, int]:
    """A group's place in the list; one without a time counts as old."""
    first = "" if report.first_seen is None else report.first_seen.astimezone(UTC).isoformat(timespec="microseconds")
    place = report.places[0] if report.places else MessageId("", 0)
    return int(is_unsound(report.position)), first, place.stream, place.offset


def _group_row(site: Site, definitions: Sequence[KeyDefinition], report: GroupReport) -> GroupRow:
    place = report.places[0] if report.places else None
    return GroupRow(
        group=group_facts(site, definitions, report.position, place),
        first_seen=report.first_seen,
        last_seen=report.last_seen,
        places=tuple(Place(*each, site.links.message(*each)) for each in report.places[:_PLACES_LISTED]),
        places_count=len(report.places),
    )


async def _consumers(site: Site) -> tuple[int, tuple[GroupConsumerRow, ...]]:
    names = await site.relations.group_consumers()
    rows = []
    with within(CONSUMERS_S):
        for name in names[:CONSUMERS_LISTED]:
            ask = partial(site.relations.group_consumer_status, name)
            try:
                rows.append(_consumer_row(await site.lately(("group consumer", name), GROUPS_KEPT_S, ask)))
            except RelatumError as error:
                rows.append(GroupConsumerRow(name, words_of(site, error), (), None, None, 0, ()))
    return len(names), tuple(rows)


def _consumer_row(status: GroupConsumerStatus) -> GroupConsumerRow:
    return GroupConsumerRow(
        name=status.consumer,
        error="",
        counts=tuple(GroupsByState(*each) for each in status.counts.items()),
        oldest_waiting_at=status.oldest_waiting_at,
        oldest_open_at=status.oldest_open_at,
        lag_offsets=sum(each.lag_offsets or 0 for each in status.sources),
        members=tuple(
            GroupMember(each.holder, each.claimed, each.is_alive, each.lease_expires_at) for each in status.members
        ),
    )


GROUPS = Endpoint(
    "/groups",
    "Message groups that are not whole and what they lack, or all of them; and the consumers that share groups.",
    GroupsAsked,
    GroupsAnswer,
    groups,
    template="groups.html",
    page="groups",
    empty="key_not_defined",
    narrower=NARROWER,
)
