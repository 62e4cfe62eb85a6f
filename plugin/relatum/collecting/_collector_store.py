"""A collector's messages in PostgreSQL, by id and state. A call runs one statement, in one transaction, per stream.

A call whose commit is in doubt is repeated: it finds the rows that the first call wrote, and returns the same result.
Each row is fenced: statements name the member that must own it. A statement selects any number of rows by an array of
offsets in one stream, without a join that PostgreSQL could start at the wrong end while it has no statistics. Only a
take-over is one transaction of several statements.
"""

import math
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from relatum.collecting._bulk import BACKOFF_MAX_S, Collected, id_of_place
from relatum.collecting._collector_core import Advance, Result, Stored
from relatum.collecting._collector_members import (
    ADD,
    ADD_SOURCE,
    ADVANCE,
    LOCK_LAPSED,
    LOCK_MEMBER,
    PRESENT,
    REMOVE_MEMBERS,
    RENEW,
    CollectorMembers,
)
from relatum.collecting._handlers import logger
from relatum.common.checks import checked_count, checked_seconds
from relatum.common.ids import MessageId
from relatum.errors import Conflict, RowRefused
from relatum.outcomes import Outcome, OutcomeStatus, read_outcomes
from relatum.own_messages import REASON_CHARACTERS_MAX
from relatum.store.database import AnyDatabase, Database, sql, transaction
from relatum.store.members import LEASE_S
from relatum.store.rows import array_text, integers_text, known_by
from relatum.store.settling import Tokens
from relatum.store.translation import translated_errors

# `IS NOT DISTINCT FROM` excludes the index on members: it would read all unfinished messages of the member.
_MINE: Final = f"""source_id = {PRESENT} AND stream_offset = ANY (:offsets::bigint[])
    AND member_id IS NOT DISTINCT FROM :of_member::bigint"""

# Times are `statement_timestamp()`, since `now()` is the start of a joined transaction, which may be long ago.

# --- collecting and consuming. Statements return offsets in one row, which is faster to read than a row for each.
# A statement whose commit is in doubt is repeated: it finds the rows that it has changed, and leaves them unchanged.

FORWARD: Final = sql(f"""
    WITH done AS (
        UPDATE relatum.collected_messages
        SET state = 'forwarded', bulk_id = :of_bulk::bigint, next_attempt_at = NULL,
            attempts = attempts + CASE state WHEN 'collected' THEN 1 ELSE 0 END,
            forwarded_at = CASE state WHEN 'collected' THEN statement_timestamp() ELSE forwarded_at END
        WHERE {_MINE} AND (state = 'collected' OR (state = 'forwarded' AND bulk_id = :of_bulk::bigint))
        RETURNING stream_offset, forwarded_at)
    SELECT array_agg(stream_offset), max(forwarded_at) FROM done""")

UNFINISHED: Final = sql(f"""
    SELECT stream_offset FROM relatum.collected_messages WHERE {_MINE} AND finished_at IS NULL""")

# Most messages succeed: their statement needs no arrays of states and reasons.
SUCCEED: Final = sql(f"""
    WITH done AS (
        UPDATE relatum.collected_messages
        SET state = 'succeeded', reason = NULL, finished_at = coalesce(finished_at, statement_timestamp()),
            next_attempt_at = NULL
        WHERE {_MINE} AND bulk_id = :of_bulk::bigint AND state IN ('forwarded', 'succeeded')
        RETURNING stream_offset, finished_at)
    SELECT array_agg(stream_offset), max(finished_at) FROM done""")

