"""The newest message of some streams: where to begin for who has no value at hand."""

from dataclasses import dataclass
from typing import Final

import anyio

from relatum.errors import RelatumError
from relatum.reading import Message
from relatum_consumer.web._api._shown import MessageRow, message_row
from relatum_consumer.web._endpoint import Endpoint
from relatum_consumer.web._site import Site

STREAMS_SHOWN: Final = 6

_PATIENCE_S: Final = 3.0
"""Seconds that a page waits for them: what can be typed in does not hang on them."""


@dataclass(frozen=True, slots=True)
class LatestAsked:
    """Nothing is asked."""


@dataclass(frozen=True, slots=True)
class LatestAnswer:
    """The newest message of each of the first six recorded streams; what cannot be read now is left out."""

    messages: tuple[MessageRow, ...]


async def latest(site: Site, _: LatestAsked) -> LatestAnswer:
    """Read them."""
    found: dict[str, Message] = {}

    async def read(stream: str) -> None:
        try:
            last = (await (await site.reader()).bounds(stream)).last
            if last is not None:
                found[stream] = await site.relations.read(stream, last)
        except RelatumError:
            pass

    try:
        names, definitions = (await site.relations.streams())[:STREAMS_SHOWN], await site.keys()
    except RelatumError:
        return LatestAnswer(())
    with anyio.move_on_after(_PATIENCE_S):
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(read, name)
    return LatestAnswer(tuple(message_row(site, definitions, found[name]) for name in names if name in found))


LATEST = Endpoint(
    "/latest",
    "The newest message of some streams, with their keys: where to begin.",
    LatestAsked,
    LatestAnswer,
    latest,
    messages=lambda answer: len(answer.messages),
)
