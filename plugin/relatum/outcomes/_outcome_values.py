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
    """No collector has taken the message yet, its type has no executor, or it was deleted after `keep_s`."""
    COLLECTED = "collected"
    """The message is stored and waits for an executor; for a retry if `attempts` is above 0."""
    FORWARDED = "forwarded"
    """The executor is processing the message."""
    SUCCEEDED = "succeeded"
    """The executor succeeded. Final."""
    FAILED = "failed"
    """All attempts failed, or retention dropped the message; it is in no dead-letter stream. Final."""
    DEAD = "dead"
    """All attempts failed; the message is in the dead-letter stream. Final."""

    @property
    def is_final(self) -> bool:
        """Whether the status no longer changes."""
        return self in FINAL


FINAL: Final = frozenset({OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a message.

    Attributes:
        message_id: The message's property `message_id`; "stream:offset" if it has none.
        status: The message's status. While it is UNKNOWN, the following attributes have their defaults.
        collector: The collector's name.
        type: The type by which the executor was chosen.
        stream: The message's stream.
        offset: The message's offset.
        attempts: Number of times an executor got the message.
        reason: Why the last attempt failed; None if no attempt failed.
        collected_at: When the message was collected.
        forwarded_at: When an executor last got the message.
        finished_at: When the status became final.
        others: The outcomes of other messages with the same id, for example if a publisher reused it.
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
        """Whether the outcome no longer changes."""
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
    """Return the least advanced of an id's outcomes (the first of equals), with the others in `others`.

    Failures rank below successes, so a success means that all messages have succeeded.
    """
    ranked = sorted(outcomes, key=lambda outcome: (_LEAST_FIRST.index(outcome.status), outcome.stream, outcome.offset))
    return replace(ranked[0], others=tuple(ranked[1:]))


_IDS_MAX: Final = 10_000
"""Maximum ids in one query; more ids take several queries."""

OUTCOMES: Final = sql("""
    SELECT message_id, state, collector.name, type, stream, stream_offset, attempts, reason,
        collected_at, forwarded_at, finished_at
    FROM relatum.collected_messages JOIN relatum.collector_sources AS source USING (source_id)
        JOIN relatum.collectors AS collector ON collector.collector_id = source.collector_id
    WHERE message_id = ANY (:ids::text[])
        AND (:in_collector::integer IS NULL OR collector.collector_id = :in_collector::integer)
        AND (:of_collector::text IS NULL OR collector.name = :of_collector::text)""")
"""Selects the fields of `Outcome`, in order, of every message with one of the ids."""

_COLLECTOR: Final = sql("SELECT 1 FROM relatum.collectors WHERE name = :name::text LIMIT 1")


def read_outcomes(
    connection: sa.Connection,
    message_ids: Iterable[str],
    *,
    collector_id: int | None = None,
    collector: str | None = None,
) -> dict[str, Outcome]:
    """Return the outcome of each id, in one collector or in all; UNKNOWN for ids that are not found."""
    ids = list(dict.fromkeys(message_ids))
    named = {"in_collector": collector_id, "of_collector": collector}
    found: dict[str, list[Outcome]] = {message_id: [] for message_id in ids}
    for start in range(0, len(ids), _IDS_MAX):
        # No message has an id with a NUL, since PostgreSQL cannot store it.
        asked = [message_id for message_id in ids[start : start + _IDS_MAX] if "\0" not in message_id]
        for message_id, state, *facts in connection.execute(OUTCOMES, {"ids": asked, **named}):
            found[message_id].append(Outcome(message_id, OutcomeStatus(state), *facts))
    return {
        message_id: _least_advanced(outcomes) if outcomes else Outcome(message_id, OutcomeStatus.UNKNOWN)
        for message_id, outcomes in found.items()
    }


def require_collector(connection: sa.Connection, name: str) -> None:
    if connection.execute(_COLLECTOR, {"name": name}).first() is None:
        raise NotFound(f"there is no collector {name!r}: its first member creates it")
