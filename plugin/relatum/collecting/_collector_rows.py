"""The rows of collected messages: statements and the calls that run them in a transaction of the store.

Rows are named by an array of offsets in one stream: one statement for any number, without a join that PostgreSQL could
start at the wrong end before it has statistics.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import sqlalchemy as sa

from relatum.checks import checked_count, checked_seconds
from relatum.collecting._bulk import Collected
from relatum.collecting._collector_core import Result, Stored
from relatum.ids import MessageId
from relatum.outcomes import OutcomeStatus
from relatum.store.database import sql
from relatum.store.rows import BigIntegers, array_text
from relatum.store.translation import translated_errors

PRESENT: Final = """(SELECT source_id FROM relatum.collector_sources
        WHERE collector_id = :in_collector::integer AND stream = :of_stream::text AND replaced_at IS NULL)"""
"""The present generation of a stream."""

# Compared so that no index on members is used, which would read all the member's unfinished messages.
_MINE: Final = f"""source_id = {PRESENT} AND stream_offset = ANY (:offsets::bigint[])
    AND member_id IS NOT DISTINCT FROM :of_member::bigint"""


def _on_rows(text: str) -> sa.TextClause:
    """A statement with the parameter `offsets`, which is sent as one text."""
    return sql(text).bindparams(sa.bindparam("offsets", type_=BigIntegers()))


# `statement_timestamp()`, as `now()` is the beginning of a joined transaction, which may be long ago.

# --- collecting and consuming. Offsets come back in one row, which the client reads faster than a row for each.
# Arrays are sent as one text, so that adding rows takes no longer than COPY.

ADD: Final = _on_rows(f"""
    INSERT INTO relatum.collected_messages (source_id, stream_offset, member_id, size, message_id, type)
    SELECT {PRESENT}, stream_offset, :of_member::bigint, size, message_id, type
    FROM unnest(:offsets::bigint[], :sizes::bigint[], :message_ids::text[], :types::text[])
        AS given (stream_offset, size, message_id, type)
    ON CONFLICT DO NOTHING""").bindparams(sa.bindparam("sizes", type_=BigIntegers()))

MINE_TO_CONSUME: Final = _on_rows(f"""
    SELECT stream_offset FROM relatum.collected_messages
    WHERE {_MINE} AND state = 'collected' AND attempts = 0""")

# A statement whose commit was lost is repeated: it finds the rows that it changed, and leaves them as they are.

FORWARD: Final = _on_rows(f"""
    WITH done AS (
        UPDATE relatum.collected_messages
        SET state = 'forwarded', bulk_id = :of_bulk::bigint, next_attempt_at = NULL,
            attempts = attempts + CASE state WHEN 'collected' THEN 1 ELSE 0 END,
            forwarded_at = CASE state WHEN 'collected' THEN statement_timestamp() ELSE forwarded_at END
        WHERE {_MINE} AND (state = 'collected' OR (state = 'forwarded' AND bulk_id = :of_bulk::bigint))
        RETURNING stream_offset, forwarded_at)
    SELECT array_agg(stream_offset), max(forwarded_at) FROM done""")

TEXTS: Final = sql("SELECT :texts::text[]")
"""Fails if the database's encoding cannot hold one of the texts."""

# Messages without a member are taken over by the next one with an executor.
GIVE_BACK: Final = _on_rows(f"""
    UPDATE relatum.collected_messages SET member_id = NULL, state = 'collected', bulk_id = NULL
    WHERE {_MINE} AND finished_at IS NULL AND EXISTS (
        SELECT FROM relatum.collector_members AS other
        WHERE other.collector_id = :in_collector::integer AND other.member_id <> :of_member::bigint
            AND other.lease_expires_at >= clock_timestamp() AND collected_messages.type = ANY (other.types))""")

UNFINISHED: Final = _on_rows(f"""
    SELECT stream_offset FROM relatum.collected_messages WHERE {_MINE} AND finished_at IS NULL""")

# The result of nearly all messages: no array but the offsets.
SUCCEED: Final = _on_rows(f"""
    WITH done AS (
        UPDATE relatum.collected_messages
        SET state = 'succeeded', reason = NULL, finished_at = coalesce(finished_at, statement_timestamp()),
            next_attempt_at = NULL
        WHERE {_MINE} AND bulk_id = :of_bulk::bigint AND state IN ('forwarded', 'succeeded')
        RETURNING stream_offset, finished_at)
    SELECT array_agg(stream_offset), max(finished_at) FROM done""")