# A row's position among the offsets is its position in the other arrays.
FINISH: Final = sql(f"""
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

# Deletes a stream's oldest first, in index order, without a scan of all finished messages. Selects rows by their ctid.
FORGET: Final = sql("""
    DELETE FROM relatum.collected_messages WHERE ctid = ANY (ARRAY (
        SELECT old.ctid
        FROM relatum.collector_sources AS source JOIN relatum.collectors AS collector USING (collector_id)
            CROSS JOIN LATERAL (
                SELECT message.ctid FROM relatum.collected_messages AS message
                WHERE message.source_id = source.source_id
                    AND finished_at < now() - make_interval(secs => collector.keep_s)
                -- The subquery hides the limit, for which PostgreSQL would read and sort a busy stream's whole backlog.
                ORDER BY finished_at LIMIT (SELECT :most::integer)) AS old
        WHERE :in_collector::integer IS NULL OR collector_id = :in_collector::integer
        LIMIT :most::integer))""")

# --- taking over

# Messages without a member were left to others, or stored by release 0.4.0. Locked rows are skipped: their result is
# being stored.
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

LEAVE_TO_OTHERS: Final = sql(f"""
    UPDATE relatum.collected_messages SET member_id = NULL WHERE {_MINE} AND state = 'collected'""")

TAKEN_OVER: Final = sql("""
    SELECT stream, stream_offset, message_id, type, size, attempts, collected_at,
        CAST(greatest(0.0, extract(epoch FROM next_attempt_at - clock_timestamp())) AS float) AS due_in_s
    FROM relatum.collected_messages AS message JOIN relatum.collector_sources USING (source_id)
    WHERE message.member_id = :of_member::bigint AND finished_at IS NULL AND state = 'collected'
        AND bulk_id = :token::bigint
    ORDER BY collected_at, source_id, stream_offset""")

KEEP_S: Final = 7 * 86_400
"""Default seconds that a finished message is kept: a producer can query its outcome after a weekend of downtime."""

BATCH_ROWS: Final = 10_000
"""Maximum rows deleted in one transaction, which takes a fraction of a second."""


class CollectorStore(CollectorMembers):
    """The store of one collector: members, streams and messages. Thread-safe.

    Callers repeat a call with the same arguments if it raises `DatabaseUnavailable`. A member is one running collector.
    It owns the messages that it collected until its lease has lapsed and another member has taken them over.
    """

    def __init__(self, name: str, database: AnyDatabase, *, vhost: str = "/", keep_s: int | None = KEEP_S) -> None:
        super().__init__(name, database, vhost, keep_s)
        # Executors that join transactions use a given `Database`, and may hold all its connections. Renewals and other
        # results use separate connections.
        executors_database = database if isinstance(database, Database) else self._database
        self._joined = Database(executors_database, refusing=None, ending=self.ending, idle_s=LEASE_S)
        self._tokens = Tokens()
        self._token = 0

    def renew(self, member: int) -> bool:
        """Extend the lease, even a lapsed one; return False if another member took over and removed this one."""
        return bool(self._database.rows(RENEW, {"id": member}))

    def forget(self) -> None:
        """Delete messages that were finished more than `keep_s` ago."""
        forget_finished(self._database.engine, self._collector)

    # --- collecting ---------------------------------------------------------------------------------------------------

    def add(self, member: int, messages: Sequence[Collected], advance: Advance | None = None) -> Stored:
        """Store messages as collected, and move their stream's position; return the messages to consume here."""
        try:
            return self._add(member, messages, advance)
        except RowRefused as refused:
            non_ascii = [message for message in messages if not message.message_id.isascii()]
            if not non_ascii:
                raise
            places = ", ".join(str(message.place) for message in non_ascii[:10])
            extra = {"places": places, "messages": len(non_ascii)}
            logger.warning("stream and offset replace ids that the database cannot store: %s", refused, extra=extra)
        for message in non_ascii:
            message._note(message_id=id_of_place(message.place))
        return self._add(member, messages, advance)

    def _add(self, member: int, messages: Sequence[Collected], advance: Advance | None) -> Stored:
        by_stream, moved = defaultdict[str, list[Collected]](list), dict[str, Any]()
        if advance is not None:
            by_stream[advance.stream] = []
            moved = {
                "expected": advance.from_offset,
                "to": advance.to_offset,
                "more_passed_over": advance.passed_over,
                **known_by(advance.known_by),
            }
        for message in messages:
            by_stream[message.place.stream].append(message)
        owned, at = set[MessageId](), None
        for stream, of_stream in sorted(by_stream.items()):
            named = self._values(
                of_stream=stream,
                of_member=member,
                offsets=integers_text(message.place.offset for message in of_stream),
                sizes=integers_text(message.bytes for message in of_stream),
                message_ids=array_text(message.message_id for message in of_stream),
                types=array_text(message.type for message in of_stream),
            )
            rows = self._database.rows(ADVANCE, named | moved) if moved else self._add_to_present(named)
            if not rows:
                raise self._removed(member)
            at, has_source, added = rows[0]
            if not has_source:
                raise Conflict(
                    f"nothing of {stream!r} was written for {self.name!r}: another member follows the stream or has "
                    f"executors for types that this one lacks, or the position is not {advance and advance.from_offset}"
                )
            if added == len(of_stream):
                owned.update(message.place for message in of_stream)
            else:
                owned.update(MessageId(stream, offset) for (offset,) in self._database.rows(UNFINISHED, named))
        return Stored(frozenset(owned), at)

    def _add_to_present(self, named: dict[str, Any]) -> Sequence[Any]:
        """Add messages to the current generation of their stream; again if that generation ended in the meantime."""
        while True:
            self._database.rows(ADD_SOURCE, named)
            rows = self._database.rows(ADD, named)
            if not rows or rows[0][1]:
                return rows

    # --- consuming ----------------------------------------------------------------------------------------------------

    def forward(self, member: int, bulk_id: int, places: Collection[MessageId]) -> Stored:
        """Store that an executor gets these messages now; return the messages that this member still owns."""
        return self._change((FORWARD, each) for each in self._by_stream(member, places, of_bulk=bulk_id))

    def finish(
        self,
        member: int,
        bulk_id: int,
        results: Sequence[Result],
        *,
        connection: sa.Connection | None = None,
        token: UUID | None = None,
    ) -> Stored:
        """Store results of messages that this member still owns in this bulk, and the token of a joined transaction."""
        others = {result.place: result for result in results if result.status is not OutcomeStatus.SUCCEEDED}
        succeeded = (result.place for result in results if result.place not in others)
        changes = [(SUCCEED, each) for each in self._by_stream(member, succeeded, of_bulk=bulk_id)]
        for named in self._by_stream(member, others, of_bulk=bulk_id):
            of_stream = [result for place, result in others.items() if place.stream == named["of_stream"]]
            named["states"] = [result.status.value for result in of_stream]
            named["reasons"] = [result.reason for result in of_stream]
            named["retries_s"] = [result.retry_in_s for result in of_stream]
            changes.append((FINISH, named))
        if connection is not None and token is not None:
            self._tokens.write(connection, token)
        try:
            return self._change(changes, connection)
        except RowRefused:
            ascii_only = [each._replace(reason=_in_ascii(each.reason)) for each in results]
            if connection is not None or ascii_only == [*results]:
                raise
            # Only a reason can contain refused text, which must not prevent the storing of the result.
            return self.finish(member, bulk_id, ascii_only)

    def _change(
        self, changes: Iterable[tuple[sa.TextClause, dict[str, Any]]], connection: sa.Connection | None = None
    ) -> Stored:
        """Change rows, by one statement per stream; return their places and the time."""
        places, at = set[MessageId](), None
        for change, named in changes:
            if connection is None:
                [(offsets, moment)] = self._database.rows(change, named)
            else:
                with translated_errors():
                    offsets, moment = connection.execute(change, named).one()
            places.update(MessageId(named["of_stream"], offset) for offset in offsets or ())
            at = at or moment
        return Stored(frozenset(places), at)

    def _by_stream(self, member: int, places: Iterable[MessageId], **named: Any) -> list[dict[str, Any]]:
        """Return parameters that name a member's messages, for one statement per stream."""
        offsets = defaultdict[str, list[int]](list)
        for stream, offset in places:
            offsets[stream].append(offset)
        named = self._values(of_member=member, **named)
        return [{"of_stream": stream, "offsets": integers_text(each), **named} for stream, each in offsets.items()]

    def unfinished(self, member: int, places: Collection[MessageId]) -> set[MessageId]:
        return {
            MessageId(each["of_stream"], offset)
            for each in self._by_stream(member, places)
            for (offset,) in self._database.rows(UNFINISHED, each)
        }

    def transaction(
        self, store: Callable[[sa.Connection, UUID], object] | None = None, stop: threading.Event | None = None
    ) -> AbstractContextManager[sa.Connection]:
        """Open a transaction for an executor to join; see `Tokens`. Settles a commit in doubt, unless `stop` is set."""
        return self._tokens.transaction(self._joined.engine, store, within_s=math.inf, stop=stop)

    # --- taking over --------------------------------------------------------------------------------------------------

    def take_over(
        self, member: int, types: Collection[str], most: int, *, held: Container[MessageId] = ()
    ) -> tuple[list[tuple[Collected, float]], list[MessageId]]:
        """Take over unfinished messages of lapsed members, or of no member, oldest first. Not thread-safe.

        `held`: The places of messages in memory. A message found at one of them is left to other members: this member
        has lost the message in memory, which may even be of an earlier stream of that name. Returns the messages taken
        over, each with the seconds until it is due, and the places of messages left to others.
        """
        # Marks the rows of this call and of its repetitions. Negative, since ids of bulks are positive.
        self._token = token = self._token or -1 - secrets.randbits(62)
        with self._database.transaction() as connection:
            self._hold(connection, member, LOCK_MEMBER)
            lapsed = list(connection.scalars(LOCK_LAPSED, self._values(of_member=member)))
            taken = {"of_types": list(types), "most": most, "by": member, "token": token, "lapsed": lapsed}
            connection.execute(TAKE_OVER, self._values(**taken))
            if lapsed:
                connection.execute(REMOVE_MEMBERS, {"lapsed": lapsed})
            found, left = list[tuple[Collected, float]](), list[MessageId]()
            rows = connection.execute(TAKEN_OVER, {"of_member": member, "token": token})
            for stream, offset, message_id, type_, size, attempts, collected_at, due_in_s in rows:
                place = MessageId(stream, offset)
                if place in held:
                    left.append(place)
                else:
                    message = Collected(place, message_id, type_, size, None, attempts, collected_at)
                    # No retry waits longer, unless the server's clock was set back.
                    found.append((message, min(due_in_s or 0.0, BACKOFF_MAX_S)))
            for each in self._by_stream(member, left):
                connection.execute(LEAVE_TO_OTHERS, each)
        self._token = 0
        return found, left

    def leave_to_others(self, member: int, places: Collection[MessageId]) -> None:
        """Release messages that this member collected but did not forward, so that any member can take them over."""
        for each in self._by_stream(member, places):
            self._database.rows(LEAVE_TO_OTHERS, each)

    # --- reading ------------------------------------------------------------------------------------------------------

    def outcomes_of(self, message_ids: Collection[str]) -> Mapping[str, Outcome]:
        with self._database.transaction() as connection:
            return read_outcomes(connection, message_ids, collector_id=self._find(connection) or 0)

    def dispose(self) -> None:
        self._database.close()


def _in_ascii(reason: str | None) -> str | None:
    return reason and reason.encode("ascii", "backslashreplace").decode()[:REASON_CHARACTERS_MAX]


def forget_finished(
    engine: sa.Engine,
    collector: int | None = None,
    *,
    batch_rows: int = BATCH_ROWS,
    seconds: float | None = 0.5,
) -> int:
    """Delete messages that finished more than their collector's `keep_s` seconds ago; return how many.

    Args:
        engine: The database's engine.
        collector: A collector's id. None (default): all collectors.
        batch_rows: Maximum rows deleted in one transaction. Default: 10,000.
        seconds: Seconds after which no further batch begins. Default: 0.5. None: delete until no message is left.
    """
    checked_count("batch_rows", batch_rows)
    if seconds is not None:
        checked_seconds("seconds", seconds)
    deadline = None if seconds is None else time.monotonic() + seconds
    forgotten, deleted = 0, 1
    while deleted and (deadline is None or time.monotonic() < deadline):
        with transaction(engine) as connection:
            deleted = connection.execute(FORGET, {"in_collector": collector, "most": batch_rows}).rowcount
        forgotten += deleted
    return forgotten
