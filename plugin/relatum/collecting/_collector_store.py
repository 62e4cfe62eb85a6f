"""The durable store of a collector: ids and states in PostgreSQL, one transaction a call.

Each call may be repeated when it is not known whether its commit came through: what the first one wrote is found
again, and the answer is the same. Rows are fenced one by one: a statement names the member they must belong to.
"""

import logging
import math
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa

from relatum.collecting import _collector_rows as message_rows
from relatum.collecting import _collector_sources as member_rows
from relatum.collecting._bulk import REASON_CHARACTERS_MAX, Collected, id_of_place
from relatum.collecting._collector_core import Advance, Followed, Result, Stored
from relatum.collecting._collector_rows import (
    KEEP_S,
    added,
    by_source,
    ends,
    forget_finished,
    forwarded,
    update,
)
from relatum.collecting._collector_sources import CollectorSources
from relatum.errors import Conflict, RowRefused
from relatum.ids import MessageId
from relatum.outcomes import Outcome, read_outcomes
from relatum.processes import new_holder
from relatum.reading import Position
from relatum.store.database import AnyDatabase, Database
from relatum.store.members import LEASE_S
from relatum.store.settling import Tokens, forget_settlements
from relatum.store.translation import translated_errors
from relatum.waiting import Deadline

logger = logging.getLogger("relatum.collector")

REPLACED: Final = "the stream was deleted and declared again, or lost its end, before the message was consumed"
"""Why messages of a stream's old generation failed."""

_POOL: Final = 10
"""Connections kept; more are opened where it takes them."""