# The arrays' items are found by the row's position among the offsets.
FINISH: Final = _on_rows(f"""
    WITH done AS (
        UPDATE relatum.collected_messages
        SET state = (:states::text[])[array_position(:offsets::bigint[], stream_offset)],
            reason = (:reasons::text[])[array_position(:offsets::bigint[], stream_offset)],
            finished_at = CASE (:states::text[])[array_position(:offsets::bigint[], stream_offset)]
                WHEN 'collected' THEN NULL ELSE coalesce(finished_at, statement_timestamp()) END,
            next_attempt_at = CASE (:states::text[])[array_position(:offsets::bigint[], stream_offset)]
                WHEN 'collected' THEN statement_timestamp() + make_interval(secs => coalesce(
                    (:retries_s::float[])[array_position(:offsets::bigint[], stream_offset)], 0.0)) END
        WHERE {_MINE} AND bulk_id = :of_bulk::bigint
            AND state IN ('forwarded', (:states::text[])[array_position(:offsets::bigint[], stream_offset)])
        RETURNING stream_offset, coalesce(finished_at, statement_timestamp()) AS at)
    SELECT array_agg(stream_offset), max(at) FROM done""")

# --- forgetting

KEPT: Final = sql("""
    SELECT source_id, keep_s FROM relatum.collector_sources JOIN relatum.collectors USING (collector_id)
    WHERE keep_s IS NOT NULL AND (:in_collector::integer IS NULL OR collector_id = :in_collector::integer)""")

# Oldest first, in the order of the index: no scan, however many are finished. Rows are named by their ctid.
FORGET: Final = sql("""
    DELETE FROM relatum.collected_messages
    WHERE ctid = ANY (ARRAY (
            SELECT ctid FROM relatum.collected_messages
            WHERE source_id = :of_source::integer
                AND finished_at < now() - make_interval(secs => :older_s::float)
            ORDER BY finished_at LIMIT :most::integer))
        AND source_id = :of_source::integer
        AND finished_at < now() - make_interval(secs => :older_s::float)""")

# --- taking over

# Messages without a member were given back by one without a broker, or stored by release 0.4.0. Locked rows are
# skipped: their result is just being stored.
TAKE_OVER: Final = sql("""
    WITH taken AS (
        SELECT message.source_id, message.stream_offset
        FROM relatum.collected_messages AS message JOIN relatum.collector_sources AS source USING (source_id)
        WHERE (message.member_id = ANY (:lapsed::bigint[]) OR message.member_id IS NULL)
            AND message.finished_at IS NULL AND message.type = ANY (:of_types::text[])
            AND source.collector_id = :in_collector::integer AND source.replaced_at IS NULL
        ORDER BY message.collected_at, message.source_id, message.stream_offset
        LIMIT :most::integer FOR UPDATE OF message SKIP LOCKED)
    UPDATE relatum.collected_messages AS message
    SET member_id = :by::bigint, state = 'collected', bulk_id = :token::bigint
    FROM taken WHERE message.source_id = taken.source_id AND message.stream_offset = taken.stream_offset""")

LEAVE_TO_OTHERS: Final = _on_rows(f"""
    UPDATE relatum.collected_messages SET member_id = NULL WHERE {_MINE} AND bulk_id = :token::bigint""")

TAKEN_OVER: Final = sql("""
    SELECT stream, stream_offset, message_id, type, size, attempts, collected_at,
        CAST(greatest(0.0, extract(epoch FROM next_attempt_at - clock_timestamp())) AS float) AS due_in_s
    FROM relatum.collected_messages AS message JOIN relatum.collector_sources USING (source_id)
    WHERE message.member_id = :of_member::bigint AND finished_at IS NULL AND state = 'collected'
        AND bulk_id = :token::bigint
    ORDER BY collected_at, source_id, stream_offset""")


