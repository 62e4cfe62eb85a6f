"""When messages carry what is searched for: how many by spans of time, each a narrower search."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from relatum.errors import InvalidInput
from relatum_consumer.web._api._search import SEARCH, SearchAsked, search_href, value_sought
from relatum_consumer.web._endpoint import Endpoint, Known
from relatum_consumer.web._site import Site

_SPANS: Final = 60


@dataclass(frozen=True, slots=True)
class TimesSpan:
    """Messages from a moment to before another; `number` is its place among all spans, `href` searches in it."""

    number: int
    since: datetime
    until: datetime
    count: int
    href: str


@dataclass(frozen=True, slots=True)
class TimesAnswer:
    """The spans that have messages, of one length, in order; `spans_count` with those between that have none.

    It is counted by the index: `count` are recorded. Where it is not `is_whole`, there are more, and each count is one
    at least. Messages without a time are left out.
    """

    spans: tuple[TimesSpan, ...]
    spans_count: int
    most: int
    count: int
    is_whole: bool


async def times(site: Site, asked: SearchAsked) -> TimesAnswer:
    """Count them."""
    if not asked.key:
        raise InvalidInput("key is missing: the name of the key to search by")
    value, _ = await value_sought(site, asked, await site.keys())
    found = await site.relations.times(
        asked.key,
        value,
        streams=asked.stream or None,
        since=asked.since,
        until=asked.until,
        spans=_SPANS,
        order="newest" if asked.order == "newest" else "oldest",
    )
    spans = tuple(
        TimesSpan(each.number, each.since, each.until, each.count, _href(site, asked, each.since, each.until))
        for each in found.spans
    )
    return TimesAnswer(
        spans=spans,
        spans_count=spans[-1].number + 1 if spans else 0,
        most=max((each.count for each in spans), default=0),
        count=found.count,
        is_whole=found.is_whole,
    )


def _href(site: Site, asked: SearchAsked, since: datetime, until: datetime) -> str:
    return search_href(site, replace(asked, since=since, until=until, cursor=""))


TIMES = Endpoint(
    "/search/times",
    "How many messages a search would find, by spans of time; it takes what a search takes.",
    SearchAsked,
    TimesAnswer,
    times,
)


async def _known(site: Site, asked: SearchAsked) -> tuple[Known, ...]:
    """What the index alone knows of a search."""
    if site.servers.database.error:
        return ()
    found = await times(site, asked)
    if not found.spans:
        return (("PostgreSQL has recorded no message with this value and a time.", None),)
    first, last = (f"{each:%Y-%m-%d %H:%M:%S} UTC" for each in (found.spans[0].since, found.spans[-1].until))
    many = f"{'' if found.is_whole else 'at least '}{found.count:,}"
    return ((f"PostgreSQL has recorded {many} with this value, from {first} to before {last}.", None),)


SEARCH_WITH_TIMES = replace(SEARCH, beside=times, known=_known)
"""The search, whose page shows them."""
