"""The newest message of some streams: where to begin for who has no value at hand."""

from dataclasses import dataclass
from typing import Final

import anyio

from relatum.errors import RelatumError
from relatum.reading import Message
from relatum_consumer.web._api._shown import MessageRow, message_row
from relatum_consumer.web._endpoint import PATIENCE_S, Endpoint
from relatum_consumer.web._site import Site

STREAMS_SHOWN: Final = 6


@dataclass(frozen=True, slots=True)
class LatestAsked:
    """Nothing is asked."""


@dataclass(frozen=True, slots=True)
class LatestAnswer:
    """The newest message of each of the first six recorded streams; `unread` names those that could not be read now."""

    messages: tuple[MessageRow, ...]
    unread: tuple[str, ...]


async def latest(site: Site, _: LatestAsked) -> LatestAnswer:
    """Read them."""
    found: dict[str, Message | None] = {}

    async def read(stream: str) -> None:
        try:
            last = (await (await site.reader()).bounds(stream)).last
            found[stream] = None if last is None else await site.relations.read(stream, last)
        except RelatumError:
            pass

    definitions = await site.keys()
    names = (await site.relations.streams())[:STREAMS_SHOWN]
    with anyio.move_on_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(read, name)
    newest = [each for name in names if (each := found.get(name)) is not None]
    return LatestAnswer(
        tuple(message_row(site, definitions, each) for each in newest),
        tuple(name for name in names if name not in found),
    )


LATEST = Endpoint(
    "/latest",
    "The newest message of some streams, with their keys: where to begin.",
    LatestAsked,
    LatestAnswer,
    latest,
)
