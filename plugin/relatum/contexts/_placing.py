"""Statements that place names in partitions and release them, and the choice of a new name's partition.

Rows are locked in the order of `relatum.store.tables`: placements by name, the super stream, partitions by id. Each
part of a statement reads from the part before it, and so locks after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import psycopg
import sqlalchemy as sa

from relatum.contexts._placements import Choose, PartitionRow
from relatum.errors import RowRefused, TooManyOpenSets
from relatum.store.database import Database, sql

KEEP_COMMITS: Final = """
    CASE WHEN current_setting('synchronous_commit') = 'off'
         THEN set_config('synchronous_commit', 'on', true) END AS kept"""
"""Makes the commit wait for the disk, whatever `synchronous_commit` is.

If a crash of PostgreSQL undid a placement with messages, the name could be placed again elsewhere.
"""


# - A query of its own takes the epochs: once, for both columns.
# - A released placement gets its epoch after its row is locked: an earlier one may be below that of a later move.
# - A retired partition makes the statement fail, since its count would be null. This undoes what was written without an
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
        RETURNING name, partition_id, epoch, state, move_id, generation, opened_at, used_at, released_at),
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
        placed.move_id, placed.generation, placed.opened_at, placed.used_at, placed.released_at,
        (SELECT sum(open_sets)::bigint FROM locked) + (SELECT count(*) FROM placed) AS open_sets, {KEEP_COMMITS}
    FROM placed JOIN counted ON counted.partition_id = placed.partition_id""")


PLACE: Final = _placed("partition_id IN (SELECT partition_id FROM placed)")
"""Places names that have no placement; returns the columns of `Placement` of the new ones, and `open_sets`.

`open_sets` is the number of open sets in the locked partitions, in each row.
"""

# The names first: reading their count makes this part wait for them.
PLACE_BOUNDED: Final = _placed("super_stream_id = :super_stream_id::integer AND (SELECT count(*) FROM placed) > 0")
"""Locks all partitions of the super stream, so that no one else opens a set: `open_sets` counts all of them.
"""

# - The state of the locked row decides what is released: the statement's snapshot may be older.
# - `move_id` is cleared, since PostgreSQL checks constraints on the older snapshot first, in which the row may still be
#   moving.
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
"""Releases placements that had one of these epochs since they were opened; returns the names that are moving."""


def place(database: Database, super_stream: str, wanted: Mapping[str, Any], open_sets_max: int | None) -> Sequence[Any]:
    """Place names by `PLACE`, and return its rows; none if a partition was retired in the meantime.

    Raises `TooManyOpenSets` at the limit; nothing was placed then.
    """

    def accept(rows: Sequence[Any]) -> bool:
        if rows and rows[0].open_sets > open_sets_max:
            raise TooManyOpenSets(
                f"{open_sets_max} sets of {super_stream!r} may be open; close some, or allow more",
                open_sets=rows[0].open_sets - len(rows),
                open_sets_max=open_sets_max,
            )
        return True

    try:
        if open_sets_max is None:
            return database.rows(PLACE, wanted)
        return database.rows(PLACE_BOUNDED, wanted, accept=accept)
    except RowRefused as refused:
        cause = refused.__cause__
        if isinstance(cause, psycopg.errors.NotNullViolation) and cause.diag.column_name == "open_sets":
            return []
        raise


def chosen_among(names: Iterable[str], partitions: Sequence[PartitionRow], choose: Choose) -> dict[str, PartitionRow]:
    """Choose a partition for each name; `open_sets` includes the names before it."""
    candidates = {partition.partition_id: partition for partition in partitions}
    chosen = {}
    for name in names:
        row = chosen[name] = choose(name, list(candidates.values()))
        candidates[row.partition_id] = replace(row, open_sets=row.open_sets + 1)
    return chosen
