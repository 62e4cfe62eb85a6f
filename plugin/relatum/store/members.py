"""Leases, and members that share rows by leases: recorders share streams, serial consumers share partitions.

A member has one lease, in its own row. The rows that it holds contain its name, and are held while its lease is valid,
so a renewal writes one row for any number of held rows. The same transaction shares the rows evenly: a new member takes
rows that others release, and rows of a member whose lease has expired, by compare-and-set on the holder's name.

A lease only avoids double work; correctness never depends on leases. The database's clock may jump, and a member may be
suspended between two statements and continue an hour later. So every write is fenced by data in the written row, and a
suspended member notices when its fenced write fails. docs/adr/0017 lists the fences.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from relatum.common.processes import new_holder
from relatum.store.database import sql

LEASE_S: Final = 5.0
"""Default seconds for which a lease is valid without renewal."""

RENEWALS: Final = 3
"""Renewals per duration of a lease. Tests set a high value, so that a long lease is renewed often."""

LEASE_END: Final = "clock_timestamp() + make_interval(secs => :lease_s::double precision)"

RENEWED: Final = f"lease_expires_at = {LEASE_END}"
"""SQL: sets a lease of `lease_s` seconds from now, in an UPDATE."""


def renewal_s(lease_s: float) -> float:
    """Return the seconds between two renewals of a lease."""
    return lease_s / RENEWALS


class Sharing:
    """The SQL statements for a kind of members and the rows that they share.

    Args:
        members: The members' table, with columns `holder` and `lease_expires_at`.
        within: The members' column that names their group, unique together with `holder`; and the column's type.
        rows: The table of shared rows.
        key: The integer key of `rows`.
        held_by: The column of `rows` with the holder's name.
        of_rows: The column of `rows` that matches `within`. None (default): no column; holders' names must be unique.
        are: The SQL condition that selects the shared rows.
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
        column, column_type = within
        in_group = f"{column} = :within::{column_type}"
        shared = are if of_rows is None else f"{are} AND {of_rows} = :within::{column_type}"
        # An expired lease is not renewed: the member must notice that others may have taken its rows.
        self.renew = sql(f"""UPDATE relatum.{members} SET {RENEWED}
            WHERE {in_group} AND holder = :holder::text AND lease_expires_at >= clock_timestamp()""")
        self.join = sql(f"""INSERT INTO relatum.{members} ({column}, holder, lease_expires_at)
            VALUES (:within::{column_type}, :holder::text, {LEASE_END})
            ON CONFLICT ({column}, holder) DO UPDATE SET {RENEWED}""")
        # Members that delete each other's expired rows must not wait for each other.
        self.bury = sql(f"""DELETE FROM relatum.{members} WHERE {in_group} AND holder IN (
            SELECT holder FROM relatum.{members} WHERE {in_group} AND lease_expires_at < clock_timestamp()
            FOR UPDATE SKIP LOCKED)""")
        self.alive = sql(f"""SELECT holder FROM relatum.{members}
            WHERE {in_group} AND lease_expires_at >= clock_timestamp()""")
        self.leave = sql(f"DELETE FROM relatum.{members} WHERE {in_group} AND holder = :holder::text")
        same_group = "" if of_rows is None else f" AND holders.{column} = {rows}.{of_rows}"
        self.is_held = f"""EXISTS (
            SELECT FROM relatum.{members} holders
            WHERE holders.holder = {rows}.{held_by} AND holders.lease_expires_at >= clock_timestamp(){same_group})"""
        """SQL: whether a row is held now, for queries on the table of shared rows."""
        # LATERAL forces a lookup per key: with `= ANY` and no index, a prepared statement would compare each row with
        # each key, which took 200 ms for 2,000 streams.
        self.look = sql(f"""SELECT one.key, one.holder, one.is_held
            FROM unnest(:keys::integer[]) AS wanted(key) JOIN LATERAL (
                SELECT {key} AS key, {held_by} AS holder, {self.is_held} AS is_held
                FROM relatum.{rows} WHERE {shared} AND {key} = wanted.key OFFSET 0) one ON true""")
        # Takes free rows whose last holder is still the one that was read; skips locked rows. ARRAY runs the subquery
        # once: a plan that repeats it for each row would lock, and take, more rows than `at_most`.
        assignments = "" if taken is None else f", {taken}"
        self.take = sql(f"""UPDATE relatum.{rows} SET {held_by} = :holder::text{assignments}
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
        holder: The member's name. A generated name is replaced if the lease had expired; the former rows are then lost.
        held: The keys of the rows that the member holds, including those that it has just taken.
        surplus: How many of these rows the member should release to others.
        others: The keys that others hold, with the holders' names.
        missing: The wanted keys that do not exist, or are no longer shared.
    """

    holder: str
    held: frozenset[int]
    surplus: int
    others: Mapping[int, str]
    missing: frozenset[int]


class Member:
    """A member with its lease and its keys. Not thread-safe.

    `holder` is the member's name. None: it gets a unique name, and a new one whenever its lease has expired.
    """

    def __init__(self, sharing: Sharing, within: str | int, *, lease_s: float, holder: str | None = None) -> None:
        self._sharing = sharing
        self.within = within
        self._lease_s = lease_s
        self._fixed_holder = holder
        self._has_joined = False
        self._held: frozenset[int] = frozenset()
        self.holder = holder or new_holder()

    @property
    def renewal_s(self) -> float:
        """Seconds between two calls of `beat`."""
        return renewal_s(self._lease_s)

    def beat(
        self, connection: sa.Connection, wanted: Collection[int], *, takes: bool = True, leased: bool = True
    ) -> Share:
        """Renew the lease, take free rows up to this member's share, and return its rows.

        Runs at most six statements in the caller's transaction, for any number of keys. The result may be outdated when
        the transaction ends, so writes are fenced.

        - `wanted`: The keys of all rows to share. All members of a group must pass the same keys.
        - `takes`: False for a member that cannot use rows now, or recently could not: it keeps its rows and takes none.
        - `leased`: False ends the lease, so that others may take all rows. The member keeps its name, and the rows that
          nobody takes. Its writes to rows that others have held since are fenced off.
        """
        alive: set[str] = set()
        if leased:
            alive = self._renew_lease(connection)
        else:
            connection.execute(self._sharing.leave, self._parameters())
            self._has_joined = False
        if takes:
            connection.execute(self._sharing.bury, self._parameters())
        held, others, free = self._read_rows(connection, wanted)
        missing = frozenset(wanted) - held - others.keys() - free.keys()
        surplus = 0
        if takes:
            counts = dict.fromkeys(alive, 0) | {self.holder: len(held)}
            for holder in others.values():
                if holder in counts:
                    counts[holder] += 1
            target_count = target(counts, self.holder, len(held) + len(others) + len(free))
            surplus = max(0, len(held) - target_count)
            if free and len(held) < target_count:
                taken = {"keys": list(free), "holders": list(free.values()), "at_most": target_count - len(held)}
                held.update(connection.scalars(self._sharing.take, {**self._parameters(), **taken}))
        self._held = frozenset(held)
        return Share(self.holder, self._held, surplus, others, missing)

    def _renew_lease(self, connection: sa.Connection) -> set[str]:
        """Renew the lease, or join again if it has expired; return the members with valid leases."""
        if not connection.execute(self._sharing.renew, self._parameters()).rowcount:
            if self._has_joined:
                # A new name fences off pending writes under the old name.
                self.holder = self._fixed_holder or new_holder()
            connection.execute(self._sharing.join, self._parameters())
            self._has_joined = True
        return set(connection.scalars(self._sharing.alive, self._parameters()))

    def _read_rows(
        self, connection: sa.Connection, wanted: Collection[int]
    ) -> tuple[set[int], dict[int, str], dict[int, str | None]]:
        """Return this member's keys, the keys of others with their holders, and free keys with their last holders."""
        rows = connection.execute(self._sharing.look, {**self._parameters(), "keys": sorted(wanted)}).all()
        held = {key for key, holder, _ in rows if holder == self.holder}
        others = {key: holder for key, holder, is_held in rows if is_held and key not in held}
        free = {key: holder for key, holder, is_held in rows if not is_held and key not in held}
        return held, others, free

    def release(self, connection: sa.Connection, keys: Collection[int]) -> None:
        """Release these keys, so that other members may take them."""
        if keys:
            connection.execute(self._sharing.release, {**self._parameters(), "keys": sorted(keys)})
            self._held -= frozenset(keys)

    def leave(self, connection: sa.Connection) -> None:
        """Release all keys and end the lease."""
        self.release(connection, self._held)
        connection.execute(self._sharing.leave, self._parameters())

    def _parameters(self) -> dict[str, Any]:
        return {"within": self.within, "holder": self.holder, "lease_s": self._lease_s}


def holders_of(connection: sa.Connection, sharing: Sharing, keys: Collection[int]) -> dict[int, str]:
    """Return the present holder of each key that is held."""
    found = connection.execute(sharing.holders, {"keys": sorted(keys)})
    return {row[0]: row[1] for row in found}


def target(held: Mapping[str, int], member: str, row_count: int) -> int:
    """Return how many rows a member should hold, so that the numbers of any two members differ by at most one.

    The remainder goes to the members that already hold the most rows, so that few rows change hands.

    `held`: How many rows each member with a valid lease holds, including this member.
    """
    share, extra = divmod(row_count, len(held))
    ranked = sorted(held, key=lambda each: (-held[each], each))
    return share + (ranked.index(member) < extra)
