"""The outcome of a message, and the query for it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Final

import sqlalchemy as sa

from relatum.errors import NotFound
from relatum.store.database import sql


class OutcomeStatus(Enum):
    """The status of a message, least advanced first."""

    UNKNOWN = "unknown"
    """No collector has taken it (yet), or its type has no executor, or it was deleted after `keep_s`."""
    COLLECTED = "collected"
    """It is stored, and waits to be consumed; with `attempts`, to be tried again."""
    FORWARDED = "forwarded"
    """Its executor has it."""
    SUCCEEDED = "succeeded"
    """Its executor succeeded. Final."""
    FAILED = "failed"
    """All attempts failed, or retention dropped it, and it is in no dead-letter stream. Final."""
    DEAD = "dead"
    """All attempts failed, and it is in the dead-letter stream. Final."""

    @property
    def is_final(self) -> bool:
        """Whether it never changes any more."""
        return self in FINAL


FINAL: Final = frozenset({OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a message.

    Attributes:
        message_id: The message's property `message_id`; "stream:offset" if it has none.
        status: Its status.
        collector: The collector's name; None while the status is unknown, as for the following.
        type: The type by which its executor was chosen.
        stream: Its stream.
        offset: Its offset.
        attempts: How often an executor got it.
        reason: Why the last attempt failed; None if none did.
        collected_at: When it was collected.
        forwarded_at: When an executor last got it.
        finished_at: When its status became final.
        others: The outcomes of further messages with the same id, if a publisher used it again.
    """

    message_id: str
    status: OutcomeStatus
    collector: str | None = None
    type: str | None = None
    stream: str | None = None
    offset: int | None = None
    attempts: int = 0
    reason: str | None = None
    collected_at: datetime | None = None
    forwarded_at: datetime | None = None
    finished_at: datetime | None = None
    others: "tuple[Outcome, ...]" = ()

    @property
    def is_final(self) -> bool:
        """Whether it never changes any more."""
        return self.status in FINAL


_LEAST_FIRST: Final = (
    OutcomeStatus.UNKNOWN,
    OutcomeStatus.COLLECTED,
    OutcomeStatus.FORWARDED,
    OutcomeStatus.FAILED,
    OutcomeStatus.DEAD,
    OutcomeStatus.SUCCEEDED,
)


def _least_advanced(outcomes: Sequence[Outcome]) -> Outcome:
    """The least advanced of the outcomes of one id (the first of equals), with the others.

    Failures come before successes, so a success means that all have succeeded.
    """
    ranked = sorted(outcomes, key=lambda outcome: (_LEAST_FIRST.index(outcome.status), outcome.stream, outcome.offset))
    return replace(ranked[0], others=tuple(ranked[1:]))


_IDS_MAX: Final = 10_000
"""Ids in one query; more ids take several."""

_OUTCOMES: Final = """
    SELECT message_id, state, collector.name, type, stream, stream_offset, attempts, reason,
        collected_at, forwarded_at, finished_at
    FROM relatum.collected_messages JOIN relatum.collector_sources AS source USING (source_id)
        JOIN relatum.collectors AS collector ON collector.collector_id = source.collector_id
    WHERE message_id = ANY (:ids::text[])"""
"""The fields of `Outcome`, in its order, of every message with one of these ids."""

_COLLECTOR: Final = sql("SELECT 1 FROM relatum.collectors WHERE name = :name::text LIMIT 1")

OUTCOMES_BY_ID: Final = sql(_OUTCOMES)
OUTCOMES_IN_COLLECTOR: Final = sql(f"""{_OUTCOMES}
    AND (collector.collector_id = :collector_id::integer OR collector.name = :collector::text)""")


def read_outcomes(
    connection: sa.Connection,
    message_ids: Iterable[str],
    *,
    collector_id: int | None = None,
    collector: str | None = None,
) -> dict[str, Outcome]:
    """The outcome of each id, in one collector or in all; UNKNOWN for ids that are not found."""
    ids = list(dict.fromkeys(message_ids))
    query, named = OUTCOMES_BY_ID, dict[str, int | str | None]()
    if collector_id is not None or collector is not None:
        query, named = OUTCOMES_IN_COLLECTOR, {"collector_id": collector_id, "collector": collector}
    found: dict[str, list[Outcome]] = {message_id: [] for message_id in ids}
    for start in range(0, len(ids), _IDS_MAX):
        # No message has an id with a NUL, which PostgreSQL cannot store.
        asked = [message_id for message_id in ids[start : start + _IDS_MAX] if "\0" not in message_id]
        for message_id, state, *facts in connection.execute(query, {"ids": asked, **named}):
            found[message_id].append(Outcome(message_id, OutcomeStatus(state), *facts))
    return {
        message_id: _least_advanced(outcomes) if outcomes else Outcome(message_id, OutcomeStatus.UNKNOWN)
        for message_id, outcomes in found.items()
    }


def require_collector(connection: sa.Connection, name: str) -> None:
    if connection.execute(_COLLECTOR, {"name": name}).first() is None:
        raise NotFound(f"there is no collector {name!r}: its first member makes it")
