"""Contexts: their partitions, the moves in progress, the serial consumers and the messages they hold back."""

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
from relatum_consumer.web.parameters import NoParameters, Number, Parameters
from relatum_consumer.web.site import Site

CONTEXTS_KEPT_S: Final = 1.0
"""Seconds for which the state of a super stream is cached."""

SUPER_STREAMS_LISTED: Final = 50
MOVES_LISTED: Final = 50


@dataclass(frozen=True, slots=True)
class ContextsAnswer:
    """The first fifty of `total` super streams whose messages a header places, ordered by name."""

    super_streams: tuple[ContextsStatus, ...]
    total: int


@endpoint("/contexts", "Super streams with placed contexts: partitions with their contexts, and moves in progress.")
async def contexts(site: Site, _: NoParameters) -> ContextsAnswer:
    names = await site.in_thread(placed_super_streams, site.database, vhost=site.address.vhost)
    return ContextsAnswer(tuple([await _status(site, name) for name in names[:SUPER_STREAMS_LISTED]]), len(names))


async def _status(site: Site, name: str) -> ContextsStatus:
    def ask() -> ContextsStatus:
        with _opened(site, name) as opened:
            return opened.status()

    return await site.cached(("contexts", name), CONTEXTS_KEPT_S, partial(site.in_thread, ask))


def _opened(site: Site, name: str) -> SerializationContexts:
    """Open a super stream from the database. Without a broker, nothing is created."""
    return SerializationContexts(name, site.database, vhost=site.address.vhost)


class SuperStreamParameters(Parameters):
    name: str = Field(description="The super stream's name.")
    partition: str = Field("", description="Only contexts in this partition.")
    context: str = Field("", description="Only this context.")
    limit: int = Field(100, ge=1, le=1_000, description="Contexts on a page.")
    cursor: Number = Field(0, description="`next` of the previous page.")


@dataclass(frozen=True, slots=True)
class SuperStreamAnswer:
    """A super stream, a page of its contexts by name, its latest moves, and its serial consumers by name.

    A context's name is a digest if the header is masked. `key` is the key that has the header's values, if there is
    one. `consumers` is None while the broker does not answer: it knows the ends of the streams.
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
async def super_stream(site: Site, asked: SuperStreamParameters) -> SuperStreamAnswer:
    status = await _status(site, asked.name)
    is_masked = site.masking.is_masked_place("header", status.header)
    found, latest = await site.in_thread(_contexts_of, site, asked)
    ask = partial(consumers, asked.name, database=site.database, broker=site.options.broker)
    sources = [f"header:{status.header}"]
    return SuperStreamAnswer(
        super_stream=status,
        contexts=tuple(
            replace(each, context=site.masking.digest(each.context)) if is_masked else each
            for each in found[: asked.limit]
        ),
        latest=tuple(latest),
        consumers=await site.with_broker(("consumers", asked.name), CONTEXTS_KEPT_S, ask, lambda: None),
        key=next((key for key, each in site.masking.definitions.items() if [*each.sources] == sources), None),
        next=asked.cursor + asked.limit if len(found) > asked.limit else None,
    )


def _contexts_of(site: Site, asked: SuperStreamParameters) -> tuple[list[Assignment], list[Move]]:
    """Return a page of contexts plus one, and the latest moves."""
    with _opened(site, asked.name) as opened:
        latest = opened.moves(latest=MOVES_LISTED)
        if asked.context:
            try:
                return [opened.assignment_of(asked.context)], latest
            except PlacementNotFound:
                return [], latest
        listed = opened.assignments(asked.partition or None)
        return list(islice(listed, asked.cursor, asked.cursor + asked.limit + 1)), latest
