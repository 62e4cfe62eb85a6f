"""A collector's messages in PostgreSQL, by id and state: one transaction a call.

A call whose commit is in doubt is repeated: it finds what the first one wrote, and returns the same. Rows are fenced
one by one: each statement names the member that they must belong to.
"""

import math
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from relatum.collecting._bulk import REASON_CHARACTERS_MAX, Collected, id_of_place
from relatum.collecting._collector_core import Advance, Result, Stored
from relatum.collecting._collector_members import (
    ADD_SOURCE,
    LOCK_LAPSED,
    LOCK_MEMBER,
    REMOVE_MEMBERS,
    CollectorMembers,
    logger,
)
from relatum.collecting._collector_rows import (
    GIVE_BACK,
    IS_MINE,
    KEEP_S,
    TAKE_OVER,
    TAKEN_OVER,
    TEXTS,
    added,
    by_stream,
    ends,
    forwarded,
    update,
)
from relatum.errors import RowRefused
from relatum.ids import MessageId
from relatum.outcomes import Outcome, read_outcomes
from relatum.store.database import AnyDatabase, Database
from relatum.store.members import LEASE_S
from relatum.store.settling import Tokens
from relatum.store.translation import translated_errors


class CollectorStore(CollectorMembers):
    """The store of one collector: members, streams and messages. Thread-safe.

    Callers repeat a call with the same arguments if it raises `DatabaseUnavailable`. A member is one running collector.
    It owns the messages that it collected until its lease has lapsed and another member takes them over.
    """

    def __init__(self, name: str, database: AnyDatabase, *, vhost: str = "/", keep_s: int | None = KEEP_S) -> None:
        super().__init__(name, database, vhost, keep_s)
        # Joined executors take connections of a `Database` that is given, and may hold all of them. The lease and
        # results have others.
        theirs = database if isinstance(database, Database) else self._database
        self._joined = Database(theirs, refusing=None, ending=self.ending, idle_s=LEASE_S)
        self._tokens = Tokens()
        self._token = 0

    # --- collecting ---------------------------------------------------------------------------------------------------

    def add(self, member: int, messages: Sequence[Collected], advance: Advance | None = None) -> Stored:
        """Store messages as collected, and move their stream's position; return those to be consumed here."""
        try:
            return self._add(member, messages, advance)
        except RowRefused as refused:
            nameless = self._refused(messages)
            if not nameless:
                raise
            places = ", ".join(str(message.place) for message in nameless[:10])
            extra = {"places": places, "messages": len(nameless)}
            logger.warning("message ids that the database cannot hold, known by their places: %s", refused, extra=extra)
        for message in nameless:
            message._note(message_id=id_of_place(message.place))
        return self._add(member, messages, advance)

    def _refused(self, messages: Sequence[Collected]) -> Sequence[Collected]:
        """The messages whose ids the database cannot hold, as its encoding lacks a character. A binary search."""
        try:
            with self._database.transaction() as connection:
                connection.execute(TEXTS, {"texts": [message.message_id for message in messages]})
        except RowRefused:
            middle = len(messages) // 2
            return [*self._refused(messages[:middle]), *self._refused(messages[middle:])] if middle else messages
        return []

    def _add(self, member: int, messages: Sequence[Collected], advance: Advance | None) -> Stored:
        with self._database.transaction() as connection:
            at = self._hold(connection, member)
            is_new = True
            if advance is not None:
                # Before the rows, so that a member that lost the race has nothing to roll back.
                is_new = self._advance(connection, member, advance)
            else:
                for stream in sorted({message.place.stream for message in messages}):
                    connection.execute(ADD_SOURCE, self._of(connection, of_stream=stream))
            mine = self._of(connection, of_member=member)
            return Stored(added(connection, messages, insert=is_new, **mine), at)

    # --- consuming ----------------------------------------------------------------------------------------------------

    def forward(self, member: int, bulk_id: int, places: Collection[MessageId]) -> Stored:
        """Store that an executor gets these messages now."""
        with self._database.transaction() as connection:
            mine = self._of(connection, of_member=member, of_bulk=bulk_id)
            return update(connection, forwarded(places, **mine), places)

    def finish(
        self, member: int, bulk_id: int, results: Sequence[Result], *, connection: sa.Connection | None = None
    ) -> Stored:
        """Store results of messages that this member still has in this bulk."""
        if connection is not None:
            with translated_errors():
                return self._finish(connection, member, bulk_id, results)
        try:
            with self._database.transaction() as connection:
                return self._finish(connection, member, bulk_id, results)
        except RowRefused:
            # Only a reason can hold such text, and it must not keep the result from being stored.
            results = [_in_ascii(result) for result in results]
        with self._database.transaction() as connection:
            return self._finish(connection, member, bulk_id, results)

    def _finish(self, connection: sa.Connection, member: int, bulk_id: int, results: Sequence[Result]) -> Stored:
        mine = self._of(connection, of_member=member, of_bulk=bulk_id)
        return update(connection, ends(results, **mine), [result.place for result in results])

    def give_back(self, member: int, places: Collection[MessageId]) -> bool:
        """Give unfinished messages to other members with executors for them; return whether all were given back."""
        with self._database.transaction() as connection:
            wanted = by_stream(places, **self._of(connection, of_member=member))
            for each in wanted:
                connection.execute(GIVE_BACK, each)
            return not any(connection.execute(IS_MINE, each).first() for each in wanted)

    @contextmanager
    def transaction(self, stop: threading.Event | None = None) -> Iterator[sa.Connection]:
        """A transaction that an executor may join. A commit in doubt is settled, as long as `stop` is not set."""
        with self._tokens.transaction(self._joined.engine, within_s=math.inf, stop=stop) as connection:
            yield connection

    # --- taking over --------------------------------------------------------------------------------------------------

    def take_over(self, member: int, types: Collection[str], most: int) -> list[tuple[Collected, float]]:
        """Take over unfinished messages of lapsed members, or of none, oldest first, each with the seconds until due.

        Not thread-safe.
        """
        # Marks the rows of this call and its repetitions. Bulks have positive ids.
        self._token = token = self._token or -1 - secrets.randbits(62)
        with self._database.transaction() as connection:
            self._hold(connection, member, LOCK_MEMBER)
            lapsed = list(connection.scalars(LOCK_LAPSED, self._of(connection, of_member=member)))
            taken = {"of_types": list(types), "most": most, "by": member, "token": token, "lapsed": lapsed}
            connection.execute(TAKE_OVER, self._of(connection, **taken))
            if lapsed:
                connection.execute(REMOVE_MEMBERS, {"lapsed": lapsed})
            rows = connection.execute(TAKEN_OVER, {"of_member": member, "token": token}).all()
        self._token = 0
        return [(_message_of(row), row.due_in_s or 0.0) for row in rows]

    # --- asking -------------------------------------------------------------------------------------------------------

    def outcomes_of(self, message_ids: Collection[str]) -> Mapping[str, Outcome]:
        """The outcome of each id."""
        with self._database.transaction() as connection:
            return read_outcomes(connection, message_ids, collector_id=self._collector_id(connection))

    def dispose(self) -> None:
        """Give connections back."""
        self._database.close()


def _message_of(row: Any) -> Collected:
    place = MessageId(row.stream, row.stream_offset)
    return Collected(place, row.message_id, row.type, row.size, None, row.attempts, row.collected_at)


def _in_ascii(result: Result) -> Result:
    """A result with a reason that any encoding can hold."""
    if result.reason is None:
        return result
    return replace(result, reason=result.reason.encode("ascii", "backslashreplace").decode()[:REASON_CHARACTERS_MAX])
