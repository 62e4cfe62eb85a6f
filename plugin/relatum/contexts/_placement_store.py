"""The placements of one super stream in PostgreSQL. Each call is one transaction, and returns the state after it.

After a commit with an unknown outcome, repeat the call: it finds the rows that the first call wrote.

Statements lock rows in the order of `relatum.store.tables`: placements by name, the super stream, partitions by id.
Each part of a statement reads from the part before it, and therefore locks after it.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import psycopg
import sqlalchemy as sa

from relatum.common.headers import CONTEXT_HEADER
from relatum.contexts._placement_prune import forget_released
from relatum.contexts._placements import (
    Choose,
    PartitionRow,
    PartitionState,
    Placement,
    PlacementState,
    check_name,
    chunked,
    next_name,
)
from relatum.contexts._super_stream_rows import (
    DURABLE_COMMIT,
    GENERATION,
    IDLE_S,
    PARTITIONS,
    SET_IDLE,
    SET_WEIGHTS,
    not_found,
    open_super_stream,
    partition_of,
)
from relatum.errors import RowRefused, StreamNotFound, SuperStreamConflict, SuperStreamNotFound, TooManyOpenSets
from relatum.reading import BrokerAddress
from relatum.store.database import Database, sql
from relatum.superstreams import Layout, describe_super_stream

CHANGES_MAX: Final = 10_000
"""The most changes that a refresh returns; more changes invalidate the whole cache."""

_PARTITIONS_CACHE_S: Final = 0.1
"""Seconds for which the partitions and their numbers of open sets are cached for balance rules."""

PAGE: Final = 1_000
"""How many placements one statement reads."""

_FORGET_INTERVAL_S: Final = 10.0
"""Seconds between two deletions of old released placements."""

_FORGET_ROWS: Final = 20_000
"""Placements deleted each time: twice as many as one process opens and releases in the interval."""

_ATTEMPTS_MAX: Final = 20
"""Attempts to place names: a chosen partition may be retired, or other routers may place and release a name."""

_PLACEMENT: Final = """
        p.name, p.partition_id, s.stream, s.binding_key, p.epoch, p.state, p.move_id, p.opened_at, p.used_at"""
"""The columns of `Placement`, in order."""

_OF_PLACEMENTS: Final = """
    FROM relatum.placements p JOIN relatum.super_stream_partitions s ON s.partition_id = p.partition_id
    WHERE p.super_stream_id = :super_stream_id::integer"""
"""The tables of the columns in `_PLACEMENT`."""

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
"""A row per change: generation, floor, standby flag, columns of `Placement`. Without changes, one row with NULLs."""

IDLE: Final = sql(f"""{_PLACEMENTS} AND p.state = 'open'
        AND p.used_at < statement_timestamp() - make_interval(secs => :idle_s::double precision)
    ORDER BY p.used_at LIMIT :most::integer""")

LISTED: Final = {
    in_partition: sql(f"""{_PLACEMENTS} AND p.state <> 'released' AND p.name >= :first::text
        {"AND s.stream = :stream::text" if in_partition else ""}
    ORDER BY p.name LIMIT :most::integer""")
    for in_partition in (False, True)
}
"""A page of placements, ordered by name. Key: True for the placements of one partition, False for all."""

# A locked row is in use, so this skips it.
TOUCH: Final = sql("""
    WITH touched AS (
        SELECT placement_id FROM relatum.placements
        WHERE super_stream_id = :super_stream_id::integer AND name = ANY (:names::text[]) AND state = 'open'
        FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE relatum.placements p SET used_at = statement_timestamp()
    FROM touched WHERE p.placement_id = touched.placement_id""")


# - A subquery takes each epoch once, for both columns.
# - A released placement gets its epoch after its row is locked: an earlier epoch may be below that of a later move.
# - A retired partition makes the statement fail, because its count would be null. This undoes the writes without an
#   explicit transaction, which would cost two more round trips.
def _placed(to_lock: str) -> sa.TextClause:
    return sql(f"""
    WITH placed AS (
        INSERT INTO relatum.placements (super_stream_id, name, partition_id, epoch, first_epoch)
        SELECT :super_stream_id::integer, name, partition_id, epoch, epoch
        FROM (SELECT name, partition_id, nextval('relatum.placement_epochs') AS epoch
              FROM unnest(:names::text[], :partition_ids::integer[]) AS given(name, partition_id)
              ORDER BY name COLLATE "C") numbered
        ON CONFLICT ON CONSTRAINT placements_name DO UPDATE
        SET state = 'open', released_at = NULL, partition_id = excluded.partition_id,
            epoch = nextval('relatum.placement_epochs'), first_epoch = placements.epoch + 1,
            opened_at = statement_timestamp(), used_at = statement_timestamp()
        WHERE placements.state = 'released'
        RETURNING name, partition_id, epoch, state, move_id, opened_at, used_at),
    locked AS (
        SELECT partition_id, open_sets FROM relatum.super_stream_partitions
        WHERE {to_lock}
        ORDER BY partition_id FOR NO KEY UPDATE),
    counted AS (
        UPDATE relatum.super_stream_partitions s
        SET open_sets = s.open_sets + CASE WHEN s.state = 'active' THEN added.number END
        FROM locked, (SELECT partition_id, count(*) AS number FROM placed GROUP BY partition_id) added
        WHERE s.partition_id = locked.partition_id AND s.partition_id = added.partition_id
        RETURNING s.partition_id, s.stream, s.binding_key)
    SELECT placed.name, placed.partition_id, counted.stream, counted.binding_key, placed.epoch, placed.state,
        placed.move_id, placed.opened_at, placed.used_at,
        (SELECT sum(open_sets)::bigint FROM locked) + (SELECT count(*) FROM placed) AS open_sets, {DURABLE_COMMIT}
    FROM placed JOIN counted ON counted.partition_id = placed.partition_id""")


PLACE: Final = _placed("partition_id IN (SELECT partition_id FROM placed)")
"""Places names without a placement. Returns the columns of `Placement`, and the open sets of all locked partitions."""

# The condition on `placed` makes the partitions' locks wait for those of the names.
PLACE_BOUNDED: Final = _placed("super_stream_id = :super_stream_id::integer AND (SELECT count(*) FROM placed) > 0")
"""As `PLACE`, but locks all partitions of the super stream: no other router opens a set, `open_sets` is the total."""

# - The state of the locked row decides whether it is released: the statement's snapshot may be older.
# - The update clears `move_id`: PostgreSQL first checks constraints on the older snapshot, in which the row may still
#   be moving.
RELEASE: Final = sql("""
    WITH to_release AS (
        SELECT p.placement_id, p.name, p.state
        FROM relatum.placements p
        JOIN unnest(:names::text[], :epochs::bigint[]) AS given(name, epoch) ON p.name = given.name COLLATE "C"
        WHERE p.super_stream_id = :super_stream_id::integer AND p.state <> 'released'
            AND given.epoch BETWEEN p.first_epoch AND p.epoch
        ORDER BY p.name FOR NO KEY UPDATE OF p),
    raised AS (
        UPDATE relatum.super_streams SET generation = generation + 1
        WHERE super_stream_id = :super_stream_id::integer
            AND (SELECT count(*) FROM to_release WHERE state = 'open') > 0
        RETURNING generation),
    released AS (
        UPDATE relatum.placements p
        SET state = 'released', move_id = NULL, released_at = statement_timestamp(),
            generation = (SELECT generation FROM raised)
        FROM to_release WHERE p.placement_id = to_release.placement_id AND to_release.state = 'open'
        RETURNING p.partition_id),
    locked AS (
        SELECT partition_id FROM relatum.super_stream_partitions
        WHERE partition_id IN (SELECT partition_id FROM released)
        ORDER BY partition_id FOR NO KEY UPDATE),
    counted AS (
        UPDATE relatum.super_stream_partitions s SET open_sets = s.open_sets + fewer.number
        FROM locked, (SELECT partition_id, -count(*) AS number FROM released GROUP BY partition_id) fewer
        WHERE s.partition_id = locked.partition_id AND s.partition_id = fewer.partition_id)
    SELECT name FROM to_release WHERE state = 'moving'""")
"""Releases placements that have had a given epoch since they were opened; returns the names that are moving."""


class PlacementStore:
    """The placements of one super stream. Thread-safe. Call `open` first."""

    super_stream_id: int
    header: str
    """The header that names the sets."""

    def __init__(self, database: Database, vhost: str, super_stream: str) -> None:
        self.database = database
        self._vhost = vhost
        self.super_stream = super_stream
        self._active: Sequence[PartitionRow] = ()
        self._active_until = 0.0
        self._forget_at = time.monotonic() + _FORGET_INTERVAL_S

    def open(
        self, header: str | None = None, layout: Layout | None = None, *, idle_s: float | None = None
    ) -> list[PartitionRow]:
        """Create missing rows of the super stream, compare options with the stored ones, and return the partitions.

        If no row is missing, nothing is written, so a read-only user can open it. None means the stored value. This
        adds partitions of `layout` and removes none. The first `idle_s` is stored for all routers. A different option
        raises `SuperStreamConflict`, an unknown super stream `SuperStreamNotFound`.
        """
        self._active_until = 0.0
        self.super_stream_id, self.header, partitions = self.database.run(
            lambda connection: open_super_stream(connection, (self._vhost, self.super_stream), header, layout, idle_s)
        )
        return partitions

    def open_or_add(self, header: str | None, broker: BrokerAddress) -> None:
        """Open the super stream. If it is not in the database, create its rows from the broker's layout."""
        try:
            self.open(header)
        except SuperStreamNotFound:
            self.open(header or CONTEXT_HEADER, describe_super_stream(broker, self.super_stream))

    def partitions(self) -> list[PartitionRow]:
        return [partition_of(row) for row in self._select(PARTITIONS)]

    def set_weights(self, weights: Mapping[str, float]) -> None:
        unknown = weights.keys() - {row.stream for row in self.partitions()}
        if unknown:
            raise StreamNotFound(f"{min(unknown)!r} is not a partition of {self.super_stream!r}", stream=min(unknown))
        self._select(SET_WEIGHTS, streams=list(weights), weights=list(map(float, weights.values())))
        self._active_until = 0.0

    def generation(self) -> int:
        return int(self._select(GENERATION)[0].generation)

    def changes(self, since: int | None) -> tuple[int, Sequence[Placement] | None]:
        """Return the generation, and the placements that changed after `since`; None if these are not stored."""
        rows = self.database.rows(CHANGES, self._with_id(since=since, most=CHANGES_MAX + 1), on_primary=True)
        if not rows:
            raise not_found(self.super_stream)
        now, floor = rows[0][:2]
        if since is None or since < floor or len(rows) > CHANGES_MAX:
            return now, None
        return now, [_placement(row[3:]) for row in rows if row[3] is not None]

    def find(self, names: Collection[str], *, on_primary: bool = False) -> dict[str, Placement]:
        """Return placements by name, without released ones."""
        found = {}
        for page in chunked(names, PAGE):
            rows = self.database.rows(FIND, self._with_id(names=page), on_primary=on_primary)
            found.update({row.name: _placement(row) for row in rows})
        return found

    def place(
        self, names: Collection[str], choose: Choose, *, open_sets_max: int | None = None, are_new: bool = False
    ) -> dict[str, Placement]:
        """Return the placements of names, and place names that have none. Concurrent callers get the same placements.

        Some placements may be moving. `are_new` skips the first lookup of the names. If the placements would exceed
        `open_sets_max`, `TooManyOpenSets` is raised and no name is placed.
        """
        found = {} if are_new else self.find(names, on_primary=True)
        for _ in range(_ATTEMPTS_MAX):
            missing = sorted(check_name(name) for name in set(names) - found.keys())
            if not missing:
                break
            found |= {row.name: _placement(row) for row in self._insert(missing, choose, open_sets_max)}
            # Another router has placed the other names.
            found |= self.find([name for name in missing if name not in found], on_primary=True)
        if found.keys() < set(names):
            raise SuperStreamConflict(
                f"the partitions of {self.super_stream!r} are being retired: try again",
                super_stream=self.super_stream,
                reason="its partitions change",
            )
        return found

    def _insert(self, names: Sequence[str], choose: Choose, open_sets_max: int | None) -> Sequence[Any]:
        """Place names that have no placement. Returns no rows if a chosen partition has been retired."""
        if time.monotonic() >= self._active_until:
            self._active = [row for row in self.partitions() if row.state is PartitionState.ACTIVE]
            self._active_until = time.monotonic() + _PARTITIONS_CACHE_S
        active = {row.partition_id: row for row in self._active}
        if not active:
            raise SuperStreamConflict(
                f"super stream {self.super_stream!r} has no active partition: add one",
                super_stream=self.super_stream,
                reason="it has no active partition",
            )
        chosen = []
        for name in names:
            row = choose(name, list(active.values()))
            active[row.partition_id] = replace(row, open_sets=row.open_sets + 1)
            chosen.append(row.partition_id)
        # Another thread may overwrite this list; its counts are as good as these.
        self._active = list(active.values())

        wanted = self._with_id(names=names, partition_ids=chosen)

        def place_bounded(connection: sa.Connection) -> Sequence[Any]:
            rows = connection.execute(PLACE_BOUNDED, wanted).all()
            if rows and rows[0].open_sets > open_sets_max:
                raise TooManyOpenSets(
                    f"at most {open_sets_max} sets of {self.super_stream!r} may be open: close some, or raise "
                    "open_sets_max",
                    open_sets=rows[0].open_sets - len(rows),
                    open_sets_max=open_sets_max,
                )
            return rows

        try:
            return self.database.rows(PLACE, wanted) if open_sets_max is None else self.database.run(place_bounded)
        except RowRefused as refused:
            if refused.sqlstate != psycopg.errors.NotNullViolation.sqlstate:
                raise
            # A chosen partition was retired: `PLACE` then sets its `open_sets` to null, which is refused.
            self._active_until = 0.0
            return []

    def release(self, released: Iterable[tuple[str, int]]) -> frozenset[str]:
        """Release placements, given as (name, epoch), as `RELEASE`; return the names that are moving."""
        epochs = dict(released)
        rows = self._select(RELEASE, names=list(epochs), epochs=list(epochs.values()))
        if time.monotonic() >= self._forget_at:
            # Routers that release placements keep the table small, even without runs of `relatum prune`.
            self._forget_at = time.monotonic() + _FORGET_INTERVAL_S
            forget_released(self.database.engine, self.super_stream_id, most=_FORGET_ROWS)
        return frozenset(row.name for row in rows)

    def touch(self, names: Collection[str]) -> None:
        self._select(TOUCH, names=list(names))

    def idle(self, idle_s: float) -> list[Placement]:
        """Return open placements that were unused for `idle_s` seconds, longest unused first, at most a page."""
        return [_placement(row) for row in self._select(IDLE, idle_s=float(idle_s), most=PAGE)]

    def placements(self, *, stream: str | None = None, first: str = "") -> Iterator[Placement]:
        """Iterate over open and moving placements, in byte order of their names, from the name `first` on."""
        in_partition = {} if stream is None else {"stream": stream}
        while True:
            rows = self._select(LISTED[stream is not None], first=first, most=PAGE, **in_partition)
            yield from map(_placement, rows)
            if len(rows) < PAGE:
                return
            first = next_name(rows[-1].name)

    def idle_s(self) -> float | None:
        """Return the seconds without use after which sets are closed; None: never."""
        return self._select(IDLE_S)[0].idle_s  # type: ignore[no-any-return]

    def set_idle(self, idle_s: float | None) -> None:
        self._select(SET_IDLE, idle_s=None if idle_s is None else float(idle_s))

    def _select(self, statement: sa.TextClause, **wanted: Any) -> Sequence[Any]:
        return self.database.rows(statement, self._with_id(**wanted))

    def _with_id(self, **wanted: Any) -> dict[str, Any]:
        return {"super_stream_id": self.super_stream_id, **wanted}


def _placement(row: Sequence[Any]) -> Placement:
    # The row begins with the columns of `Placement`; a statement may append others.
    placement = Placement(*row[: len(Placement.__dataclass_fields__)])
    return replace(placement, state=PlacementState(placement.state))
