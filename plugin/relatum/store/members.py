"""Leases, and members that share rows by them: streams among recorders, partitions among serial consumers.

A member has one lease, in its own row. The rows that it holds name it, and are held while its lease is valid, so a
renewal writes one row for any number of held rows. The same transaction shares the rows evenly: a new member gets its
share once others release it, and a dead member's rows are taken over, by compare-and-set on the holder's name.

A lease only avoids double work; correctness never depends on it. The database's clock may jump, and a member may be
suspended between two statements and continue an hour later. So every write is fenced by the data it writes:

- a recorder's by the coverage's end, which is advanced by compare-and-set;
- a serial consumer's or collector's position by the member its row names and the version, or position, it had;
- a claim on a group by its number, which each new claim raises;
- a step of a move by the move's state and attempt.

A suspended member finds out when its fenced write fails. Source: docs/adr/0017.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from relatum.common.processes import new_holder
from relatum.store.database import sql

LEASE_S: Final = 5.0
"""Seconds a lease is valid without renewal, by default."""

RENEWALS: Final = 3
"""Renewals per lease. Tests set it high, so that a long lease is renewed often."""

_LEASE_END: Final = "clock_timestamp() + make_interval(secs => :lease_s::double precision)"

RENEWED: Final = f"lease_expires_at = {_LEASE_END}"
"""Sets a lease of `lease_s` seconds from now, in an UPDATE."""


def renewal_s(lease_s: float) -> float:
    """Return the seconds between two renewals of a lease."""
    return lease_s / RENEWALS


class Sharing:
    """The statements for one kind of members and the rows they share, built from names of tables and columns.

    Args:
        members: The members' table, with columns `holder` and `lease_expires_at`.
        within: The members' column that groups them, unique together with `holder`; and the column's type.
        rows: The table of shared rows.
        key: Its integer key.
        held_by: Its column that names the holder.
        of_rows: Its column that matches `within`. None (default): it has none; holders' names must be globally unique.
        are: The SQL condition of rows that are shared.
        taken: Further SQL assignments for a row that is taken, to fence off its former holder.
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
        # An expired lease is not renewed: the member must learn that others may have taken its rows.
        self.renew = sql(f"""UPDATE relatum.{members} SET {RENEWED}
            WHERE {together} AND holder = :holder::text AND lease_expires_at >= clock_timestamp()""")
        self.join = sql(f"""INSERT INTO relatum.{members} ({column}, holder, lease_expires_at)
            VALUES (:within::{its_type}, :holder::text, {_LEASE_END})
            ON CONFLICT ({column}, holder) DO UPDATE SET {RENEWED}""")
        # Two members that each find the other expired must not wait for each other.
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
        """SQL: whether a row is held now, for queries on the table of shared rows."""
        # Forces a lookup per key: with `= ANY` and no index, a prepared statement compares each row with each key,
        # which took 200 ms for 2,000 streams.
        self.look = sql(f"""SELECT one.key, one.holder, one.is_held
            FROM unnest(:keys::integer[]) AS wanted(key) JOIN LATERAL (
                SELECT {key} AS key, {held_by} AS holder, {self.is_held} AS is_held
                FROM relatum.{rows} WHERE {shared} AND {key} = wanted.key OFFSET 0) one ON true""")
        # Takes rows that were free, if their holder is still the one that was seen; skips locked rows. An array, since
        # a plan that repeats a subquery for each row would lock, and take, more than `at_most`.
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
    """The rows that a member holds.

    Attributes:
        holder: The member's name; a new name if its lease had expired: it then holds none of its former rows.
        held: The keys that it holds now, including those that it has just taken.
        surplus: How many of these it should release to others.
        others: The keys that others hold, with their names.
        missing: The wanted keys that do not exist, or are not shared any more.
    """

    holder: str
    held: frozenset[int]
    surplus: int
    others: Mapping[int, str]
    missing: frozenset[int]


