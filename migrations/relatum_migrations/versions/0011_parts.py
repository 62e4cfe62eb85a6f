"""`relationships` in parts: the table that is there becomes part 0, as it is.

Locks: first all rows are read once (100,000,000 in about 15 s where they are in memory, else as fast as the disk),
under SHARE UPDATE EXCLUSIVE on `relationships`: recorders and look-ups go on. Then tables are renamed and attached:
ACCESS EXCLUSIVE on `relationships` for some milliseconds, at the end of the transaction. No row is rewritten.

A recorder of the release before goes on: its rows are of part 0. Its look-ups go on too: they see all parts.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.execute("ALTER TABLE relatum.relationships VALIDATE CONSTRAINT relationships_part")
    _create_catalog()
    for statement in (*_SWAP, _RELATIONS_VIEW, *_FUNCTIONS, _RIGHTS):
        op.execute(statement)
    # The owner's, and not granted yet: what it makes has the rights of the table that was there.
    op.execute("SELECT relatum.make_part()")
    op.execute("UPDATE relatum.table_parts SET opened_at = now()")


def _create_catalog() -> None:
    op.create_table(
        "table_parts",
        sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("made_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("opened_at", _TIME),
        sa.Column("closed_at", _TIME),
        sa.Column("compact_at", _TIME),
        sa.Column("leaving_at", _TIME),
        sa.Column("emptied_at", _TIME),
        schema="relatum",
        # Each commit locks one row of it.
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "part_streams",
        sa.Column("first_offset", sa.BigInteger, nullable=False),
        sa.Column("last_offset", sa.BigInteger, nullable=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("stream_id", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("part", "stream_id", name="part_streams_place"),
        sa.Index("part_streams_stream", "stream_id", "part"),
        schema="relatum",
    )
    op.create_table(
        "part_keys",
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("key_id", sa.SmallInteger, nullable=False),
        sa.Column("low", sa.Text(collation="C"), nullable=False),
        sa.Column("high", sa.Text(collation="C"), nullable=False),
        sa.PrimaryKeyConstraint("key_id", "part", name="part_keys_place"),
        schema="relatum",
    )
    op.add_column("streams", sa.Column("retained_from", sa.BigInteger), schema="relatum")


def downgrade() -> None:
    for statement in _BACK:
        op.execute(statement)
    op.drop_column("streams", "retained_from", schema="relatum")
    op.drop_table("part_keys", schema="relatum")
    op.drop_table("part_streams", schema="relatum")
    op.drop_table("table_parts", schema="relatum")


_RELATIONS_VIEW = """
CREATE OR REPLACE VIEW relatum.relations AS
SELECT k.name AS key, r.value, s.vhost, s.name AS stream, r.stream_offset,
       timestamptz 'epoch' + r.time_us * interval '1 microsecond' AS time
