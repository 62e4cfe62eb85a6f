"""One message group: its messages by number, and what it lacks."""

import time
from dataclasses import dataclass, replace
from typing import Annotated

from relatum.errors import InvalidInput
from relatum.ids import MessageId
from relatum.membership import membership
from relatum_consumer.web._api._cursors import cursor_of, read_cursor
from relatum_consumer.web._api._group_facts import (
    NARROWER,
    GroupFacts,
    answered,
    group_facts,
    id_at,
    is_much,
    recorded_by_key,
)
from relatum_consumer.web._api._shown import MessageRow, Place, message_row
from relatum_consumer.web._endpoint import Endpoint, ms_since
from relatum_consumer.web._parameters import Parameter
from relatum_consumer.web._site import Site


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
    expired: tuple[Place, ...]
    is_proven: bool
    next: str | None
    next_href: str | None
    took_ms: float


async def group(site: Site, asked: GroupAsked) -> GroupAnswer:
    """Answer one page."""
    began = time.perf_counter()
    definitions = await site.keys()
    after = read_cursor(asked.cursor, int, str, int)
    place = None if asked.of_offset is None else MessageId(asked.of_stream, asked.of_offset)
    with answered(site):
        group_id = await _id(site, asked, place)
        complete = not is_much(await recorded_by_key(site, ()))
        found = await site.relations.group(group_id, complete=complete)
    numbered = []
    for each, is_duplicate in (*((each, False) for each in found), *((each, True) for each in found.duplicates)):
        number = membership(each.headers)
        assert number is not None, "it is in a group"
        numbered.append(((number.sequence, *each.id), number.last, is_duplicate, each))
    numbered.sort(key=lambda each: each[0])
    left = [each for each in numbered if after is None or each[0] > tuple(after)]
    page = left[: asked.limit]
    cursor = cursor_of(*page[-1][0]) if len(left) > len(page) else None
    return GroupAnswer(
        group=group_facts(site, definitions, found.position, place or (numbered[0][3].id if numbered else None)),
        results=tuple(
            GroupMessage(key[0], is_last, is_duplicate, message_row(site, definitions, each))
            for key, is_last, is_duplicate, each in page
        ),
        expired=tuple(Place(*each, site.links.message(*each)) for each in found.expired[:100]),
        is_proven=found.position.is_proven,
        next=cursor,
        next_href=cursor and site.links.asked("/groups/group", replace(asked, cursor=cursor)),
        took_ms=ms_since(began),
    )


async def _id(site: Site, asked: GroupAsked, place: MessageId | None) -> str:
    if place is None:
        if not asked.id:
            raise InvalidInput("id is missing: the group's id, 48 hexadecimal digits")
        return asked.id
    return await id_at(site, place)


GROUP = Endpoint(
    "/groups/group",
    "A message group, with its messages by number.",
    GroupAsked,
    GroupAnswer,
    group,
    template="group.html",
    page="groups",
    narrower=NARROWER,
)
