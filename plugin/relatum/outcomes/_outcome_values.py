"""What became of a message: its status, the facts around it, and the question that asks for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Final

import sqlalchemy as sa

from relatum.errors import NotFound
from relatum.store.database import sql


class OutcomeStatus(Enum):
    """How far a message has come, least first."""

    UNKNOWN = "unknown"
    """No collector has taken it: it may come later, or its type has no executor."""
    COLLECTED = "collected"
    """It is stored that it has to be consumed; with `attempts`, it waits for the next one."""
    FORWARDED = "forwarded"
    """An executor was handed it."""
    SUCCEEDED = "succeeded"
    """Its executor succeeded. Final."""
    FAILED = "failed"
    """Its executor failed as often as it may, or retention dropped it; there is no dead-letter stream. Final."""
    DEAD = "dead"
    """As failed, and it lies in the dead-letter stream. Final."""

    @property
    def is_final(self) -> bool:
        """Whether it never changes any more."""
        return self in FINAL


FINAL: Final = frozenset({OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a message.

    Attributes:
        message_id: The message's property `message_id`; "stream:offset" where it has none.
        status: How far it has come.
        collector: The collector's name; None while unknown, as are those below.
        type: The type its executor was chosen by.
        stream: Where it lies.
        offset: Where it lies.
        attempts: How often an executor was handed it.
        reason: Why the last attempt failed; None where none did.
        collected_at: When it was collected.
        forwarded_at: When an executor was last handed it.
        finished_at: When its status became final.
        others: The outcomes of further messages with the same id, where a publisher repeated itself.
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
    """Of the outcomes of messages with one id, the least advanced (the earliest of equals), with the others.

    One that failed comes before one that succeeded: where the latter is given, all have.
    """
    ranked = sorted(outcomes, key=lambda outcome: (_LEAST_FIRST.index(outcome.status), outcome.stream, outcome.offset))
    return replace(ranked[0], others=tuple(ranked[1:]))


_IDS_MAX: Final = 10_000
"""Ids in one question; more are asked in several."""

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
    """The outcome of each id, "unknown" ones too; of one collector, or of all."""
    ids = list(dict.fromkeys(message_ids))
    query, named = OUTCOMES_BY_ID, dict[str, int | str | None]()
    if collector_id is not None or collector is not None:
        query, named = OUTCOMES_IN_COLLECTOR, {"collector_id": collector_id, "collector": collector}
    found: dict[str, list[Outcome]] = {message_id: [] for message_id in ids}
    for start in range(0, len(ids), _IDS_MAX):
        # PostgreSQL's text holds no NUL: such an id is nobody's.
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
