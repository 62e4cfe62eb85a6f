"""Contexts: over which partitions they are placed, the moves under way, who consumes and what is held back."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Final

from relatum.contexts import (
    Assignment,
    ContextsStatus,
    Move,
    SerializationContexts,
    SerialStatus,
    consumers,
    placed_super_streams,
)
from relatum.errors import InvalidInput, PlacementNotFound
from relatum_consumer.web.cursors import cursor_of, read_cursor
from relatum_consumer.web.endpoint import endpoint
from relatum_consumer.web.parameters import Nothing, Parameter
from relatum_consumer.web.site import Site

CONTEXTS_KEPT_S: Final = 1.0
"""Seconds for which what is told of a super stream is kept."""

SUPER_STREAMS_LISTED: Final = 50
MOVES_LISTED: Final = 50


@dataclass(frozen=True, slots=True)
class ContextsAnswer:
    """The first fifty super streams, of `total`, whose messages are placed by the names in a header, by name."""

    super_streams: tuple[ContextsStatus, ...]
    total: int


@endpoint(
    "/contexts",
    "Super streams whose contexts are placed: partitions with their contexts, and moves under way.",
    template="contexts.html",
    page="contexts",
)
async def contexts(site: Site, _: Nothing) -> ContextsAnswer:
    names = await site.in_thread(partial(placed_super_streams, site.database, vhost=site.address.vhost))
    return ContextsAnswer(tuple([await _status(site, name) for name in names[:SUPER_STREAMS_LISTED]]), len(names))


async def _status(site: Site, name: str) -> ContextsStatus:
    def ask() -> ContextsStatus:
        with _opened(site, name) as opened:
            return opened.status()

    return await site.lately(("contexts", name), CONTEXTS_KEPT_S, partial(site.in_thread, ask))


def _opened(site: Site, name: str) -> SerializationContexts:
    """What is stored of a super stream; without the broker, nothing is made."""
    return SerializationContexts(name, site.database, vhost=site.address.vhost)


@dataclass(frozen=True, slots=True)
class SuperStreamAsked:
    name: Annotated[str, Parameter("The super stream's name.")]
    partition: Annotated[str, Parameter("Only contexts that live in this partition.")] = ""
    context: Annotated[str, Parameter("Only this context.")] = ""
    limit: Annotated[int, Parameter("Contexts of a page.", least=1, most=1_000)] = 100
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class SerialConsumerRow:
    """A name that consumes the super stream in order, and how many offsets it is behind."""

    name: str
    lag: int
    status: SerialStatus


@dataclass(frozen=True, slots=True)
class SuperStreamAnswer:
    """A super stream, a page of its contexts by name, its latest moves, and who consumes it in order.

    A context's name is a digest where `is_masked`; else it is a value of `key`, where there is such a key. `consumers`
    is None while the broker, which has the streams' ends, does not answer.
    """

    super_stream: ContextsStatus
    contexts: tuple[Assignment, ...]
    is_masked: bool
    latest: tuple[Move, ...]
    consumers: tuple[SerialConsumerRow, ...] | None
    next: str | None
    key: str | None


@endpoint(
    "/contexts/super-stream",
    "The contexts of a super stream and where they live, its latest moves, and who consumes it in order.",
    template="super_stream.html",
    page="contexts",
)
async def super_stream(site: Site, asked: SuperStreamAsked) -> SuperStreamAnswer:
    if not asked.name:
        raise InvalidInput("name is missing: the super stream's name")
    (shown,) = read_cursor(asked.cursor, int) or (0,)
    status = await _status(site, asked.name)
    await site.keys()
    is_masked = site.masking.is_masked_place("header", status.header)
    found, latest = await site.in_thread(partial(_contexts_of, site, asked, shown))
    page = found[: asked.limit]
    ask = partial(consumers, asked.name, database=site.database, broker=site.options.broker)
    consumed = await site.with_broker(("consumers", asked.name), CONTEXTS_KEPT_S, ask, lambda: None)
    return SuperStreamAnswer(
        super_stream=status,
        contexts=tuple(
            replace(each, context=site.masking.digest(each.context)) if is_masked else each for each in page
        ),
        is_masked=is_masked,
        latest=tuple(latest),
        consumers=None
        if consumed is None
        else tuple(SerialConsumerRow(name, each.lag, each) for name, each in sorted(consumed.items())),
        next=cursor_of(shown + len(page)) if len(found) > len(page) else None,
        key=next(
            (key for key, each in site.definitions.items() if [*each.sources] == [f"header:{status.header}"]), None
        ),
    )


def _contexts_of(site: Site, asked: SuperStreamAsked, shown: int) -> tuple[list[Assignment], list[Move]]:
    """A page of contexts and one more, and the latest moves."""
    with _opened(site, asked.name) as opened:
        latest = opened.moves(latest=MOVES_LISTED)
        if asked.context:
            try:
                return [opened.assignment_of(asked.context)], latest
            except PlacementNotFound:
                return [], latest
        listed = opened.assignments(asked.partition or None)
        return list(islice(listed, shown, shown + asked.limit + 1)), latest