class CollectorStore:
    """The states of one collector's messages in PostgreSQL. Thread-safe.

    Each call may raise `DatabaseUnavailable`, and is repeated then with the same arguments. A member is one running
    collector: what it collected is its own until its lease has lapsed and another member takes it over.
    """

    def __init__(self, name: str, database: AnyDatabase, *, vhost: str = "/", keep_s: int | None = KEEP_S) -> None:
        self.name = name
        self._sources = CollectorSources(name, vhost, keep_s)
        self.ending = Deadline(None)
        # A member that is frozen must not keep rows locked that others wait for.
        self._database = Database(
            database, refusing=None, ending=self.ending, pool_size=_POOL, is_bounded=False, idle_s=LEASE_S
        )
        self._engine = self._database.engine
        # Executors that join wait for a connection of a `Database` that is given, and may hold all of them: the lease
        # is renewed, and results are stored, all the same.
        theirs = database if isinstance(database, Database) else self._database
        self._joined = Database(theirs, refusing=None, ending=self.ending, idle_s=LEASE_S)
        self.server = self._database.address.name
        self._lock = threading.Lock()
        self._taking: dict[int, int] = {}
        self._tokens = Tokens()
        self._has_said_lacking = False

    # Members

    def end_in(self, seconds: float) -> None:
        """Let go of a database that does not answer, after so many seconds; a new member begins anew."""
        self.ending.end_in(seconds)

    def open(self, types: Collection[str], lease_s: float) -> int:
        """Join as a new member with executors of these types; gives its id."""
        self.ending.begin_anew()
        with self._database.transaction() as connection:
            member = {
                "in_collector": self._sources.ensure(connection),
                "held_by": new_holder(),
                "has_types": sorted(types),
                "holds_s": lease_s,
            }
            forget_settlements(connection)
            return int(connection.execute(member_rows.ADD_MEMBER, member).scalar_one())

    def renew(self, member: int) -> bool:
        """Extend the lease, also one that lapsed; and forget what has been finished for longer than it is kept."""
        with self._database.transaction() as connection:
            collector = self._sources.collector_id(connection)
            is_there = connection.execute(member_rows.RENEW, {"id": member}).rowcount == 1
        forget_finished(self._engine, collector)
        return is_there

    def close(self, member: int) -> None:
        """Leave: others may take over at once."""
        with self._database.transaction() as connection:
            connection.execute(member_rows.UNFOLLOW_ALL, {"by": member})
            connection.execute(member_rows.LEAVE, {"id": member})
            connection.execute(member_rows.REMOVE_MEMBERS, {"lapsed": [member]})

    # Streams

    def follow(self, member: int, stream: str, initial: int) -> Followed | None:
        """Follow a stream; None where a member with a lease does, or has executors of types that this one lacks.

        `initial`: The position of a stream that this collector never followed before.
        """
        with self._database.transaction() as connection:
            self._sources.hold(connection, member)
            source = self._sources.lock(connection, stream)
            is_others = source.member_id not in (None, member)
            if is_others and connection.execute(member_rows.IS_ALIVE, {"of_member": source.member_id}).first():
                return None
            taken = {"id": source.source_id, "in_collector": self._sources.collector_id(connection)}
            taken |= {"of_member": member, "initial": initial}
            position = connection.execute(member_rows.FOLLOW, taken).scalar_one_or_none()
            if position is None:
                self._say_lacking(connection, member)
                return None
        self._has_said_lacking = False
        if source.last_offset is None:
            return Followed(position, is_new=source.position is None)
        return Followed(position, Position(source.last_offset, source.last_fingerprint, source.last_chunk_ms))

    def _say_lacking(self, connection: sa.Connection, member: int) -> None:
        """Say, once, that this member follows nothing beside others that have executors of more types."""
        if self._has_said_lacking:
            return
        self._has_said_lacking = True
        named = {"in_collector": self._sources.collector_id(connection)}
        types = {row.member_id: set(row.types) for row in connection.execute(member_rows.TYPES_ALIVE, named)}
        everything = set[str]().union(*types.values())
        lacking = sorted(everything - types.get(member, set()))
        if everything in types.values():
            logger.info("collector %r: those follow its streams that have executors of %s, too", self.name, lacking)
        else:
            text = "collector %r: nobody follows its streams: others have executors of %s, and none of all types"
            logger.warning(text, self.name, lacking)

    def held(self, member: int) -> frozenset[str]:
        """The streams it is of no use to ask for: others follow them, or have executors of types this member lacks."""
        with self._database.transaction() as connection:
            named = {"in_collector": self._sources.collector_id(connection), "of_member": member}
            return frozenset(connection.scalars(member_rows.HELD, named))

    def begin_anew(self, member: int, stream: str, initial: int) -> None:
        """Begin a new generation of a stream, for whoever follows it next; what is unfinished of the old one failed."""
        with self._database.transaction() as connection:
            old = self._its_own(connection, member, stream)
            connection.execute(member_rows.REPLACE_SOURCE, {"id": old.source_id})
            connection.execute(member_rows.FAIL_UNFINISHED, {"of_source": old.source_id, "why": REPLACED})
            new = self._sources.lock(connection, stream)
            connection.execute(member_rows.SET_BACK, {"id": new.source_id, "to": initial})

    def _its_own(self, connection: sa.Connection, member: int, stream: str) -> Any:
        """The row of a stream that a member follows, locked."""
        self._sources.hold(connection, member)
        source = self._sources.lock(connection, stream)
        if source.member_id != member:
            raise Conflict(f"another member of {self.name!r} follows {stream!r}")
        return source

    def last_collected(self, stream: str, until: int) -> tuple[int, str] | None:
        """The last message of a stream's present generation up to an offset: its offset, and its id."""
        with self._database.transaction() as connection:
            named = {"in_collector": self._sources.collector_id(connection), "of_stream": stream, "until": until}
            row = connection.execute(member_rows.LAST_COLLECTED, named).one_or_none()
            return None if row is None else (row.stream_offset, row.message_id)

    def cut_back(self, member: int, stream: str, behind: int) -> None:
        """Go on behind an offset in a stream that lost its end: what lay there is over, and its places are free."""
        with self._database.transaction() as connection:
            source = self._its_own(connection, member, stream)
            named = {"in_collector": self._sources.collector_id(connection), "of_stream": stream}
            lost = connection.execute(member_rows.ADD_REPLACED, named).scalar_one()
            moved = {"of_source": source.source_id, "behind": behind, "to_source": lost}
            connection.execute(member_rows.MOVE_LOST, moved)
            connection.execute(member_rows.FAIL_UNFINISHED, {"of_source": lost, "why": REPLACED})
            connection.execute(member_rows.SET_BACK, {"id": source.source_id, "to": behind + 1})

    def unfollow(self, member: int, stream: str) -> None:
        """Let another member follow the stream."""
        with self._database.transaction() as connection:
            released = {"by": member, "in_collector": self._sources.collector_id(connection), "of_stream": stream}
            connection.execute(member_rows.UNFOLLOW, released)

    # Messages

    def add(self, member: int, messages: Sequence[Collected], advance: Advance | None = None) -> Stored:
        """Store messages as collected, and move the position of their stream; gives those to be consumed here."""
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
        """Those whose ids the database cannot hold: its encoding may have no place for a character."""
        try:
            with self._database.transaction() as connection:
                connection.execute(message_rows.TEXTS, {"texts": [message.message_id for message in messages]})
        except RowRefused:
            middle = len(messages) // 2
            return [*self._refused(messages[:middle]), *self._refused(messages[middle:])] if middle else messages
        return []

    def _add(self, member: int, messages: Sequence[Collected], advance: Advance | None) -> Stored:
        with self._database.transaction() as connection:
            at = self._sources.hold(connection, member)
            # Before the rows, so that a member that lost the race has written nothing it must roll back.
            is_new, sources = True, dict[str, int]()
            if advance is None:
                sources = self._sources.ids(connection, {message.place.stream for message in messages})
            else:
                is_new, sources[advance.stream] = self._sources.advance(connection, member, advance)
            mine = added(connection, member, messages, sources, insert=is_new)
        self._sources.remember(sources)
        return Stored(mine, at)

    def forward(self, member: int, bulk_id: int, places: Collection[MessageId]) -> Stored:
        """Note that an executor is handed these now."""
        with self._database.transaction() as connection:
            sources = self._sources.known(connection, {place.stream for place in places})
            changes = forwarded(places, sources, of_member=member, of_bulk=bulk_id)
            return update(connection, changes, places, sources)

    def finish(
        self, member: int, bulk_id: int, results: Sequence[Result], *, connection: sa.Connection | None = None
    ) -> Stored:
        """Store what an attempt came to, of what this member still has in this bulk."""
        if connection is not None:
            with translated_errors():
                return self._finish(connection, member, bulk_id, results)
        try:
            with self._database.transaction() as connection:
                return self._finish(connection, member, bulk_id, results)
        except RowRefused:
            # Nothing else in it is anybody's own text: a reason must not keep a result from being stored.
            results = [_in_ascii(result) for result in results]
        with self._database.transaction() as connection:
            return self._finish(connection, member, bulk_id, results)

    def _finish(self, connection: sa.Connection, member: int, bulk_id: int, results: Sequence[Result]) -> Stored:
        places = [result.place for result in results]
        sources = self._sources.known(connection, {place.stream for place in places})
        changes = ends(results, sources, of_member=member, of_bulk=bulk_id)
        return update(connection, changes, places, sources)

    def give_back(self, member: int, places: Collection[MessageId]) -> bool:
        """Let others have unfinished messages, if there are any who consume them."""
        with self._database.transaction() as connection:
            named = {"in_collector": self._sources.collector_id(connection), "of_member": member}
            wanted = by_source(places, self._sources.known(connection, {place.stream for place in places}), **named)
            for each in wanted:
                connection.execute(message_rows.GIVE_BACK, each)
            return not any(connection.execute(message_rows.IS_MINE, each).first() for each in wanted)

    @contextmanager
    def transaction(self, stop: threading.Event | None = None) -> Iterator[sa.Connection]:
        """A transaction that an executor may join. A commit in doubt is settled, as long as `stop` is not set."""
        with self._tokens.transaction(self._joined.engine, within_s=math.inf, stop=stop) as connection:
            yield connection

    # Taking over

    def take_over(self, member: int, types: Collection[str], most: int) -> list[tuple[Collected, float]]:
        """Make what is unfinished of lapsed members, or of nobody, this member's: oldest first, each due in seconds."""
        with self._lock:
            # What rows are marked by: the same until a call has come to its end. Bulks have positive ids.
            token = self._taking.setdefault(member, -1 - secrets.randbits(62))
        with self._database.transaction() as connection:
            self._sources.hold(connection, member)
            collector = self._sources.collector_id(connection)
            lapsed = list(connection.scalars(member_rows.LOCK_LAPSED, {"in_collector": collector, "of_member": member}))
            taken = {"of_types": list(types), "most": most, "by": member, "token": token, "lapsed": lapsed}
            connection.execute(message_rows.TAKE_OVER, {**taken, "in_collector": collector})
            if lapsed:
                connection.execute(member_rows.REMOVE_MEMBERS, {"lapsed": lapsed})
            rows = connection.execute(message_rows.TAKEN_OVER, {"of_member": member, "token": token}).all()
        with self._lock:
            self._taking.pop(member, None)
        self._sources.remember({row.stream: row.source_id for row in rows})
        return [(_message_of(row), row.due_in_s or 0.0) for row in rows]

    # Asking

    def outcomes_of(self, message_ids: Collection[str]) -> Mapping[str, Outcome]:
        """The outcome of each id."""
        with self._database.transaction() as connection:
            return read_outcomes(connection, message_ids, collector_id=self._sources.collector_id(connection))

    def dispose(self) -> None:
        """Give connections back."""
        self._database.close()


def _message_of(row: Any) -> Collected:
    place = MessageId(row.stream, row.stream_offset)
    return Collected(place, row.message_id, row.type, row.size, None, row.attempts, row.collected_at)


def _in_ascii(result: Result) -> Result:
    """A result whose reason any encoding holds."""
    if result.reason is None:
        return result
    return replace(result, reason=result.reason.encode("ascii", "backslashreplace").decode()[:REASON_CHARACTERS_MAX])
