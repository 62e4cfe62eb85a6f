"""The recorded messages that arrived last."""

from dataclasses import dataclass
from functools import partial
from typing import Final

from pydantic import Field

from relatum.errors import NotFound
from relatum.reading import Agreement, Message, agreement_of
from relatum.recording.overview import RecordedEnd, recorded_ends
from relatum_consumer.web.endpoint import endpoint, gathered
from relatum_consumer.web.messages import MessageRow, message_rows
from relatum_consumer.web.parameters import Parameters, Several
from relatum_consumer.web.site import KEPT_S, Site

STREAMS_LOOKED: Final = 20
"""How many streams are read: the most recently recorded ones."""

OFFSETS_LOOKED: Final = 200
"""Offsets read of each stream, back from the last recorded one."""


class LiveParameters(Parameters):
    stream: Several = Field((), description="Streams and super streams; all by default.")
    limit: int = Field(50, ge=1, le=500, description="The most messages.")


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """The recorded messages that arrived last at the broker, newest first, whatever their own times.

    Only the last offsets of `streams` are read, the twenty most recently recorded of `streams_count`: rare messages
    may be left out.
    """

    results: tuple[MessageRow, ...]
    streams: tuple[str, ...]
    streams_count: int


@endpoint("/live", "The recorded messages that arrived last.", template="live.html", page="live")
async def live(site: Site, asked: LiveParameters) -> LiveAnswer:
    """Return the latest messages; viewers of the same page share one read."""
    return await site.cached(("live", asked), KEPT_S, partial(_live, site, asked))


async def _live(site: Site, asked: LiveParameters) -> LiveAnswer:
    await site.keys()
    ask = partial(site.in_thread, recorded_ends, site.database, site.address.vhost, asked.stream)
    ends = await site.cached(("ends", asked.stream), KEPT_S, ask)
    looked = ends[:STREAMS_LOOKED]
    read = await gathered((partial(_latest, site, end) for end in looked), STREAMS_LOOKED)
    found = [each for messages in read for each in messages]
    found.sort(key=lambda message: (message.chunk_ms or 0, message.stream, message.offset), reverse=True)
    return LiveAnswer(
        results=message_rows(site, found[: asked.limit]),
        streams=tuple(end.stream for end in looked),
        streams_count=len(ends),
    )


async def _latest(site: Site, end: RecordedEnd) -> list[Message]:
    """Return a stream's last recorded messages; none if the stream is not the recorded one any more."""
    if end.position is None:
        return []
    reader = await site.reader()
    begin = max(0, end.next_offset - OFFSETS_LOOKED)
    try:
        messages = await reader.scan(end.stream, begin, end.next_offset, lambda message: message)
    except NotFound:
        return []
    last = next((each for each in messages if each.offset == end.position.offset), None)
    is_same = last is not None and agreement_of(end.position, last) is Agreement.SAME
    return messages if is_same else []
