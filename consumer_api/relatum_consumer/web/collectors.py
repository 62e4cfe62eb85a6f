"""Collectors: who collects, how far, what became of the messages, what failed and why."""

from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Annotated, Final, Literal

from relatum.collecting import CollectedAt, CollectorStatus, collected, collector_status
from relatum.errors import InvalidInput, NotFound
from relatum.outcomes import Outcome, Outcomes, OutcomeStatus
from relatum.reading import Message
from relatum_consumer.web.cursors import cursor_of, read_cursor
from relatum_consumer.web.endpoint import endpoint
from relatum_consumer.web.parameters import Nothing, Parameter
from relatum_consumer.web.site import Site

_KEPT_S: Final = 3.0
"""Seconds for which what is counted is kept."""

_STATES: Final = {
    "unsuccessful": (OutcomeStatus.FAILED, OutcomeStatus.DEAD),
    "waiting": (OutcomeStatus.COLLECTED, OutcomeStatus.FORWARDED),
    "succeeded": (OutcomeStatus.SUCCEEDED,),
}


@dataclass(frozen=True, slots=True)
class CollectorsAnswer:
    """The collectors, by name; finished messages are counted as long as they are kept, many of them by a sample."""

    collectors: tuple[CollectorStatus, ...]


@endpoint(
    "/collectors", "Collectors: messages by state, members, streams.", template="collectors.html", page="collectors"
)
async def collectors(site: Site, _: Nothing) -> CollectorsAnswer:
    return CollectorsAnswer(await _statuses(site))


async def _statuses(site: Site, names: tuple[str, ...] | None = None) -> tuple[CollectorStatus, ...]:
    """The collectors of the virtual host, by name."""
    alone = partial(collector_status, site.database, names)
    found = await site.with_broker(("collectors", names), _KEPT_S, partial(alone, broker=site.options.broker), alone)
    return tuple(each for each in found if each.vhost == site.address.vhost)


@dataclass(frozen=True, slots=True)
class CollectorAsked:
    name: Annotated[str, Parameter("The collector's name.")]
    state: Annotated[
        Literal["unsuccessful", "waiting", "succeeded"],
        Parameter("Failed and dead ones, those that wait, or those that succeeded."),
    ] = "unsuccessful"
    limit: Annotated[int, Parameter("Messages of a page.", least=1, most=1_000)] = 100
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class CollectorAnswer:
    """A collector, and a page of its messages: finished ones the latest first, others by stream and offset.

    `looked_to`: up to when, going back, finished ones were looked through; there may be more in the next page.
    A `message_id` is a digest where `are_ids_masked`; reasons are left out where bodies, or any key, are masked.
    """

    collector: CollectorStatus
    state: str
    results: tuple[Outcome, ...]
    are_ids_masked: bool
    looked_to: datetime | None
    next: str | None


@endpoint(
    "/collectors/collector",
    "A collector's messages by state: what failed and why, what waits.",
    template="collector.html",
    page="collectors",
)
async def collector(site: Site, asked: CollectorAsked) -> CollectorAnswer:
    await site.keys()  # which say what is masked
    if not asked.name:
        raise InvalidInput("name is missing: the collector's name")
    after = read_cursor(asked.cursor, datetime, int, int)
    page = await site.in_thread(
        partial(
            collected,
            site.database,
            asked.name,
            _STATES[asked.state],
            vhost=site.address.vhost,
            after=None if after is None else CollectedAt(*after),
            limit=asked.limit,
        )
    )
    status = next(iter(await _statuses(site, (asked.name,))), None)
    if status is None:
        raise NotFound(f"there is no collector {asked.name!r} any more")
    return CollectorAnswer(
        collector=status,
        state=asked.state,
        results=tuple(_masked(site, each) for each in page.outcomes),
        are_ids_masked=_are_ids_masked(site),
        looked_to=page.looked_to,
        next=None if page.next is None else cursor_of(*page.next),
    )


def _are_ids_masked(site: Site) -> bool:
    return site.masking.is_masked_place("property", "message_id")


def _masked(site: Site, outcome: Outcome) -> Outcome:
    """An outcome alone, as it is shown: executors say in a reason what they like."""
    return replace(
        outcome,
        message_id=site.masking.digest(outcome.message_id) if _are_ids_masked(site) else outcome.message_id,
        reason=None if site.masking.hides_reasons else outcome.reason,
        others=(),
    )


@dataclass(frozen=True, slots=True)
class OutcomeAsked:
    id: Annotated[str, Parameter("The property `message_id`; stream:offset of a message that has none.")] = ""
    of_stream: Annotated[str, Parameter("Instead of an id: the message's stream …")] = ""
    of_offset: Annotated[int | None, Parameter("… and its offset.")] = None


@dataclass(frozen=True, slots=True)
class OutcomeAnswer:
    """What became of the message in each collector: the least advanced first; unknown where none has taken it."""

    message_id: str
    outcomes: tuple[Outcome, ...]
    are_ids_masked: bool


@endpoint(
    "/collectors/outcome", "What became of a message that collectors took.", template="outcome.html", page="collectors"
)
async def outcome(site: Site, asked: OutcomeAsked) -> OutcomeAnswer:
    await site.keys()  # which say what is masked
    message_id = asked.id
    if asked.of_offset is not None:
        message_id = message_id_of(await site.relations.read(asked.of_stream, asked.of_offset))
    if not message_id:
        raise InvalidInput("id is missing: the message's property message_id")
    found = await site.in_thread(partial(outcome_of, site, message_id))
    rows = tuple(_masked(site, each) for each in (found, *found.others))
    return OutcomeAnswer(rows[0].message_id, rows, _are_ids_masked(site))


def message_id_of(message: Message) -> str:
    """The id by which collectors know a message: its place, if it has none."""
    given = message.properties.message_id
    return f"{message.stream}:{message.offset}" if given is None else str(given)


def outcome_of(site: Site, message_id: str) -> Outcome:
    """What became of a message, by its id."""
    with Outcomes(site.database) as outcomes:
        return outcomes.of(message_id)