def added(connection: sa.Connection, messages: Sequence[Collected], **mine: int) -> frozenset[MessageId]:
    """Add missing rows; return the places of messages that wait for this member to consume them.

    `mine`: The parameters that name the collector and the member.
    """
    by_stream: dict[str, list[Collected]] = {}
    for message in messages:
        by_stream.setdefault(message.place.stream, []).append(message)
    added = set[MessageId]()
    for stream, of_stream in by_stream.items():
        named = {"of_stream": stream, "offsets": [message.place.offset for message in of_stream], **mine}
        values = {
            "sizes": [message.bytes for message in of_stream],
            "message_ids": array_text(message.message_id for message in of_stream),
            "types": array_text(message.type for message in of_stream),
        }
        if connection.execute(ADD, named | values).rowcount == len(of_stream):
            added.update(message.place for message in of_stream)
        else:
            added.update(MessageId(stream, offset) for offset in connection.scalars(MINE_TO_CONSUME, named))
    return frozenset(added)


Change = tuple[sa.TextClause, dict[str, Any]]
"""A statement that changes rows of one stream, and its parameters."""


def update(connection: sa.Connection, changes: Iterable[Change], places: Collection[MessageId]) -> Stored:
    """Change rows of these places; return which, and when."""
    found, at = list[tuple[str, list[int]]](), None
    for change, named in changes:
        offsets, moment = connection.execute(change, named).one()
        found.append((named["of_stream"], offsets or []))
        at = at or moment
    if sum(len(offsets) for _, offsets in found) == len(places):
        return Stored(frozenset(places), at)
    return Stored(frozenset(MessageId(stream, offset) for stream, offsets in found for offset in offsets), at)


def attempts(places: Iterable[MessageId], **mine: int) -> list[Change]:
    """The changes that store an attempt. `mine`: As for `added`, and the bulk."""
    return [(FORWARD, named) for named in by_stream(places, **mine)]


def ends(results: Sequence[Result], **mine: int) -> list[Change]:
    """The changes that store results. `mine`: As for `attempts`."""
    others = {result.place: result for result in results if result.status is not OutcomeStatus.SUCCEEDED}
    succeeded = (result.place for result in results if result.place not in others)
    changes = [(SUCCEED, named) for named in by_stream(succeeded, **mine)]
    for named in by_stream(others, **mine):
        its_own = [others[MessageId(named["of_stream"], offset)] for offset in named["offsets"]]
        named["states"] = [result.status.value for result in its_own]
        named["reasons"] = [result.reason for result in its_own]
        named["retries_s"] = [result.retry_in_s for result in its_own]
        changes.append((FINISH, named))
    return changes


def by_stream(places: Iterable[MessageId], **named: Any) -> list[dict[str, Any]]:
    """The parameters that name places, for one statement a stream."""
    offsets = defaultdict[str, list[int]](list)
    for stream, offset in places:
        offsets[stream].append(offset)
    return [{"of_stream": stream, "offsets": of_stream, **named} for stream, of_stream in offsets.items()]


KEEP_S: Final = 7 * 86_400
"""Seconds a finished message is kept by default: a producer that was down over a weekend can still ask for it."""

BATCH_ROWS: Final = 10_000
"""Rows deleted in one transaction: a fraction of a second."""


def forget_finished(
    engine: sa.Engine,
    collector: int | None = None,
    *,
    batch_rows: int = BATCH_ROWS,
    seconds: float | None = 0.5,
) -> int:
    """Delete messages that were finished longer ago than their collector keeps them; return how many.

    Args:
        engine: The database.
        collector: The id of one; None: all collectors.
        batch_rows: Rows deleted in one transaction at most.
        seconds: Seconds after which no further batch is begun; None: until none is left.
    """
    checked_count("batch_rows", batch_rows)
    if seconds is not None:
        checked_seconds("seconds", seconds)
    deadline = None if seconds is None else time.monotonic() + seconds
    with translated_errors(), engine.connect() as connection:
        sources = connection.execute(KEPT, {"in_collector": collector}).all()
    forgotten = 0
    for source in sources:
        bounds = {"of_source": source.source_id, "older_s": source.keep_s, "most": batch_rows}
        deleted = batch_rows
        while deleted == batch_rows and (deadline is None or time.monotonic() < deadline):
            with translated_errors(), engine.begin() as connection:
                deleted = connection.execute(FORGET, bounds).rowcount
            forgotten += deleted
    return forgotten
