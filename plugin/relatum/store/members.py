"""Leases, and members that share things by them: streams among recorders, partitions among serial consumers.

A member has one lease, the row that names it. What it holds names the member, and is held for as long as that lease
holds: so a member renews one row, however much it holds. Its rows are looked at in the same transaction, and shared
evenly: a member that comes takes its part once others have let go of it, and what a member had that died is taken
over. What has no holder that lives is taken by compare-and-set on the name that was seen there.

A lease only says who is at work, so that others need not try: it saves work, and nothing rests on it. Its clock, the
database's, may jump, its holder may be frozen between two statements and go on an hour later, believing what it
believed. So whoever writes what it holds is fenced, by what is written and in the statement that writes, each in the
way that fits:

- a recorder by the coverage's end, which moves by compare-and-set;
- a serial consumer's position, and a collector's, by the member its row names and the version, or position, it had;
- a claim on a group by its number, which each new claim raises;
- a step of a move by the move's state and attempt.

One that was frozen and comes back learns by that that another has gone on, and never by asking a clock of its own.
Source: docs/adr/0017.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from relatum.processes import new_holder
from relatum.store.database import sql

LEASE_S: Final = 5.0
"""How long a lease holds without renewal, by default, in seconds."""

RENEWALS: Final = 3
"""How often a lease is renewed while it holds. Tests set it high, so that a long lease has a quick rhythm."""

_LEASE_END: Final = "clock_timestamp() + make_interval(secs => :lease_s::double precision)"

RENEWED: Final = f"lease_expires_at = {_LEASE_END}"
"""Sets a lease that holds for `lease_s` seconds from now, in an UPDATE."""

_TRIES: Final = 3
"""Times one beat joins anew where the lease runs out amid it."""


def renewal_s(lease_s: float) -> float:
    """Seconds between two renewals of a lease."""
    return lease_s / RENEWALS


class Sharing:
    """The statements of one kind of members and of what they share, made of names of tables and columns.

    Args:
        members: The table of the members, with columns `holder` and `lease_expires_at`.
        within: Its column by which they belong together, unique with `holder`; and its type.
        rows: The table of what is shared.
        key: Its integer column that tells one row from another.
        held_by: Its column that names the holder.
        of_rows: Its column that says to whose share a row belongs, as `within` does; None where it does not say: then
            no two members may have the same name, whatever they share.
        are: Which of its rows are shared.
        taken: What else is written where a row is taken, to fence off who had it before.
    """

    def __init__(
        self,
        members: str,
        within: tuple[str, str],
        rows: str,
        key: str,
        held_by: str,
        *,
        of_rows: str | None = None,
        are: str,
        taken: str | None = None,
    ) -> None:
        column, its_type = within
        together = f"{column} = :within::{its_type}"
        shared = are if of_rows is None else f"{are} AND {of_rows} = :within::{its_type}"
        # One that has run out is not renewed: the member has to learn that it was dead to the others.
        self.renew = sql(f"""UPDATE relatum.{members} SET {RENEWED}
            WHERE {together} AND holder = :holder::text AND lease_expires_at >= clock_timestamp()""")
        self.join = sql(f"""INSERT INTO relatum.{members} ({column}, holder, lease_expires_at)
            VALUES (:within::{its_type}, :holder::text, {_LEASE_END})
            ON CONFLICT ({column}, holder) DO UPDATE SET {RENEWED}""")
        # Two that find each other dead must not wait for each other.
        self.bury = sql(f"""DELETE FROM relatum.{members} WHERE {together} AND holder IN (
            SELECT holder FROM relatum.{members} WHERE {together} AND lease_expires_at < clock_timestamp()
            FOR UPDATE SKIP LOCKED)""")
        self.alive = sql(f"""SELECT holder FROM relatum.{members}
            WHERE {together} AND lease_expires_at >= clock_timestamp()""")
        self.leave = sql(f"DELETE FROM relatum.{members} WHERE {together} AND holder = :holder::text")
        same = "" if of_rows is None else f" AND holders.{column} = {rows}.{of_rows}"
        self.is_held = f"""EXISTS (
            SELECT FROM relatum.{members} holders
            WHERE holders.holder = {rows}.{held_by} AND holders.lease_expires_at >= clock_timestamp(){same})"""
        """Whether a row is somebody's now, for queries on the table of what is shared."""
        # Key by key, however the planner sees it. By `= ANY` a prepared statement compares each row of the table with
        # each key where it takes no index: 2,000 streams took 200 ms.
        self.look = sql(f"""SELECT one.key, one.holder, one.is_held
            FROM unnest(:keys::integer[]) AS wanted(key) JOIN LATERAL (
                SELECT {key} AS key, {held_by} AS holder, {self.is_held} AS is_held
                FROM relatum.{rows} WHERE {shared} AND {key} = wanted.key OFFSET 0) one ON true""")
        # What nobody holds, by what was seen of it: who takes a row that another has just taken waits for nobody. As
        # an array: a plan that asks again for each row would lock, and take, more than so many.
        also = "" if taken is None else f", {taken}"
        self.take = sql(f"""UPDATE relatum.{rows} SET {held_by} = :holder::text{also}
            WHERE {shared} AND {key} = ANY (ARRAY (
                SELECT r.{key} FROM relatum.{rows} r
                JOIN unnest(:keys::integer[], :holders::text[]) AS seen(key, holder) ON r.{key} = seen.key
                WHERE {shared} AND r.{held_by} IS NOT DISTINCT FROM seen.holder
                ORDER BY r.{key} LIMIT :at_most::integer FOR UPDATE OF r SKIP LOCKED))
            RETURNING {key}""")
        self.release = sql(f"""UPDATE relatum.{rows} SET {held_by} = NULL
            WHERE {shared} AND {key} = ANY (:keys::integer[]) AND {held_by} = :holder::text""")
        self.holders = sql(f"""SELECT {key}, {held_by} FROM relatum.{rows}
            WHERE {key} = ANY (:keys::integer[]) AND {self.is_held}""")


