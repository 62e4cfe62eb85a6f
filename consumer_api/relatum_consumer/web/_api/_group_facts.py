"""What the pages of groups share: what is told of a group, of what is not recorded, and of who cannot be answered."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from relatum.errors import InvalidInput, KeyNotDefined
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.membership import GROUP_KEY, Anomaly, GroupPosition, membership
from relatum_consumer.groups import GroupPage
from relatum_consumer.web._problems import Problem, Refused
from relatum_consumer.web._site import Site

UNRECORDED_READ: Final = 20_000
"""Offsets that are not recorded by the key of groups and are read all the same: some 100 ms. A recorder that is a
little behind so leaves nothing open; where there are more, what is recorded is told, and what is not is named."""

NARROWER: Final = "Every row of the key is looked at: name one stream, or ask for older groups."

_RANGES_LISTED: Final = 20

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
    """A group. `group_id` is a digest where the key of groups is masked; `href` leads to it all the same.

    `state` is complete, incomplete (a number, or the last, is missing), unsound (no message can make it whole any more:
    it contradicts itself, or has lost one), or none; `words` says what is missing or wrong. `missing` are ranges of
    numbers, the first twenty of `missing_count`.
    """

    group_id: str
    is_masked: bool
    href: str
    state: Literal["complete", "incomplete", "unsound", "none"]
    words: str
    seen: int
    highest: int
    last: int | None
    next_sequence: int
    missing: tuple[tuple[int, int], ...]
    missing_count: int


async def recorded_by_key(site: Site, streams: tuple[str, ...]) -> GroupPage:
    """A page without groups, which says what is not recorded by the key of groups."""
    return await site.relations._newest_groups(streams or None, limit=0)


def is_much(recorded: GroupPage) -> bool:
    return sum(each.stop - each.start for each in recorded.unrecorded) > UNRECORDED_READ


@contextmanager
def answered(site: Site) -> Iterator[None]:
    """What a person is told who cannot be answered."""
    try:
        yield
    except KeyNotDefined as error:
        raise Refused(Problem(404, "key_not_defined", str(error), _DEFINE)) from error


def is_unsound(position: GroupPosition) -> bool:
    """A duplicate is no contradiction: the first counts."""
    return any(each is not Anomaly.DUPLICATE for each in position.anomalies)


def group_facts(
    site: Site, definitions: Sequence[KeyDefinition], position: GroupPosition, place: MessageId | None
) -> GroupFacts:
    is_masked = any(each.name == GROUP_KEY.name and site.masking.is_masked(each) for each in definitions)
    href = site.links.to("/groups/group", id=position.group_id)
    if is_masked and place is not None:
        href = site.links.to("/groups/group", of_stream=place.stream, of_offset=str(place.offset))
    state, words = _state(position)
    return GroupFacts(
        group_id=site.masking.digest(position.group_id) if is_masked else position.group_id,
        is_masked=is_masked,
        href=href,
        state=state,
        words=words,
        seen=position.seen,
        highest=position.highest,
        last=position.last_sequence,
        next_sequence=position.next_sequence,
        missing=tuple(position.missing[:_RANGES_LISTED]),
        missing_count=len(position.missing),
    )


def _state(position: GroupPosition) -> tuple[Literal["complete", "incomplete", "unsound", "none"], str]:
    wrong = "; ".join(_WRONG[each] for each in position.anomalies)
    if not position.seen and not position.anomalies:
        return "none", "nothing of it is there"
    if is_unsound(position):
        return "unsound", wrong
    if position.is_complete:
        return "complete", f"complete; {wrong}" if wrong else "complete"
    lacking = "the last message is not there" if position.last_sequence is None else ""
    if position.missing:
        lacking = "; ".join(filter(None, ("numbers are missing", lacking)))
    return "incomplete", "; ".join(filter(None, (lacking, wrong)))


async def id_at(site: Site, place: MessageId) -> str:
    message = await site.relations.read(*place)
    number = membership(message.headers)
    if number is None:
        raise InvalidInput(f"the message {message.id} is in no group")
    return number.group_id
