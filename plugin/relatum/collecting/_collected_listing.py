"""What became of a collector's messages, page by page: what waits, and what is finished, the latest first."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from relatum.checks import checked_count, checked_name
from relatum.collecting import _collector_status_statements as statements
from relatum.errors import InvalidInput, NotFound
from relatum.outcomes import Outcome, OutcomeStatus
from relatum.store import AnyDatabase, as_engine, collectors, translated_errors

LOOKED: Final = 20_000
"""Finished messages of each stream that are looked through for a page of such as succeeded: some 30 ms."""

_LONG_AGO: Final = datetime(1, 1, 1, tzinfo=UTC)


class CollectedAt(NamedTuple):
    """Where a page ended: when its last message was finished (None: it is not), of which stream, at which offset."""

    finished_at: datetime | None
    source: int
    offset: int


@dataclass(frozen=True, slots=True)
class CollectedPage:
    """A part of a collector's messages.

    Attributes:
        outcomes: What became of each: finished ones the latest first, others by stream and offset.
        next: Where the next page begins; None where all were looked at.
        looked_to: Up to when, going back, messages were looked through for those that succeeded; None for all, or for
            others.
    """

    outcomes: tuple[Outcome, ...]
    next: CollectedAt | None
    looked_to: datetime | None = None


def collected(
    database: AnyDatabase,
    collector: str,
    states: Collection[OutcomeStatus],
    *,
    vhost: str = "/",
    after: CollectedAt | None = None,
    limit: int = 100,
) -> CollectedPage:
    """The messages of a collector that are in some states: either final ones, or others.

    Finished messages are found by when they were finished. Where those that succeeded are meant, 20,000 of each stream
    are looked through at most: a page may hold fewer than there are, or none, and still have a next one.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        collector: Its name.
        states: The states: all of them final, or none.
        vhost: Its virtual host.
        after: `next` of the page before; None (default): the first page.
        limit: Messages at most, from 1 to 1,000.

    Raises:
        NotFound: there is no such collector.
        InvalidInput: an argument is wrong.
    """
    checked_name("collector", collector)
    checked_count("limit", limit, most=1_000)
    if OutcomeStatus.UNKNOWN in states or len({each.is_final for each in states}) != 1:
        raise InvalidInput("states= takes final states, or such as are not; not both, and not unknown")
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        one = statements.all_collectors.where(collectors.c.name == collector, collectors.c.vhost == vhost)
        found = connection.execute(one).scalar_one_or_none()
        if found is None:
            raise NotFound(f"there is no collector {collector!r}: its first member makes it")
        wanted = {"in_collector": found, "states": [each.value for each in states], "limit": limit + 1}
        if all(each.is_final for each in states):
            return _finished(connection, wanted, after, limit)
        at = after or CollectedAt(None, 0, 0)
        waiting = connection.execute(
            statements.unfinished_after, wanted | {"at_source": at.source, "at_offset": at.offset}
        ).all()
        following = None if len(waiting) <= limit else _at(waiting[limit - 1])
        return CollectedPage(tuple(map(_outcome, waiting[:limit])), following)


def _finished(
    connection: sa.Connection, wanted: dict[str, Any], after: CollectedAt | None, limit: int
) -> CollectedPage:
    if after is None or after.finished_at is None:
        # A moment of the database's own clock, before which all that is finished lies.
        now = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
        after = CollectedAt(now, 0, 0)
    wanted = wanted | {"at": after.finished_at, "at_source": after.source, "at_offset": after.offset}
    floor = None
    if OutcomeStatus.SUCCEEDED.value in wanted["states"]:
        floor = connection.execute(statements.floor, wanted | {"looked": LOOKED}).scalar_one()
        rows = connection.execute(statements.finished_before, wanted | {"floor": floor or _LONG_AGO}).all()
    else:
        rows = connection.execute(statements.unsuccessful_before, wanted).all()
    following = None
    if len(rows) > limit:
        following = _at(rows[limit - 1])
    elif floor is not None:
        following = CollectedAt(floor, 0, 0)
    return CollectedPage(tuple(map(_outcome, rows[:limit])), following, floor)


def _at(row: Any) -> CollectedAt:
    return CollectedAt(row.finished_at, row.source_id, row.stream_offset)


def _outcome(row: Any) -> Outcome:
    message_id, state, *facts = row[:-1]
    return Outcome(message_id, OutcomeStatus(state), *facts)
