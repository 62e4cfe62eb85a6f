"""The one statement that asks what became of messages, and what its rows are."""

from collections.abc import Iterable
from typing import Final

import sqlalchemy as sa

from relatum.errors import NotFound
from relatum.outcomes._outcome_values import Outcome, OutcomeStatus, least_advanced, unknown
from relatum.store import collected_messages, collector_sources, collectors

_IDS_MAX: Final = 10_000
"""Ids in one question; more are asked in several."""

_messages: Final = collected_messages.c
_sources: Final = collector_sources.c

outcome_columns: Final = (
    _messages.message_id,
    _messages.state,
    collectors.c.name,
    _messages.type,
    _sources.stream,
    _messages.stream_offset,
    _messages.attempts,
    _messages.reason,
    _messages.collected_at,
    _messages.forwarded_at,
    _messages.finished_at,
)
"""What of a message and its collector makes an `Outcome`, in its order."""

outcomes_by_id: Final = (
    sa.select(*outcome_columns)
    .join_from(collected_messages, collector_sources, _sources.source_id == _messages.source_id)
    .join(collectors, collectors.c.collector_id == _sources.collector_id)
    .where(_messages.message_id == sa.any_(sa.bindparam("ids", type_=sa.ARRAY(sa.Text))))
)
"""The columns of `Outcome`, in its order, of every message with one of these ids."""


def read_outcomes(
    connection: sa.Connection,
    message_ids: Iterable[str],
    *,
    collector_id: int | None = None,
    collector: str | None = None,
) -> dict[str, Outcome]:
    """The outcome of each id, "unknown" ones too; of one collector, or of all."""
    ids = list(dict.fromkeys(message_ids))
    query = outcomes_by_id
    if collector_id is not None:
        query = query.where(collector_sources.c.collector_id == collector_id)
    if collector is not None:
        query = query.where(collectors.c.name == collector)
    found: dict[str, list[Outcome]] = {message_id: [] for message_id in ids}
    for start in range(0, len(ids), _IDS_MAX):
        # PostgreSQL's text holds no NUL: such an id is nobody's.
        asked = [message_id for message_id in ids[start : start + _IDS_MAX] if "\0" not in message_id]
        for message_id, state, *facts in connection.execute(query, {"ids": asked}):
            found[message_id].append(Outcome(message_id, OutcomeStatus(state), *facts))
    return {
        message_id: least_advanced(outcomes) if outcomes else unknown(message_id)
        for message_id, outcomes in found.items()
    }


def require_collector(connection: sa.Connection, name: str) -> None:
    if (
        connection.execute(sa.select(collectors.c.collector_id).where(collectors.c.name == name).limit(1)).first()
        is None
    ):
        raise NotFound(f"there is no collector {name!r}: its first member makes it")
