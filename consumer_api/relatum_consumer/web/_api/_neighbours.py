"""The messages before and after one in its stream."""

from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from relatum.errors import RelatumError
from relatum.reading import Message
from relatum_consumer.web._site import Site

_STRIDES: Final = (1, 16, 256, 4_096)
"""How far before a message its neighbour is looked for, in offsets: streams have gaps, mostly small ones."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The message before or after this one in its stream."""

    offset: int
    href: str


async def following(site: Site, found: Message) -> Neighbour | None:
    """The message after it, where the stream has one; None also where nobody can say now."""
    try:
        reader = await site.reader()
        async with aclosing(reader.iterate(found.stream, found.offset + 1)) as later:
            async for each in later:
                return _at(site, each.stream, each.offset)
    except RelatumError:
        pass
    return None


async def preceding(site: Site, found: Message) -> Neighbour | None:
    """The message before it. Offsets have gaps: where the one before is none, those before that are read."""
    try:
        reader = await site.reader()
        for stride in _STRIDES:
            start = max(0, found.offset - stride)
            before = await reader.scan(found.stream, start, found.offset, lambda each: each.offset)
            if before:
                return _at(site, found.stream, max(before))
            if start == 0:
                break
    except RelatumError:
        pass
    return None


def _at(site: Site, stream: str, offset: int) -> Neighbour:
    return Neighbour(offset, site.links.message(stream, offset))
