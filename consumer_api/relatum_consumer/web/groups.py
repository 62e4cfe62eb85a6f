"""Message groups: those that are not whole, what each lacks, the consumers that share them, and one group."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final, Literal, TypeAlias

from relatum.errors import InvalidInput, KeyNotDefined, RelatumError
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.membership import GROUP_KEY, Anomaly, GroupPosition, membership
from relatum.waiting import within
from relatum_consumer import GroupConsumerStatus
from relatum_consumer.groups import GroupPage, GroupReport
from relatum_consumer.lookups import Uncovered
from relatum_consumer.web.cursors import cursor_of, read_cursor
from relatum_consumer.web.documents import FOR_PAGES
from relatum_consumer.web.endpoint import endpoint, words_of
from relatum_consumer.web.messages import MessageRow, message_row
from relatum_consumer.web.parameters import Parameter
from relatum_consumer.web.problems import Problem, Refused
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
_DAY_S: Final = 86_400

_DEFINE: Final = (
    f"`relatum keys add {GROUP_KEY.name} "
    + " ".join(f"--source {each}" for each in GROUP_KEY.sources)
    + "` defines it. What lies in the streams already is found once they are back-filled."
)

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
    href: str = field(metadata=FOR_PAGES)


def _facts(
    site: Site, definitions: Sequence[KeyDefinition], position: GroupPosition, place: MessageId | None
) -> GroupFacts:
    is_masked = _is_masked(site, definitions)
    href = site.links.to("/groups/group", id=position.group_id)
    if is_masked and place is not None:
        href = site.links.to("/groups/group", of_stream=place.stream, of_offset=str(place.offset))
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
        href=href,
    )


def _is_masked(site: Site, definitions: Sequence[KeyDefinition]) -> bool:
    return any(each.name == GROUP_KEY.name and site.masking.is_masked(each) for each in definitions)


def _is_unsound(position: GroupPosition) -> bool:
    """A duplicate is no contradiction: the first counts."""
    return any(each is not Anomaly.DUPLICATE for each in position.anomalies)


def _state(position: GroupPosition) -> tuple[Literal["complete", "incomplete", "unsound", "none"], str]:
    wrong = "; ".join(_WRONG[each] for each in position.anomalies)
    if not position.seen and not position.anomalies:
        return "none", "nothing of it is there"
    if _is_unsound(position):
        return "unsound", wrong
    if position.is_complete:
        return "complete", f"complete; {wrong}" if wrong else "complete"
    lacking = "the last message is not there" if position.last_sequence is None else ""
    if position.missing:
        lacking = "; ".join(filter(None, ("numbers are missing", lacking)))
    return "incomplete", "; ".join(filter(None, (lacking, wrong)))


async def _recorded_by_key(site: Site, streams: tuple[str, ...]) -> GroupPage:
    """A page without groups, which says what is not recorded by the key of groups."""
    return await site.relations._newest_groups(streams or None, limit=0)


def _is_much(recorded: GroupPage) -> bool:
    return sum(each.stop - each.start for each in recorded.unrecorded) > UNRECORDED_READ


@contextmanager
def _key_defined() -> Iterator[None]:
    """Says how the key of groups is defined, where it is not."""
    try:
        yield
    except KeyNotDefined as error:
        raise Refused(Problem(404, "key_not_defined", str(error), _DEFINE)) from error


async def _id_at(site: Site, place: MessageId) -> str:
    message = await site.relations.read(*place)
    number = membership(message.headers)
    if number is None:
        raise InvalidInput(f"the message {message.id} is in no group")
    return number.group_id


# --- groups ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupsAsked:
    """Which groups."""

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
    """Answer one page."""
    definitions = await site.keys()
    with _key_defined():
        found = await (_newest if asked.show == "all" else _unfinished)(site, asked)
    page, cursor, recorded, counts = found
    unrecorded = () if recorded is None else recorded.unrecorded
    names = await site.relations.group_consumers()
    return GroupsAnswer(
        groups=tuple(_group_row(site, definitions, each) for each in page),
        incomplete=None if counts is None else counts[0],
        unsound=None if counts is None else counts[1],
        older_s=asked.older_s,
        unrecorded=unrecorded[:_RANGES_LISTED],
        unrecorded_count=len(unrecorded),
        consumers=await _consumers(site, names[:CONSUMERS_LISTED]),
        consumers_count=len(names),
        next=cursor,
    )


_Page: TypeAlias = tuple[Sequence[GroupReport], str | None, GroupPage | None, tuple[int, int] | None]
"""Groups, the next page's cursor, what says what is not recorded, and how many there are, incomplete and unsound."""


