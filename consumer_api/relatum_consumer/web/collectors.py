"""Collectors: members, positions, and messages' outcomes with the reasons of failures."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from pydantic import Field

from relatum.collecting import CollectedAt, CollectorStatus, collected, collector_status
from relatum.errors import NotFound
from relatum.outcomes import Outcome, OutcomeStatus
from relatum.reading import Message
from relatum.store.database import sql
from relatum_consumer.web.endpoint import endpoint
from relatum_consumer.web.parameters import Moment, Number, Parameters, cursor_of, read_cursor
from relatum_consumer.web.site import Site

_CACHE_S: Final = 3.0
"""Seconds for which counts are cached."""

_STATES: Final = {
    "unsuccessful": (OutcomeStatus.FAILED, OutcomeStatus.DEAD),
    "waiting": (OutcomeStatus.COLLECTED, OutcomeStatus.FORWARDED),
    "succeeded": (OutcomeStatus.SUCCEEDED,),
}


@dataclass(frozen=True, slots=True)
class CollectorsAnswer:
    """The collectors, ordered by name. Counts include finished messages still stored; large counts are estimates."""

    collectors: tuple[CollectorStatus, ...]


@endpoint("/collectors", "Collectors: messages by state, members, streams.")
async def collectors(site: Site, _: Parameters) -> CollectorsAnswer:
    return CollectorsAnswer(await _statuses(site))


async def _statuses(site: Site, names: tuple[str, ...] | None = None) -> tuple[CollectorStatus, ...]:
    from_database = partial(collector_status, site.database, names)
    from_both = partial(from_database, broker=site.options.broker)
    found = await site.with_broker(("collectors", names), _CACHE_S, from_both, from_database)
    return tuple(each for each in found if each.vhost == site.address.vhost)


class CollectorParameters(Parameters):
    name: str = Field(description="The collector's name.")
    state: Literal["unsuccessful", "waiting", "succeeded"] = Field(
        "unsuccessful", description="Failed and dead messages, messages not finished yet, or successful messages."
    )
    limit: int = Field(100, ge=1, le=1_000, description="Messages on a page.")
    cursor: str = Field("", description="`next` of the previous page.")


@dataclass(frozen=True, slots=True)
class CollectorAnswer:
    """A collector, and a page of its messages: finished messages latest first, others by stream and offset.

    A `message_id` is a digest if the property is masked. Reasons are left out if they may contain masked values.
    """

    collector: CollectorStatus
    results: tuple[Outcome, ...]
    next: str | None


@endpoint("/collectors/collector", "A collector's messages by state, with the reasons of failures.")
async def collector(site: Site, query: CollectorParameters) -> CollectorAnswer:
    after = read_cursor(query.cursor, tuple[Moment | None, Number, Number])
    page = await site.in_thread(
        collected,
        site.database,
        query.name,
        _STATES[query.state],
        vhost=site.address.vhost,
        after=None if after is None else CollectedAt(*after),
        limit=query.limit,
    )
    status = next(iter(await _statuses(site, (query.name,))), None)
    if status is None:
        raise NotFound(f"the collector {query.name!r} no longer exists")
    return CollectorAnswer(
        collector=status,
        results=tuple(_with_mask(site, each) for each in page.outcomes),
        next=None if page.next is None else cursor_of(*page.next),
    )


def _with_mask(site: Site, outcome: Outcome) -> Outcome:
    """Return an outcome with masked values hidden. Executors write the reason, which may contain such values."""
    is_masked = site.masking.is_masked_place("property", "message_id")
    return replace(
        outcome,
        message_id=site.masking.digest(outcome.message_id) if is_masked else outcome.message_id,
        reason=None if site.masking.hides_reasons else outcome.reason,
        others=(),
    )


_AT_PLACE: Final = sql("""
    SELECT message_id, state, collector.name, type, stream, stream_offset, attempts, reason,
        collected_at, forwarded_at, finished_at
    FROM relatum.collectors AS collector JOIN relatum.collector_sources AS source USING (collector_id)
        JOIN relatum.collected_messages USING (source_id)
    WHERE vhost = :vhost::text AND stream = :stream::text AND replaced_at IS NULL
        AND stream_offset = :offset::bigint
    ORDER BY collector.name""")
"""Selects the fields of `Outcome`, in order, of a message in each collector."""


def outcomes_of(site: Site, message: Message) -> tuple[Outcome, ...]:
    """Return the outcomes of this message, not of others with the same id, least advanced first."""
    # Collectors identify a message without a usable id by its stream and offset.
    ids = (message.properties.message_id, f"{message.stream}:{message.offset}")
    place = {"vhost": site.address.vhost, "stream": message.stream, "offset": message.offset}
    rows = [row for row in site.database.rows(_AT_PLACE, place) if row.message_id in ids]
    found = [Outcome(message_id, OutcomeStatus(state), *columns) for message_id, state, *columns in rows]
    found.sort(key=lambda each: [*OutcomeStatus].index(each.status))
    return tuple(_with_mask(site, each) for each in found)
