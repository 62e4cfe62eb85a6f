"""Members that share things: streams among recorders, partitions among serial consumers.

A member has one lease, the row that names it. What it holds names the member, and is held for as long as that lease
holds: so a member renews one row, however much it holds. Its rows are looked at in the same transaction, and shared
evenly: a member that comes takes its part once others have let go of it, and what a member had that died is taken
over. What has no holder that lives is taken by compare-and-set on the name that was seen there.

See `relatum.store._lease` for what a lease is good for, and what not.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.processes import new_holder
from relatum.store._arrays import arrays
from relatum.store._lease import holds, lapsed, leased, renewal_s
from relatum.store._tables import recorder_members, streams

_TRIES: Final = 3
"""Times one beat joins anew where the lease runs out amid it."""

_WITHIN: Final[Any] = sa.bindparam("of_within")
_BY: Final = sa.bindparam("by", type_=sa.Text)
_KEYS: Final = sa.bindparam("keys", type_=sa.ARRAY(sa.Integer))
_LEASED: Final = leased(sa.bindparam("lease_s", type_=sa.Float))


class Sharing:
    """The statements of one kind of members and of what they share; each is built once.

    Args:
        within: The column of the members' table by which they belong together. Columns `holder` and
            `lease_expires_at` are beside it, and name and holder are unique together.
        key: The integer column that tells one of the shared rows from another. What is shared is in its table.
        held_by: The column of that table that names the holder.
        of_rows: The column of that table that says to whose share a row belongs, as `within` does; None where it does
            not say: then no two members may have the same name, whatever they share.
        are: Which of its rows are shared.
        taken: What else is written where a row is taken, to fence off who had it before.
    """

    def __init__(
        self,
        within: "sa.Column[Any]",
        key: "sa.Column[int]",
        held_by: "sa.Column[Any]",
        *,
        of_rows: "sa.Column[Any] | None" = None,
        are: Iterable["sa.ColumnElement[bool]"] = (),
        taken: Mapping[str, Any] | None = None,
    ) -> None:
        members, rows = within.table, key.table
        assert isinstance(members, sa.Table), "a table's own column"
        assert isinstance(rows, sa.Table), "a table's own column"
        its_row = (within == _WITHIN, members.c.holder == _BY)
        expires_at = members.c.lease_expires_at
        shared = (*are, *(() if of_rows is None else (of_rows == _WITHIN,)))
        some = key == sa.any_(_KEYS)
        # One that has run out is not renewed: the member has to learn that it was dead to the others.
        self.renew = sa.update(members).where(*its_row, holds(expires_at)).values(**_LEASED)
        self.join = (
            insert(members)
            .values({within.name: _WITHIN, "holder": _BY} | _LEASED)
            .on_conflict_do_update(index_elements=[within, members.c.holder], set_=_LEASED)
        )
        dead = sa.select(members.c.holder).where(within == _WITHIN, lapsed(expires_at))
        # Two that find each other dead must not wait for each other.
        unlocked = members.c.holder.in_(dead.with_for_update(skip_locked=True))
        self.bury = sa.delete(members).where(within == _WITHIN, unlocked)
        self.alive = sa.select(members.c.holder).where(within == _WITHIN, holds(expires_at))
        self.leave = sa.delete(members).where(*its_row)
        self.is_held: sa.ColumnElement[bool] = _is_held(within, held_by, of_rows)
        """Whether a row is somebody's now, for queries on the table of what is shared."""
        self.look = _look(key, held_by, self.is_held, shared)
        free = key == _free(key, held_by, shared)
        self.take = sa.update(rows).where(*shared, free).values({held_by: _BY, **(taken or {})}).returning(key)
        self.release = sa.update(rows).where(*shared, some, held_by == _BY).values({held_by: None})
        self.holders = sa.select(key, held_by).where(some, self.is_held)


def _is_held(
    within: "sa.Column[Any]", held_by: "sa.Column[Any]", of_rows: "sa.Column[Any] | None"
) -> sa.ColumnElement[bool]:
    holders = within.table.alias("holders")
    matches = [holders.c.holder == held_by, holds(holders.c.lease_expires_at)]
    if of_rows is not None:
        matches.append(holders.c[within.name] == of_rows)
    return sa.exists(sa.select(holders.c.holder).where(*matches).correlate(held_by.table))


def _look(key: "sa.Column[int]", held_by: "sa.Column[Any]", is_held: Any, shared: tuple[Any, ...]) -> "sa.Select[Any]":
    """Key, holder and whether that one is alive, of all that is wanted: key by key, however the planner sees it.

    By `= ANY` a prepared statement compares each row of the table with each key where it takes no index: 2,000 streams
    took 200 ms.
    """
    wanted = arrays("wanted", key=sa.Integer)
    found = sa.select(key.label("key"), held_by.label("holder"), is_held.label("is_held"))
    one = found.where(*shared, key == wanted.c.key).offset(sa.literal_column("0")).lateral("one")
    return sa.select(one.c.key, one.c.holder, one.c.is_held).select_from(wanted.join(one, sa.true()))


def _free(key: "sa.Column[int]", held_by: "sa.Column[Any]", shared: tuple[Any, ...]) -> Any:
    """Rows that nobody holds, by what was seen of them: who takes one that another has just taken waits for nobody."""
    seen = arrays("seen", key=sa.Integer, holder=sa.Text)
    chosen = (
        sa.select(key)
        .join(seen, seen.c.key == key)
        .where(*shared, held_by.is_not_distinct_from(seen.c.holder))
        .order_by(key)
        .limit(sa.bindparam("at_most", type_=sa.Integer))
        .with_for_update(of=key.table, skip_locked=True)
    )
    # As an array: a plan that asks again for each row would lock, and take, more than so many.
    return sa.any_(sa.func.array(chosen.scalar_subquery()))


RECORDERS: Final = Sharing(
    recorder_members.c.name,
    streams.c.stream_id,
    streams.c.lease_holder,
    are=[streams.c.replaced_at.is_(None)],
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
        they are done: what is written is fenced, see `relatum.store._lease`.

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
        return {"of_within": self.within, "by": self.holder, "lease_s": self._lease_s}


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