RECORDERS: Final = Sharing(
    "recorder_members", ("name", "text"), "streams", "stream_id", "lease_holder", are="replaced_at IS NULL"
)
"""Streams, shared by the recorders of one name."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a member has.

    Attributes:
        holder: Its name. Another one than before where its lease had run out: what it held, it holds no more.
        held: What is its own now, also what it has just taken.
        surplus: How many of these others should have.
        others: What others hold, and who.
        missing: What was asked for and is not there, or is not shared any more.
    """

    holder: str
    held: frozenset[int]
    surplus: int
    others: Mapping[int, str]
    missing: frozenset[int]


class Member:
    """One member: its lease, and what it holds. For one thread at a time.

    Args:
        lease_s: Seconds after which others may take what it holds, without a word of it.
        holder: Its own name. None (default): one that nobody else has, another one each time its lease has run out.
    """

    def __init__(
        self,
        sharing: Sharing,
        within: str | int,
        *,
        lease_s: float,
        holder: str | None = None,
        named: Callable[[], str] = new_holder,
    ) -> None:
        self._sharing = sharing
        self.within = within
        self._lease_s = lease_s
        self._given = holder
        self._named = named
        self._has_joined = False
        self._held: frozenset[int] = frozenset()
        self.holder = holder or named()

    @property
    def renewal_s(self) -> float:
        """Seconds between two beats."""
        return renewal_s(self._lease_s)

    def beat(self, connection: sa.Connection, wanted: Collection[int]) -> Share:
        """Renew the lease, and take what this member should have and nobody holds.

        Five statements in the caller's transaction, whatever number is wanted. What they found may be untrue as soon as
        they are done: what is written is fenced.

        `wanted`: The keys of what it wants its share of: the others of its name want the same.
        """
        alive = self._be_alive(connection)
        connection.execute(self._sharing.bury, self._me())
        share = self._share(connection, wanted, alive | {self.holder})
        self._held = share.held
        return share

    def _be_alive(self, connection: sa.Connection) -> set[str]:
        """Renew the lease, or join anew where it has run out; gives all whose lease holds."""
        for _ in range(_TRIES):
            if not connection.execute(self._sharing.renew, self._me()).rowcount:
                if self._has_joined:
                    # Under another name: what is under way of the one before is not taken for its own.
                    self.holder = self._given or self._named()
                connection.execute(self._sharing.join, self._me())
                self._has_joined = True
            alive = set(connection.scalars(self._sharing.alive, self._me()))
            if self.holder in alive:
                break
            # It ran out amid these statements: one of them had to wait, or this process stood still.
        return alive

    def hold_on(self, connection: sa.Connection, wanted: Collection[int], *, leased: bool) -> Share:
        """Keep what it has, and take nothing: it can do nothing with it now, or comes back from there.

        `leased`: Whether it keeps its lease. Without, others may take all, and what they do not take stays its own:
        it goes by the same name when it has a lease again, which fences what was taken and given back meanwhile.
        """
        if leased:
            self._be_alive(connection)
        else:
            connection.execute(self._sharing.leave, self._me())
            self._has_joined = False
        mine, others, free = self._look(connection, wanted)
        self._held = frozenset(mine)
        return Share(self.holder, self._held, 0, others, frozenset(wanted) - mine - others.keys() - free.keys())

    def _share(self, connection: sa.Connection, wanted: Collection[int], alive: set[str]) -> Share:
        mine, others, free = self._look(connection, wanted)
        counts = dict.fromkeys(alive, 0)
        counts[self.holder] = len(mine)
        for holder in others.values():
            if holder in counts:
                counts[holder] += 1
        should_have = target(counts, self.holder, len(mine) + len(others) + len(free))
        missing = frozenset(wanted) - mine - others.keys() - free.keys()
        if free and len(mine) < should_have:
            taken = {"keys": list(free), "holders": list(free.values()), "at_most": should_have - len(mine)}
            mine.update(connection.scalars(self._sharing.take, {**self._me(), **taken}))
        return Share(self.holder, frozenset(mine), max(0, len(mine) - should_have), others, missing)

    def _look(
        self, connection: sa.Connection, wanted: Collection[int]
    ) -> tuple[set[int], dict[int, str], dict[int, str | None]]:
        """What of this is its own, what others hold and who, and what is nobody's and who had it."""
        rows = connection.execute(self._sharing.look, {**self._me(), "keys": sorted(wanted)}).all()
        mine = {key for key, holder, _ in rows if holder == self.holder}
        others = {key: holder for key, holder, is_held in rows if is_held and key not in mine}
        free = {key: holder for key, holder, is_held in rows if not is_held and key not in mine}
        return mine, others, free

    def release(self, connection: sa.Connection, keys: Collection[int]) -> None:
        """Let others have some of what it holds."""
        if keys:
            connection.execute(self._sharing.release, {**self._me(), "keys": sorted(keys)})
            self._held -= frozenset(keys)

    def leave(self, connection: sa.Connection) -> None:
        """Let others have all, at once."""
        self.release(connection, self._held)
        connection.execute(self._sharing.leave, self._me())

    def _me(self) -> dict[str, Any]:
        return {"within": self.within, "holder": self.holder, "lease_s": self._lease_s}


def holders_of(connection: sa.Connection, sharing: Sharing, keys: Collection[int]) -> dict[int, str]:
    """Who holds some of what is shared, now; what nobody holds is not among it."""
    found = connection.execute(sharing.holders, {"keys": sorted(keys)})
    return {row[0]: row[1] for row in found}


def target(held: Mapping[str, int], member: str, things: int) -> int:
    """How many a member should have, so that no two members differ by more than one.

    Members that have more already keep them before those that have fewer, so that as few as can be change hands.

    `held`: How many each member has whose lease holds; this one among them.
    """
    share, extra = divmod(things, len(held))
    ranked = sorted(held, key=lambda each: (-held[each], each))
    return share + (ranked.index(member) < extra)