class Member:
    """One member, with its lease and its keys. Not thread-safe.

    Without a name of its own (`holder`), it gets a unique name, and a new one each time its lease has expired.
    """

    def __init__(self, sharing: Sharing, within: str | int, *, lease_s: float, holder: str | None = None) -> None:
        self._sharing = sharing
        self.within = within
        self._lease_s = lease_s
        self._given = holder
        self._has_joined = False
        self._held: frozenset[int] = frozenset()
        self.holder = holder or new_holder()

    @property
    def renewal_s(self) -> float:
        """Seconds between two beats."""
        return renewal_s(self._lease_s)

    def beat(
        self, connection: sa.Connection, wanted: Collection[int], *, takes: bool = True, leased: bool = True
    ) -> Share:
        """Renew the lease, and take free rows up to this member's share.

        Runs five statements in the caller's transaction, for any number of keys. The result may be outdated at once;
        writes are fenced.

        - `wanted`: The keys of all shared rows: the other members of this group want the same.
        - `takes`: False for a member that cannot use rows now, or recently could not: it keeps the rows that it holds.
        - `leased`: False: end the lease, so that others may take all rows. The member keeps the rows that they leave,
          and its name for the next lease; rows that were taken and released in between are fenced.
        """
        alive: set[str] = set()
        if leased:
            alive = self._be_alive(connection)
        else:
            connection.execute(self._sharing.leave, self._me())
            self._has_joined = False
        if takes:
            connection.execute(self._sharing.bury, self._me())
        mine, others, free = self._look(connection, wanted)
        missing = frozenset(wanted) - mine - others.keys() - free.keys()
        surplus = 0
        if takes:
            counts = dict.fromkeys(alive, 0) | {self.holder: len(mine)}
            for holder in others.values():
                if holder in counts:
                    counts[holder] += 1
            should_have = target(counts, self.holder, len(mine) + len(others) + len(free))
            surplus = max(0, len(mine) - should_have)
            if free and len(mine) < should_have:
                taken = {"keys": list(free), "holders": list(free.values()), "at_most": should_have - len(mine)}
                mine.update(connection.scalars(self._sharing.take, {**self._me(), **taken}))
        self._held = frozenset(mine)
        return Share(self.holder, self._held, surplus, others, missing)

    def _be_alive(self, connection: sa.Connection) -> set[str]:
        """Renew the lease, or join again if it has expired; return the members with valid leases."""
        if not connection.execute(self._sharing.renew, self._me()).rowcount:
            if self._has_joined:
                # With a new name: pending writes under the old name are fenced off.
                self.holder = self._given or new_holder()
            connection.execute(self._sharing.join, self._me())
            self._has_joined = True
        return set(connection.scalars(self._sharing.alive, self._me()))

    def _look(
        self, connection: sa.Connection, wanted: Collection[int]
    ) -> tuple[set[int], dict[int, str], dict[int, str | None]]:
        """Read its own keys, the keys of others with their names, and free keys with their last holders."""
        rows = connection.execute(self._sharing.look, {**self._me(), "keys": sorted(wanted)}).all()
        mine = {key for key, holder, _ in rows if holder == self.holder}
        others = {key: holder for key, holder, is_held in rows if is_held and key not in mine}
        free = {key: holder for key, holder, is_held in rows if not is_held and key not in mine}
        return mine, others, free

    def release(self, connection: sa.Connection, keys: Collection[int]) -> None:
        """Release some keys."""
        if keys:
            connection.execute(self._sharing.release, {**self._me(), "keys": sorted(keys)})
            self._held -= frozenset(keys)

    def leave(self, connection: sa.Connection) -> None:
        """Release all keys and leave."""
        self.release(connection, self._held)
        connection.execute(self._sharing.leave, self._me())

    def _me(self) -> dict[str, Any]:
        return {"within": self.within, "holder": self.holder, "lease_s": self._lease_s}


def holders_of(connection: sa.Connection, sharing: Sharing, keys: Collection[int]) -> dict[int, str]:
    """Read the present holders of some keys, without free keys."""
    found = connection.execute(sharing.holders, {"keys": sorted(keys)})
    return {row[0]: row[1] for row in found}


def target(held: Mapping[str, int], member: str, things: int) -> int:
    """Return how many rows a member should hold, so that no two members differ by more than one.

    The remainder goes to the members that already hold most, so that few rows change hands.

    `held`: How many rows each member with a valid lease holds, including this one.
    """
    share, extra = divmod(things, len(held))
    ranked = sorted(held, key=lambda each: (-held[each], each))
    return share + (ranked.index(member) < extra)