async def _newest(site: Site, asked: GroupsAsked) -> _Page:
    after = read_cursor(asked.cursor, str, str, int)
    before = None
    if after is not None:
        group_id, stream, offset = after
        before = group_id or await _id_at(site, MessageId(stream, offset))
    found = await site.relations._newest_groups(asked.stream or None, before=before, limit=asked.limit)
    cursor = None
    if found.next is not None and not _is_masked(site, await site.keys()):
        cursor = cursor_of(found.next, "", 0)
    elif found.next is not None and found.groups:
        # An id that is secret is none of a link: the last group goes by a message.
        cursor = cursor_of("", *found.groups[-1].places[0])
    return found.groups, cursor, found, None


async def _unfinished(site: Site, asked: GroupsAsked) -> _Page:
    recorded = await _recorded_by_key(site, asked.stream)
    complete = not _is_much(recorded)
    ask = partial(site.relations.incomplete_groups, asked.stream or None, older_than=asked.older_s, complete=complete)
    with within(site.options.timeout_s):
        reports = await site.lately(("groups", asked.stream, asked.older_s, complete), GROUPS_KEPT_S, ask)
    unsound = sum(_is_unsound(each.position) for each in reports)
    page = sorted(reports, key=_rank)[: asked.limit]
    return page, None, None if complete else recorded, (len(reports) - unsound, unsound)


def _rank(report: GroupReport) -> tuple[bool, datetime, MessageId]:
    """A group's place in the list; one without a time counts as old."""
    first = report.first_seen or datetime.min.replace(tzinfo=UTC)
    return _is_unsound(report.position), first, report.places[0] if report.places else MessageId("", 0)


def _group_row(site: Site, definitions: Sequence[KeyDefinition], report: GroupReport) -> GroupRow:
    place = report.places[0] if report.places else None
    return GroupRow(
        group=_facts(site, definitions, report.position, place),
        first_seen=report.first_seen,
        last_seen=report.last_seen,
        places=report.places[:_PLACES_LISTED],
        places_count=len(report.places),
    )


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
    """Which group, and from which number on."""

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
    """Answer one page."""
    definitions = await site.keys()
    after = read_cursor(asked.cursor, int, str, int)
    place = None if asked.of_offset is None else MessageId(asked.of_stream, asked.of_offset)
    with _key_defined():
        if not asked.id and place is None:
            raise InvalidInput("id is missing: the group's id, 48 hexadecimal digits")
        group_id = asked.id if place is None else await _id_at(site, place)
        complete = not _is_much(await _recorded_by_key(site, ()))
        found = await site.relations.group(group_id, complete=complete)
    numbered = []
    for each, is_duplicate in (*((each, False) for each in found), *((each, True) for each in found.duplicates)):
        number = membership(each.headers)
        assert number is not None, "it is in a group"
        numbered.append(((number.sequence, *each.id), number.last, is_duplicate, each))
    numbered.sort(key=lambda each: each[0])
    left = [each for each in numbered if after is None or each[0] > tuple(after)]
    page = left[: asked.limit]
    return GroupAnswer(
        group=_facts(site, definitions, found.position, place or (numbered[0][3].id if numbered else None)),
        results=tuple(
            GroupMessage(key[0], is_last, is_duplicate, message_row(site, definitions, each))
            for key, is_last, is_duplicate, each in page
        ),
        expired=found.expired[:_EXPIRED_LISTED],
        is_proven=found.position.is_proven,
        next=cursor_of(*page[-1][0]) if len(left) > len(page) else None,
    )
