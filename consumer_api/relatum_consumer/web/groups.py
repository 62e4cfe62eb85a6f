"""Message groups: those that are not whole, what each lacks, the consumers that share them, and one group."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final, Literal, TypeAlias

from relatum.errors import InvalidInput, RelatumError
from relatum.ids import MessageId
from relatum.membership import GROUP_KEY, Anomaly, GroupPosition, membership
from relatum.waiting import within
from relatum_consumer import GroupConsumerStatus
from relatum_consumer.groups import GroupReport
from relatum_consumer.lookups.proof import Uncovered
from relatum_consumer.web.cursors import cursor_of, page_of_list, read_cursor
from relatum_consumer.web.endpoint import endpoint, words_of
from relatum_consumer.web.messages import MessageRow, message_row
from relatum_consumer.web.parameters import Parameter
from relatum_consumer.web.site import Site

GROUPS_KEPT_S: Final = 10.0
"""Seconds for which the list is kept: every row of the key is looked at for it, a second for each million."""

CONSUMERS_LISTED: Final = 10
CONSUMERS_S: Final = 3.0
"""Seconds for all consumers of the page together: what they know of their groups is counted."""

UNRECORDED_READ: Final = 20_000
"""Offsets that are not recorded by the key of groups and are read all the same: some 100 ms. A recorder that is a
little behind so leaves nothing open; where there are more, what is recorded is told, and what is not is named."""

_NARROWER: Final = "Every row of the key is looked at: name one stream, or ask for older groups."

_PLACES_LISTED: Final = 5
_RANGES_LISTED: Final = 20
_EXPIRED_LISTED: Final = 100

_WRONG: Final = {
    Anomaly.DUPLICATE: "a number is there twice",
    Anomaly.TWO_LASTS: "two messages say that they are the last",
    Anomaly.PAST_LAST: "a number lies behind the last",
    Anomaly.EXPIRED: "retention has taken a message",
}


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group. `group_id` is a digest where the key of groups is masked: it is then asked for by one of its messages.

    `state` is complete, incomplete (a number, or the last, is missing), unsound (no message can make it whole any more:
    it contradicts itself, or has lost one), or none; `words` says what is missing or wrong. `missing` are ranges of
    numbers, the first twenty of `missing_count`.
    """

    group_id: str
    is_masked: bool
    state: Literal["complete", "incomplete", "unsound", "none"]
    words: str
    seen: int
    highest: int
    last: int | None
    next_sequence: int
    missing: tuple[tuple[int, int], ...]
    missing_count: int


def _facts(site: Site, position: GroupPosition) -> GroupFacts:
    is_masked = _is_masked(site)
    state, words = _state(position)
    return GroupFacts(
        group_id=site.masking.digest(position.group_id) if is_masked else position.group_id,
        is_masked=is_masked,
        state=state,
        words=words,
        seen=position.seen,
        highest=position.highest,
        last=position.last_sequence,
        next_sequence=position.next_sequence,
        missing=tuple(position.missing[:_RANGES_LISTED]),
        missing_count=len(position.missing),
    )


def _is_masked(site: Site) -> bool:
    definition = site.definitions.get(GROUP_KEY.name)
    return definition is not None and site.masking.is_masked(definition)


def _is_unsound(position: GroupPosition) -> bool:
    """A duplicate is no contradiction: the first counts."""
    return any(each is not Anomaly.DUPLICATE for each in position.anomalies)


def _state(position: GroupPosition) -> tuple[Literal["complete", "incomplete", "unsound", "none"], str]:
    wrong = [_WRONG[each] for each in position.anomalies]
    if not position.seen and not wrong:
        return "none", "nothing of it is there"
    if _is_unsound(position):
        return "unsound", "; ".join(wrong)
    if position.is_complete:
        return "complete", "; ".join(["complete", *wrong])
    missing = ["numbers are missing"] if position.missing else []
    last = ["the last message is not there"] if position.last_sequence is None else []
    return "incomplete", "; ".join([*missing, *last, *wrong])


