"""The placements of one super stream in PostgreSQL. Each call is one transaction, and returns the state after it.

Calls may be repeated after a commit in doubt: the second call finds what the first one wrote.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import sqlalchemy as sa

from relatum.closing import Closing
from relatum.contexts._move_store import FENCE_AFTER, move_info
from relatum.contexts._placement_prune import forget_released
from relatum.contexts._placements import (
    Choose,
    Move,
    PartitionRow,
    PartitionState,
    Placement,
    PlacementState,
    check_name,
)
from relatum.contexts._placing import RELEASE, chosen_among, place
from relatum.contexts._super_stream_rows import (
    GENERATION,
    IDLE_S,
    PARTITIONS,
    SET_IDLE,
    SET_WEIGHTS,
    not_found,
    open_super_stream,
    partition_of,
)
from relatum.errors import StreamNotFound, SuperStreamConflict, SuperStreamNotFound
from relatum.headers import CONTEXT_HEADER
from relatum.reading import BrokerAddress
from relatum.store.database import AnyDatabase, Database, sql
from relatum.store.members import LEASE_S
from relatum.superstreams import Layout, describe_super_stream

CHANGES_MAX: Final = 10_000
"""The most changes that are returned one by one; more of them invalidate the whole cache."""

COUNTS_S: Final = 0.1
"""Seconds for which partitions and their numbers of open sets are cached, to choose among them."""

FOUND_AT_ONCE: Final = 5_000
"""How many names one statement looks up."""

PAGE: Final = 1_000
"""How many placements one statement reads."""

FORGET_EVERY_S: Final = 10.0
"""Seconds between two deletions of old released placements."""

FORGET_MOST: Final = 20_000
"""Placements deleted each time: twice as many as one process opens and releases in the interval."""

_TRIES: Final = 20
"""Attempts to place names: a chosen partition may be retired, or others place and release a name meanwhile."""

_PLACEMENT: Final = """
        p.name, p.partition_id, s.stream, s.binding_key, p.epoch, p.state, p.move_id, p.generation, p.opened_at,
        p.used_at, p.released_at"""
"""The columns of `Placement`, in order."""

_OF_PLACEMENTS: Final = """
    FROM relatum.placements p JOIN relatum.super_stream_partitions s ON s.partition_id = p.partition_id
    WHERE p.super_stream_id = :super_stream_id::integer"""
"""The tables of these columns."""

_PLACEMENTS: Final = f"SELECT {_PLACEMENT} {_OF_PLACEMENTS}"

FIND: Final = sql(f"""
    SELECT {_PLACEMENT}, pg_is_in_recovery() AS is_standby {_OF_PLACEMENTS}
        AND p.name = ANY (:names::text[]) AND p.state <> 'released'""")

CHANGES: Final = sql(f"""
    SELECT t.generation AS now, t.floor, pg_is_in_recovery() AS is_standby, changed.*
    FROM relatum.super_streams t LEFT JOIN (
        {_PLACEMENTS} AND p.generation > :since::bigint
        ORDER BY p.generation LIMIT :most::integer) changed ON true
    WHERE t.super_stream_id = :super_stream_id::integer""")
"""A row for each change: generation, floor and the columns of `Placement`; one row with NULLs if there is none."""

IDLE: Final = sql(f"""{_PLACEMENTS} AND p.state = 'open'
        AND p.used_at < statement_timestamp() - make_interval(secs => :idle_s::double precision)
    ORDER BY p.used_at LIMIT :most::integer""")

LISTED: Final = {
    in_partition: sql(f"""{_PLACEMENTS} AND p.state <> 'released' AND p.name >= :first::text
        {"AND s.stream = :stream::text" if in_partition else ""}
    ORDER BY p.name LIMIT :most::integer""")
    for in_partition in (False, True)
}
"""Pages of placements, ordered by name; the key is whether they are those of one partition."""

# Locked rows are in use, and are skipped.
TOUCH: Final = sql("""
    WITH touched AS (
        SELECT placement_id FROM relatum.placements
        WHERE super_stream_id = :super_stream_id::integer AND name = ANY (:names::text[]) AND state = 'open'
        FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE relatum.placements p SET used_at = statement_timestamp()
    FROM touched WHERE p.placement_id = touched.placement_id""")


class PlacementStore(Closing):
    """The placements of one super stream. Thread-safe. The caller closes a `Database` that it passed.

    Call `open` first.
    """

    super_stream_id: int
    header: str
    """The header that names the sets."""

    def __init__(self, database: "AnyDatabase", vhost: str, super_stream: str) -> None:
        self._is_own = not isinstance(database, Database)
        self.database = database if isinstance(database, Database) else Database(database, writes=True, idle_s=LEASE_S)
        self._vhost = vhost
        self._name = super_stream
        self._active: Sequence[PartitionRow] = ()
        self._active_until = 0.0
        self._forget_at = time.monotonic() + FORGET_EVERY_S

    def open(
        self, header: str | None = None, layout: Layout | None = None, *, idle_s: float | None = None
    ) -> list[PartitionRow]:
        """Create missing rows of the super stream, and check its options against the stored ones.

        If no row is missing, nothing is written, so a read-only user can open it. None stands for the stored value. New
        partitions of the broker are added; missing ones are kept. The first `idle_s` is stored for all. A different
        option raises `SuperStreamConflict`, an unknown super stream `SuperStreamNotFound`.
        """
        self._active_until = 0.0
        found = self.database.run(
            lambda connection: open_super_stream(connection, (self._vhost, self._name), header, layout, idle_s)
        )
        self.super_stream_id, self.header = found.super_stream_id, found.header
        return found.partitions

    def open_or_add(self, header: str | None, broker: BrokerAddress) -> None:
        """Open the super stream's rows; if there are none, create them for the partitions that the broker has."""
        try:
            self.open(header)
        except SuperStreamNotFound:
            self.open(header or CONTEXT_HEADER, describe_super_stream(broker, self._name))

    def close(self) -> None:
        if self._is_own:
            self.database.close()

    def partitions(self) -> list[PartitionRow]:
        """Read the partitions in order, retired ones included."""
        return [partition_of(row) for row in self._select(PARTITIONS)]

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Store the weights of partitions, by stream; with 0, balancing by weight places no new sets there."""
        unknown = weights.keys() - {row.stream for row in self.partitions()}
        if unknown:
            raise StreamNotFound(f"{min(unknown)!r} is no partition of {self._name!r}", stream=min(unknown))
        wanted = self._with_id(streams=list(weights), weights=list(map(float, weights.values())))
        self.database.rows(SET_WEIGHTS, wanted)
        self._active_until = 0.0

    def generation(self) -> int:
        """Read how often placements have changed; the server may be a standby."""
        return int(self._select(GENERATION)[0].generation)

    def changes(self, since: int | None) -> tuple[int, Sequence[Placement] | None]:
        """Read the generation, and the placements that changed after another generation.

        The placements are None if there is no other generation, or its changes are no longer stored: drop the cache.
        """
        rows = self.database.rows(CHANGES, self._with_id(since=since, most=CHANGES_MAX + 1), on_primary=True)
        if not rows:
            raise not_found(self._name)
        now, floor = rows[0][:2]
        if since is None or since < floor or len(rows) > CHANGES_MAX:
            return now, None
        return now, [_placement(row[3:]) for row in rows if row[3] is not None]

    def find(self, names: Collection[str], *, on_primary: bool = False) -> dict[str, Placement]:
        """Read the placements of names, without released ones, by name."""
        found = {}
        for some in in_parts(map(check_name, names), FOUND_AT_ONCE):
            rows = self.database.rows(FIND, self._with_id(names=some), on_primary=on_primary)
            found.update({row.name: _placement(row) for row in rows})
        return found

    def place(
        self, names: Collection[str], choose: Choose, *, open_sets_max: int | None = None, are_new: bool = False
    ) -> dict[str, Placement]:
        """Return the placements of names, and place those that have none. Concurrent callers get the same placements.

        Some may be moving. With `are_new`, names are not looked up first. If `open_sets_max` would be exceeded,
        `TooManyOpenSets` is raised and no name is placed.
        """
        found = {} if are_new else self.find(names, on_primary=True)
        for attempt in range(_TRIES):
            missing = sorted(check_name(name) for name in set(names) - found.keys())
            if not missing:
                break
            active = self._active_partitions(fresh=attempt > 0)
            chosen = [row.partition_id for row in chosen_among(missing, active, choose).values()]
            rows = place(self.database, self._name, self._with_id(names=missing, partition_ids=chosen), open_sets_max)
            found |= {row.name: _placement(row) for row in rows}
            # Another thread may replace the list; its counts are equally good.
            self._active = [replace(row, open_sets=row.open_sets + chosen.count(row.partition_id)) for row in active]
            # Others placed these in the meantime.
            found |= self.find([name for name in missing if name not in found], on_primary=True)
        if found.keys() < set(names):
            raise SuperStreamConflict(
                f"the partitions of {self._name!r} are being retired; place the names again",
                super_stream=self._name,
                reason="its partitions change",
            )
        return found

    def release(self, released: Iterable[tuple[str, int]]) -> frozenset[str]:
        """Release placements, each given with an epoch since it was opened; return the names that are moving.

        Placements that were released or made again since then are not changed.
        """
        ended: dict[str, int] = {}
        for name, epoch in released:
            ended[check_name(name)] = max(epoch, ended.get(name, 0))
        if not ended:
            return frozenset()
        rows = self._select(RELEASE, names=list(ended), epochs=list(ended.values()))
        if time.monotonic() >= self._forget_at:
            # Routers that release keep the table small, whether `relatum prune` is run or not.
            self._forget_at = time.monotonic() + FORGET_EVERY_S
            forget_released(self.database.engine, self.super_stream_id, most=FORGET_MOST)
        return frozenset(row.name for row in rows)

    def touch(self, names: Collection[str]) -> None:
        """Store that names are in use; see `idle`."""
        wanted = [check_name(name) for name in names]
        if wanted:
            self.database.rows(TOUCH, self._with_id(names=wanted))

    def idle(self, idle_s: float) -> list[Placement]:
        """Read the open placements without use for so many seconds, longest unused first; without moving ones."""
        return [_placement(row) for row in self._select(IDLE, idle_s=float(idle_s), most=PAGE)]

    def placements(self, *, stream: str | None = None, first: str = "") -> Iterator[Placement]:
        """Iterate over open and moving placements by name (in byte order) from a text on, page by page."""
        in_partition = {} if stream is None else {"stream": stream}
        while True:
            rows = self._select(LISTED[stream is not None], first=first, most=PAGE, **in_partition)
            yield from map(_placement, rows)
            if len(rows) < PAGE:
                return
            first = behind(rows[-1].name)

    def fence_after(self, name: str, epoch: int, stream: str) -> Move | None:
        """Read the first move of a name out of or into a partition whose fence or marker has an epoch above this one.

        After that fence or marker, messages with this epoch are strays. Old moves may be deleted, but then a later move
        of the name there is kept whose fence or marker retention has dropped, too: all remaining messages follow it.
        None: messages with this epoch cannot be strays there.
        """
        wanted = self._with_id(name=check_name(name), stream=stream, above=epoch)
        # Publishers rely on the result: a standby, which may lag, is refused.
        [row] = self.database.rows(FENCE_AFTER, wanted, on_primary=True)
        return None if row.move_id is None else move_info(row)

    def idle_s(self) -> float | None:
        """Read after how many seconds without use sets are closed; None for never."""
        return self._select(IDLE_S)[0].idle_s  # type: ignore[no-any-return]

    def set_idle(self, idle_s: float | None) -> None:
        """Store after how many seconds without use sets are closed; None for never."""
        self.database.rows(SET_IDLE, self._with_id(idle_s=None if idle_s is None else float(idle_s)))

    def _active_partitions(self, *, fresh: bool) -> Sequence[PartitionRow]:
        """The active partitions; a recent list, in which this store's own placements are counted."""
        if not fresh and time.monotonic() < self._active_until:
            return self._active
        active = [partition for partition in self.partitions() if partition.state is PartitionState.ACTIVE]
        if not active:
            raise SuperStreamConflict(
                f"super stream {self._name!r} has no partition that takes new placements",
                super_stream=self._name,
                reason="it has no active partition",
            )
        # In this order, the list is never empty.
        self._active = active
        self._active_until = time.monotonic() + COUNTS_S
        return active

    def _select(self, statement: sa.TextClause, **wanted: Any) -> Sequence[Any]:
        return self.database.rows(statement, self._with_id(**wanted))

    def _with_id(self, **wanted: Any) -> dict[str, Any]:
        return {"super_stream_id": self.super_stream_id, **wanted}


def _placement(row: Sequence[Any]) -> Placement:
    # The row begins with the columns in order; a statement may add others.
    placement = Placement(*row[: len(Placement.__dataclass_fields__)])
    return replace(placement, state=PlacementState(placement.state))


def behind(name: str) -> str:
    """The text before all names after this one: names contain no NUL."""
    return name + "\x01"


def in_parts(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """Split names into lists of at most so many."""
    rest = iter(names)
    while part := list(islice(rest, count)):
        yield part
