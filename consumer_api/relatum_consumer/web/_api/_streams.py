"""All streams: what is recorded of each, how much each key takes, and who records."""

import time
from dataclasses import dataclass, replace
from typing import Annotated, Final

from relatum.errors import InvalidInput
from relatum_consumer.web._api._keys import KeyRow, key_rows
from relatum_consumer.web._api._stream_shown import StreamRow, stream_row
from relatum_consumer.web._endpoint import Endpoint, ms_since
from relatum_consumer.web._parameters import Parameter
from relatum_consumer.web._site import Site

HELD_LISTED: Final = 50


@dataclass(frozen=True, slots=True)
class StreamsAsked:
    """Which streams, by a part of their names."""

    q: Annotated[str, Parameter("A part of the streams' names.")] = ""
    limit: Annotated[int, Parameter("Streams of a page.", least=1, most=200)] = 50
    cursor: Annotated[str, Parameter("`next` of the page before: a number.")] = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A stream that a recorder holds."""

    vhost: str
    stream: str
    href: str | None


@dataclass(frozen=True, slots=True)
class RecorderRow:
    """A recorder: its own name, that which it shares with others, whether it is alive, and what it holds."""

    holder: str
    name: str
    is_alive: bool
    streams: tuple[Held, ...]
    streams_count: int


@dataclass(frozen=True, slots=True)
class StreamsAnswer:
    """A page of streams, of `total`; `recorded` is how many there are by any name. And keys and recorders."""

    streams: tuple[StreamRow, ...]
    total: int
    recorded: int
    next: str | None
    next_href: str | None
    keys: tuple[KeyRow, ...]
    recorders: tuple[RecorderRow, ...]
    took_ms: float


async def streams(site: Site, asked: StreamsAsked) -> StreamsAnswer:
    """Answer one page."""
    began = time.perf_counter()
    recorded = await site.relations.streams()
    named = [name for name in recorded if asked.q.casefold() in name.casefold()]
    if asked.cursor and not (asked.cursor.isascii() and asked.cursor.isdigit() and len(asked.cursor) < 10):
        raise InvalidInput("this cursor is none that a page before gave")
    start = int(asked.cursor or 0)
    page = named[start : start + asked.limit]
    found = {each.stream: each for each in await site.statuses(page)} if page else {}
    following = str(start + asked.limit) if start + asked.limit < len(named) else None
    return StreamsAnswer(
        streams=tuple(stream_row(site, found[name]) for name in page if name in found),
        total=len(named),
        recorded=len(recorded),
        next=following,
        next_href=following and site.links.asked("/streams", replace(asked, cursor=following)),
        keys=await key_rows(site),
        recorders=await _recorders(site),
        took_ms=ms_since(began),
    )


async def _recorders(site: Site) -> tuple[RecorderRow, ...]:
    rows = []
    for each in await site.recorders():
        held = [Held(vhost, name, _href(site, vhost, name)) for vhost, name in each.streams[:HELD_LISTED]]
        rows.append(RecorderRow(each.holder, each.name, each.is_alive, tuple(held), len(each.streams)))
    return tuple(rows)


def _href(site: Site, vhost: str, name: str) -> str | None:
    """Where a stream's page is; None for one of another virtual host."""
    return site.links.stream(name) if vhost == site.address.vhost else None


STREAMS = Endpoint(
    "/streams",
    "The recorded streams: ends, rate, lag, coverage; keys with their sizes; recorders.",
    StreamsAsked,
    StreamsAnswer,
    streams,
    template="streams.html",
    page="streams",
)