async def _much_unrecorded(site: Site, streams: tuple[str, ...] = ()) -> tuple[Uncovered, ...]:
    """Offsets that are not recorded by the key of groups, where they are too many to be read beside."""
    found = (await site.relations._newest_groups(streams or None, limit=0)).unrecorded
    return found if sum(each.stop - each.start for each in found) > UNRECORDED_READ else ()


async def _id_at(site: Site, place: MessageId) -> str:
    message = await site.relations.read(*place)
    number = membership(message.headers)
    if number is None:
        raise InvalidInput(f"the message {message.id} is in no group")
    return number.group_id


# --- groups ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupsAsked:
    show: Annotated[Literal["unfinished", "all"], Parameter("Those that are not whole; or all, the newest first.")] = (
        "unfinished"
    )
    stream: Annotated[tuple[str, ...], Parameter("Streams and super streams; all recorded ones where left out.")] = ()
    older_s: Annotated[
        int, Parameter("Of those that are not whole: only groups whose first message is so many seconds old.")
    ] = 3_600
    limit: Annotated[int, Parameter("Groups at most.", least=1, most=500)] = 500
    cursor: Annotated[str, Parameter("Of all groups: `next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group; `places` are the first messages of `places_count`."""

    group: GroupFacts
    first_seen: datetime | None
    last_seen: datetime | None
    places: tuple[MessageId, ...]
    places_count: int


@dataclass(frozen=True, slots=True)
class GroupConsumerRow:
    """A consumer that shares groups; `error` says why no more is known of it."""

    name: str
    error: str
    status: GroupConsumerStatus | None


@dataclass(frozen=True, slots=True)
class GroupsAnswer:
    """A page of groups, all, the newest first; or those that are not whole, with how many there are.

    Of those that are not whole the incomplete ones come first, then the unsound ones, the oldest first of each.
    What is told is as recorded where there is much that is not: the first twenty such parts are `unrecorded`, of
    `unrecorded_count`. A group of which a part lies there may be whole. `consumers` are the first ten of
    `consumers_count`.
    """

    groups: tuple[GroupRow, ...]
    incomplete: int | None
    unsound: int | None
    older_s: int
    unrecorded: tuple[Uncovered, ...]
    unrecorded_count: int
    consumers: tuple[GroupConsumerRow, ...]
    consumers_count: int
    next: str | None


@endpoint(
    "/groups",
    "Message groups that are not whole and what they lack, or all of them; and the consumers that share groups.",
    template="groups.html",
    page="groups",
    empty="key_not_defined",
    narrower=_NARROWER,
)
async def groups(site: Site, asked: GroupsAsked) -> GroupsAnswer:
    await site.keys()  # which say what is masked
    page, cursor, unrecorded, counts = await (_newest if asked.show == "all" else _unfinished)(site, asked)
    names = await site.relations.group_consumers()
    return GroupsAnswer(
        groups=tuple(
            GroupRow(
                group=_facts(site, each.position),
                first_seen=each.first_seen,
                last_seen=each.last_seen,
                places=each.places[:_PLACES_LISTED],
                places_count=len(each.places),
            )
            for each in page
        ),
        incomplete=counts[0],
        unsound=counts[1],
        older_s=asked.older_s,
        unrecorded=unrecorded[:_RANGES_LISTED],
        unrecorded_count=len(unrecorded),
        consumers=await _consumers(site, names[:CONSUMERS_LISTED]),
        consumers_count=len(names),
        next=cursor,
    )


_Page: TypeAlias = tuple[Sequence[GroupReport], str | None, tuple[Uncovered, ...], tuple[int | None, int | None]]
"""Groups, the next page's cursor, what is not recorded, and how many groups there are, incomplete and unsound."""


async def _newest(site: Site, asked: GroupsAsked) -> _Page:
    after = read_cursor(asked.cursor, str, int)
    # The last group goes by a message: its id may be secret, and so no part of a link.
    before = None if after is None else await _id_at(site, MessageId(*after))
    found = await site.relations._newest_groups(asked.stream or None, before=before, limit=asked.limit)
    cursor = cursor_of(*found.groups[-1].places[0]) if found.next is not None and found.groups else None
    return found.groups, cursor, found.unrecorded, (None, None)


async def _unfinished(site: Site, asked: GroupsAsked) -> _Page:
    unrecorded = await _much_unrecorded(site, asked.stream)
    older_s, complete = asked.older_s, not unrecorded
    ask = partial(site.relations.incomplete_groups, asked.stream or None, older_than=older_s, complete=complete)
    with within(site.options.timeout_s):
        reports = await site.lately(("groups", asked.stream, older_s, complete), GROUPS_KEPT_S, ask)
    unsound = sum(_is_unsound(each.position) for each in reports)
    return sorted(reports, key=_rank)[: asked.limit], None, unrecorded, (len(reports) - unsound, unsound)


def _rank(report: GroupReport) -> tuple[bool, datetime, MessageId]:
    """A group's place in the list; one without a time counts as old."""
    first = report.first_seen or datetime.min.replace(tzinfo=UTC)
    return _is_unsound(report.position), first, report.places[0] if report.places else MessageId("", 0)


async def _consumers(site: Site, names: Sequence[str]) -> tuple[GroupConsumerRow, ...]:
    rows = []
    with within(CONSUMERS_S):
        for name in names:
            ask = partial(site.relations.group_consumer_status, name)
            try:
                status = await site.lately(("group consumer", name), GROUPS_KEPT_S, ask)
                rows.append(GroupConsumerRow(name, "", status))
            except RelatumError as error:
                rows.append(GroupConsumerRow(name, words_of(site, error), None))
    return tuple(rows)


# --- one group --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupAsked:
    id: Annotated[str, Parameter("Its id, 48 hexadecimal digits.")] = ""
    of_stream: Annotated[str, Parameter("Instead of an id: the stream of a message of the group …")] = ""
    of_offset: Annotated[int | None, Parameter("… and its offset.")] = None
    limit: Annotated[int, Parameter("Messages of a page.", least=1, most=1_000)] = 100
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class GroupMessage:
    """A message of a group, with its number."""

    sequence: int
    is_last: bool
    is_duplicate: bool
    message: MessageRow


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """A group, and a page of its messages by number; `expired` is where some lay that retention has taken."""

    group: GroupFacts
    results: tuple[GroupMessage, ...]
    expired: tuple[MessageId, ...]
    is_proven: bool
    next: str | None


@endpoint(
    "/groups/group",
    "A message group, with its messages by number.",
    template="group.html",
    page="groups",
    narrower=_NARROWER,
)
async def group(site: Site, asked: GroupAsked) -> GroupAnswer:
    await site.keys()
    group_id = asked.id
    if asked.of_offset is not None:
        group_id = await _id_at(site, MessageId(asked.of_stream, asked.of_offset))
    if not group_id:
        raise InvalidInput("id is missing: the group's id, 48 hexadecimal digits")
    found = await site.relations.group(group_id, complete=not await _much_unrecorded(site))
    numbered = []
    for each, is_duplicate in (*((each, False) for each in found), *((each, True) for each in found.duplicates)):
        number = membership(each.headers)
        assert number is not None, "it is in a group"
        numbered.append((number.sequence, each.id, number.last, is_duplicate, each))
    numbered.sort(key=lambda each: each[:2])
    page, cursor = page_of_list(numbered, asked.cursor, asked.limit)
    return GroupAnswer(
        group=_facts(site, found.position),
        results=tuple(
            GroupMessage(sequence, is_last, is_duplicate, message_row(site, each))
            for sequence, _, is_last, is_duplicate, each in page
        ),
        expired=found.expired[:_EXPIRED_LISTED],
        is_proven=found.position.is_proven,
        next=cursor,
    )
