"""Contexts: partitions, moves in progress, and serial consumers with the messages that they hold back."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final

from pydantic import Field

from relatum.contexts import (
    Assignment,
    ContextsStatus,
    Move,
    SerializationContexts,
    SerialStatus,
    consumers,
    placed_super_streams,
)
from relatum.errors import PlacementNotFound
from relatum_consumer.web.endpoint import endpoint
from relatum_consumer.web.parameters import Number, Parameters
from relatum_consumer.web.site import CACHE_S, Site

SUPER_STREAMS_LISTED: Final = 50
MOVES_LISTED: Final = 50


@dataclass(frozen=True, slots=True)
class ContextsAnswer:
    """The first fifty of `total` super streams with placed contexts, ordered by name."""

    super_streams: tuple[ContextsStatus, ...]
    total: int


@endpoint("/contexts", "Super streams with placed contexts: partitions with their contexts, and moves in progress.")
async def contexts(site: Site, _: Parameters) -> ContextsAnswer:
    names = await site.in_thread(placed_super_streams, site.database, vhost=site.address.vhost)
    return ContextsAnswer(tuple([await _status(site, name) for name in names[:SUPER_STREAMS_LISTED]]), len(names))


async def _status(site: Site, name: str) -> ContextsStatus:
    def load() -> ContextsStatus:
        with SerializationContexts(name, site.database, vhost=site.address.vhost) as opened:
            return opened.status()

    return await site.cached(("contexts", name), CACHE_S, partial(site.in_thread, load))


class SuperStreamParameters(Parameters):
    name: str = Field(description="The super stream's name.")
    partition: str = Field("", description="Only contexts in this partition.")
    context: str = Field("", description="Only this context.")
    limit: int = Field(100, ge=1, le=1_000, description="Contexts on a page.")
    cursor: Number = Field(0, description="`next` of the previous page.")


@dataclass(frozen=True, slots=True)
class SuperStreamAnswer:
    """A super stream, a page of its contexts by name, its latest moves, and its serial consumers by name.

    A context's name is a digest if the header is masked. `key` is the key that is read from the header, or None.
    `consumers` is None while the broker, which has the ends of the streams, does not answer.
    """

    super_stream: ContextsStatus
    contexts: tuple[Assignment, ...]
    latest: tuple[Move, ...]
    consumers: dict[str, SerialStatus] | None
    key: str | None
    next: int | None


@endpoint(
    "/contexts/super-stream",
    "The contexts of a super stream with their partitions, its latest moves, and its serial consumers.",
)
async def super_stream(site: Site, query: SuperStreamParameters) -> SuperStreamAnswer:
    status = await _status(site, query.name)
    is_masked = site.masking.is_masked_place("header", status.header)
    found, latest = await site.in_thread(_contexts_of, site, query)
    load = partial(consumers, query.name, database=site.database, broker=site.options.broker)
    sources = [f"header:{status.header}"]
    return SuperStreamAnswer(
        super_stream=status,
        contexts=tuple(
            replace(each, context=site.masking.digest(each.context)) if is_masked else each
            for each in found[: query.limit]
        ),
        latest=tuple(latest),
        consumers=await site.with_broker(("consumers", query.name), CACHE_S, load, lambda: None),
        key=next((key for key, each in site.masking.definitions.items() if [*each.sources] == sources), None),
        next=query.cursor + query.limit if len(found) > query.limit else None,
    )


def _contexts_of(site: Site, query: SuperStreamParameters) -> tuple[list[Assignment], list[Move]]:
    """Return a page of contexts plus one, and the latest moves."""
    with SerializationContexts(query.name, site.database, vhost=site.address.vhost) as opened:
        latest = opened.moves(latest=MOVES_LISTED)
        if query.context:
            try:
                return [opened.assignment_of(query.context)], latest
            except PlacementNotFound:
                return [], latest
        listed = islice(opened.assignments(query.partition or None), query.cursor, None)
        return list(islice(listed, query.limit + 1)), latest