FROM relatum.relationships r
JOIN relatum.streams s ON s.stream_id = r.stream_id AND s.replaced_at IS NULL
JOIN relatum.keys k ON k.key_id = r.key_id AND k.removed_at IS NULL
"""

# The indexes are of each part: those of a partitioned table could not be made anew one part at a time.
_SWAP = (
    "ALTER TABLE relatum.relationships RENAME TO relationships_0",
    "ALTER INDEX relatum.relationships_lookup RENAME TO relationships_0_lookup",
    "ALTER INDEX relatum.relationships_offsets RENAME TO relationships_0_offsets",
    "CREATE TABLE relatum.relationships (LIKE relatum.relationships_0 INCLUDING DEFAULTS) PARTITION BY RANGE (part)",
    # The constraint says that no row needs to be looked at.
    "ALTER TABLE relatum.relationships ATTACH PARTITION relatum.relationships_0 FOR VALUES FROM (0) TO (1)",
    "ALTER TABLE relatum.relationships_0 DROP CONSTRAINT relationships_part",
    "INSERT INTO relatum.table_parts (part, opened_at) VALUES (0, now())",
)

# Rows of all parts go back into the first, which is the table again.
_BACK = (
    "LOCK TABLE relatum.relationships IN ACCESS EXCLUSIVE MODE",
    "UPDATE relatum.relationships SET part = 0 WHERE part <> 0",
    "ALTER TABLE relatum.relationships DETACH PARTITION relatum.relationships_0",
    "ALTER TABLE relatum.relationships RENAME TO relationships_parted",
    "ALTER TABLE relatum.relationships_0 RENAME TO relationships",
    "ALTER INDEX relatum.relationships_0_lookup RENAME TO relationships_lookup",
    "ALTER INDEX relatum.relationships_0_offsets RENAME TO relationships_offsets",
    "ALTER TABLE relatum.relationships ADD CONSTRAINT relationships_part CHECK (part = 0) NOT VALID",
    _RELATIONS_VIEW,
    "DROP TABLE relatum.relationships_parted",
    "DROP FUNCTION relatum.drop_part(integer), relatum.empty_part(integer), relatum.finish_part(integer), "
    "relatum.close_part(integer), relatum.analyze_part(integer), relatum.make_part(), relatum.grant_part(integer)",
)

# Recorders may not change the schema: what they need of it is done by these, with the owner's rights. Each does one
# thing, which is checked here and not by who calls it; each may be called by any number of recorders at once.
_GRANT_PART = """
CREATE FUNCTION relatum.grant_part(part integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  granted record;
BEGIN
  FOR granted IN
    SELECT each.privilege_type, CASE each.grantee WHEN 0 THEN 'PUBLIC' ELSE each.grantee::regrole::text END AS grantee
    FROM pg_class, aclexplode(relacl) AS each
    WHERE pg_class.oid = 'relatum.relationships'::regclass AND each.grantee <> relowner
  LOOP
    EXECUTE format('GRANT %s ON relatum.%I TO %s', granted.privilege_type, 'relationships_' || part, granted.grantee);
  END LOOP;
END $$
"""

_MAKE_PART = """
CREATE FUNCTION relatum.make_part() RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $$
DECLARE
  made integer;
  name text;
BEGIN
  -- Those that come at the same time have nothing to do.
  IF NOT pg_try_advisory_xact_lock(1919249517, 1) OR EXISTS (SELECT FROM relatum.table_parts WHERE opened_at IS NULL)
  THEN
    RETURN NULL;
  END IF;
  SELECT max(part) + 1 INTO made FROM relatum.table_parts;
  name := 'relationships_' || made;
  -- Rows are only added: ten times until it is full, autovacuum marks pages as seen by all. Recorders analyse it.
  EXECUTE format('CREATE TABLE relatum.%I (LIKE relatum.relationships) WITH ('
                 'autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 500000, '
                 'autovacuum_analyze_scale_factor = 1)', name);
  EXECUTE format('ALTER TABLE relatum.%I ALTER part SET DEFAULT %s', name, made);
  EXECUTE format('CREATE INDEX %I ON relatum.%I (key_id, value, stream_id, time_us, stream_offset)',
                 name || '_lookup', name);
  EXECUTE format('CREATE INDEX %I ON relatum.%I USING brin (stream_id, stream_offset) WITH (pages_per_range = 32)',
                 name || '_offsets', name);
  -- SHARE UPDATE EXCLUSIVE on the table: neither rows nor look-ups wait, nor does this for them.
  EXECUTE format('ALTER TABLE relatum.relationships ATTACH PARTITION relatum.%I FOR VALUES FROM (%s) TO (%s)',
                 name, made, made + 1);
  PERFORM relatum.grant_part(made);
  INSERT INTO relatum.table_parts (part) VALUES (made);
  RETURN made;
EXCEPTION WHEN lock_not_available THEN
  RETURN NULL;
END $$
"""

_ANALYZE_PART = """
CREATE FUNCTION relatum.analyze_part(grown integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM relatum.table_parts WHERE part = grown) THEN
    RETURN false;
  END IF;
  EXECUTE format('ANALYZE relatum.%I', 'relationships_' || grown);
  RETURN true;
EXCEPTION WHEN lock_not_available THEN
  RETURN false;
END $$
"""

_CLOSE_PART = """
CREATE FUNCTION relatum.close_part(closed integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET lock_timeout = '5s' SET maintenance_work_mem = '32MB' SET max_parallel_maintenance_workers = 0 AS $$
DECLARE
  name text := 'relationships_' || closed;
BEGIN
  -- What was committed since a transaction of another level began would not be counted, and not be found any more.
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'a part is closed in READ COMMITTED only';
  END IF;
  -- Part 0 is where the release before writes. Who writes rows into another part holds its row in `table_parts`.
  PERFORM FROM relatum.table_parts
  WHERE part = closed AND part > 0 AND closed_at IS NULL
    AND EXISTS (SELECT FROM relatum.table_parts later WHERE later.part > closed AND later.opened_at IS NOT NULL)
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  -- Recorders have more need of the processors: the index is built by this session alone, and sorted in pieces that a
  -- processor's cache holds: with 256 MB of memory it takes half as long again.
  -- Nobody writes it from here on; it is read, and what deletes rows of it waits for the index. Longer than
  -- deadlock_timeout, by when autovacuum gives way.
  EXECUTE format('LOCK TABLE relatum.%I IN SHARE MODE', name);
  EXECUTE format('INSERT INTO relatum.part_streams (part, stream_id, row_count, first_offset, last_offset) '
                 'SELECT %s, stream_id, count(*), min(stream_offset), max(stream_offset) FROM relatum.%I GROUP BY 2',
                 closed, name);
  EXECUTE format('CREATE INDEX %I ON relatum.%I (key_id, value, stream_id, time_us, stream_offset) '
                 'WITH (fillfactor = 100)', name || '_compact', name);
  -- By the index: from one key to the next, and to the ends of each.
  EXECUTE format('WITH RECURSIVE lying AS (SELECT min(key_id) AS key_id FROM relatum.%2$I UNION ALL '
                 'SELECT (SELECT min(key_id) FROM relatum.%2$I WHERE key_id > lying.key_id) FROM lying '
                 'WHERE lying.key_id IS NOT NULL) '
                 'INSERT INTO relatum.part_keys (part, key_id, low, high) SELECT %1$s, key_id, '
                 '(SELECT min(value) FROM relatum.%2$I WHERE key_id = lying.key_id), '
                 '(SELECT max(value) FROM relatum.%2$I WHERE key_id = lying.key_id) '
                 'FROM lying WHERE key_id IS NOT NULL', closed, name);
  EXECUTE format('ANALYZE relatum.%I', name);
  PERFORM brin_summarize_new_values(format('relatum.%I', name || '_offsets')::regclass);
  -- Autovacuum comes once more, freezes all rows and marks all pages as seen by all; it has no reason to come again.
  EXECUTE format('ALTER TABLE relatum.%I SET (autovacuum_freeze_min_age = 0, '
                 'autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 1)', name);
  UPDATE relatum.table_parts SET closed_at = clock_timestamp() WHERE part = closed;
  RETURN true;
EXCEPTION WHEN lock_not_available THEN
  RETURN false;
END $$
"""

# ACCESS EXCLUSIVE is asked for in these two, for as long as no look-up minds: who waits behind waits no longer.
_FINISH_PART = """
CREATE FUNCTION relatum.finish_part(closed integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
DECLARE
  name text := 'relationships_' || closed;
BEGIN
  PERFORM FROM relatum.table_parts WHERE part = closed AND closed_at IS NOT NULL AND compact_at IS NULL
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  EXECUTE format('DROP INDEX relatum.%I', name || '_lookup');
  EXECUTE format('ALTER INDEX relatum.%I RENAME TO %I', name || '_compact', name || '_lookup');
  UPDATE relatum.table_parts SET compact_at = clock_timestamp() WHERE part = closed;
  RETURN true;
EXCEPTION WHEN lock_not_available THEN
  RETURN false;
END $$
"""

# Rows that are retained go to where new ones are written, in one statement, so that each is there once at any moment.
# The table itself stays for a day, for snapshots that do not know of it.
_EMPTY_PART = """
CREATE FUNCTION relatum.empty_part(leaving integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
  target integer;
BEGIN
  PERFORM FROM relatum.table_parts
  WHERE part = leaving AND emptied_at IS NULL AND leaving_at <= now() - interval '1 day'
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  SELECT part INTO target FROM relatum.table_parts WHERE opened_at IS NOT NULL AND closed_at IS NULL
  ORDER BY part DESC LIMIT 1 FOR KEY SHARE;
  -- Who deletes rows of it, waits, and finds them where they are then.
  EXECUTE format('LOCK TABLE relatum.%I IN SHARE ROW EXCLUSIVE MODE', 'relationships_' || leaving);
  EXECUTE format(
    'WITH moved AS (DELETE FROM relatum.%I lying USING relatum.streams stream '
    'WHERE stream.stream_id = lying.stream_id AND stream.replaced_at IS NULL '
    'AND lying.stream_offset >= coalesce(stream.retained_from, lying.stream_offset) RETURNING lying.*) '
    'INSERT INTO relatum.%I (stream_offset, time_us, stream_id, key_id, value) '
    'SELECT stream_offset, time_us, stream_id, key_id, value FROM moved ORDER BY key_id, value',
    'relationships_' || leaving, 'relationships_' || target);
  DELETE FROM relatum.part_streams WHERE part = leaving;
  DELETE FROM relatum.part_keys WHERE part = leaving;
  UPDATE relatum.table_parts SET emptied_at = now() WHERE part = leaving;
  RETURN true;
EXCEPTION WHEN lock_not_available THEN
  RETURN false;
END $$
"""

_DROP_PART = """
CREATE FUNCTION relatum.drop_part(gone integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
BEGIN
  PERFORM FROM relatum.table_parts
  WHERE part = gone AND closed_at IS NOT NULL AND (emptied_at IS NULL OR emptied_at <= now() - interval '1 day')
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND OR EXISTS (
    SELECT FROM relatum.part_streams lying JOIN relatum.streams stream USING (stream_id)
    WHERE lying.part = gone AND stream.replaced_at IS NULL
      AND (stream.retained_from IS NULL OR lying.last_offset >= stream.retained_from)
  ) THEN
    RETURN false;
  END IF;
  EXECUTE format('DROP TABLE relatum.%I', 'relationships_' || gone);
  DELETE FROM relatum.part_streams WHERE part = gone;
  DELETE FROM relatum.part_keys WHERE part = gone;
  DELETE FROM relatum.table_parts WHERE part = gone;
  RETURN true;
EXCEPTION WHEN lock_not_available THEN
  RETURN false;
END $$
"""

_FUNCTIONS = (
    _GRANT_PART,
    _MAKE_PART,
    _ANALYZE_PART,
    _CLOSE_PART,
    _FINISH_PART,
    _EMPTY_PART,
    _DROP_PART,
    "REVOKE ALL ON FUNCTION relatum.make_part(), relatum.analyze_part(integer), relatum.close_part(integer), "
    "relatum.finish_part(integer), relatum.empty_part(integer), relatum.drop_part(integer), "
    "relatum.grant_part(integer) FROM PUBLIC",
)

# The table is new: whoever had rights of the one that was there has them of this one, and may see what is in its parts,
# which look-ups ask for.
_RIGHTS = """
DO $$
DECLARE
  granted record;
BEGIN
  FOR granted IN
    SELECT each.privilege_type, CASE each.grantee WHEN 0 THEN 'PUBLIC' ELSE each.grantee::regrole::text END AS grantee
    FROM pg_class, aclexplode(relacl) AS each
    WHERE pg_class.oid = to_regclass('relatum.relationships_0') AND each.grantee <> relowner
  LOOP
    EXECUTE format('GRANT %s ON relatum.relationships TO %s', granted.privilege_type, granted.grantee);
    IF granted.privilege_type = 'SELECT' THEN
      EXECUTE format('GRANT SELECT ON relatum.table_parts, relatum.part_streams, relatum.part_keys TO %s',
                     granted.grantee);
    END IF;
  END LOOP;
END $$
"""
