-- Functions in the database. `relatum migrate` runs this file each time; in a new database, it runs before schema.sql.

-- --------------------------------------------------------------------------------- the parts of `relationships`
-- Recorders may not change the schema: these functions change it for them, with the owner's rights. Each function does
-- one step if the step is possible now. Any number of recorders may call it concurrently. See docs/adr/0023.

-- Grants a table's privileges on another table.
CREATE OR REPLACE FUNCTION relatum.copy_privileges(source regclass, target regclass) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  granted record;
BEGIN
  FOR granted IN
    SELECT each.privilege_type, CASE each.grantee WHEN 0 THEN 'PUBLIC' ELSE each.grantee::regrole::text END AS grantee
    FROM pg_class, aclexplode(relacl) AS each
    WHERE pg_class.oid = source AND each.grantee <> relowner
  LOOP
    EXECUTE format('GRANT %s ON %s TO %s', granted.privilege_type, target, granted.grantee);
  END LOOP;
END $$;

CREATE OR REPLACE FUNCTION relatum.make_part() RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $$
DECLARE
  new_part integer;
  name text;
BEGIN
  -- Another caller creates the part, or it exists already.
  IF NOT pg_try_advisory_xact_lock(1919249517, 1) OR EXISTS (SELECT FROM relatum.table_parts WHERE opened_at IS NULL)
  THEN
    RETURN NULL;
  END IF;
  SELECT max(part) + 1 INTO new_part FROM relatum.table_parts;
  name := 'relationships_' || new_part;
  -- Rows are only added: until the part is full, autovacuum marks pages as all-visible ten times. Recorders analyse it.
  EXECUTE format('CREATE TABLE relatum.%I (LIKE relatum.relationships) WITH ('
                 'autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 500000, '
                 'autovacuum_analyze_scale_factor = 1)', name);
  EXECUTE format('ALTER TABLE relatum.%I ALTER part SET DEFAULT %s', name, new_part);
  EXECUTE format('CREATE INDEX %I ON relatum.%I (key_id, value, stream_id, time_us, stream_offset)',
                 name || '_lookup', name);
  EXECUTE format('CREATE INDEX %I ON relatum.%I USING brin (stream_id, stream_offset) WITH (pages_per_range = 32)',
                 name || '_offsets', name);
  -- SHARE UPDATE EXCLUSIVE on the parent, which neither blocks writers and lookups nor waits for them.
  EXECUTE format('ALTER TABLE relatum.relationships ATTACH PARTITION relatum.%I FOR VALUES FROM (%s) TO (%s)',
                 name, new_part, new_part + 1);
  -- Rows are written into the parts directly, which therefore need the parent table's privileges.
  PERFORM relatum.copy_privileges('relatum.relationships', ('relatum.' || name)::regclass);
  INSERT INTO relatum.table_parts (part) VALUES (new_part);
  RETURN new_part;
EXCEPTION WHEN lock_not_available THEN
  RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION relatum.analyze_part(grown integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
BEGIN
  EXECUTE format('ANALYZE relatum.%I', 'relationships_' || grown);
  RETURN true;
EXCEPTION WHEN lock_not_available OR undefined_table THEN
  RETURN false;
END $$;

CREATE OR REPLACE FUNCTION relatum.close_part(closed integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET lock_timeout = '5s' SET maintenance_work_mem = '32MB' SET max_parallel_maintenance_workers = 0 AS $$
DECLARE
  name text := 'relationships_' || closed;
BEGIN
  -- At another level, rows committed since the transaction began would not be counted, and lookups would miss them.
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'close_part needs the isolation level READ COMMITTED';
  END IF;
  -- Part 0 is never closed: the previous release writes into it. Writers of other parts lock the row in `table_parts`.
  PERFORM FROM relatum.table_parts
  WHERE part = closed AND part > 0 AND closed_at IS NULL
    AND EXISTS (SELECT FROM relatum.table_parts later WHERE later.part > closed AND later.opened_at IS NOT NULL)
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  -- Recorders need the processors, so this session builds the index without parallel workers. The small
  -- maintenance_work_mem fits into a processor's cache; with 256 MB, the build takes half as long again.
  -- From here on, the part is only read; deletions wait for the index. The lock_timeout is longer than
  -- deadlock_timeout, after which autovacuum gives way.
  EXECUTE format('LOCK TABLE relatum.%I IN SHARE MODE', name);
  EXECUTE format('INSERT INTO relatum.part_streams (part, stream_id, row_count, first_offset, last_offset) '
                 'SELECT %s, stream_id, count(*), min(stream_offset), max(stream_offset) FROM relatum.%I GROUP BY 2',
                 closed, name);
  EXECUTE format('CREATE INDEX %I ON relatum.%I (key_id, value, stream_id, time_us, stream_offset) '
                 'WITH (fillfactor = 100)', name || '_compact', name);
  -- Skip scan over the index: from one key to the next, with the least and greatest value of each.
  EXECUTE format('WITH RECURSIVE present AS (SELECT min(key_id) AS key_id FROM relatum.%2$I UNION ALL '
                 'SELECT (SELECT min(key_id) FROM relatum.%2$I WHERE key_id > present.key_id) FROM present '
                 'WHERE present.key_id IS NOT NULL) '
                 'INSERT INTO relatum.part_keys (part, key_id, low, high) SELECT %1$s, key_id, '
                 '(SELECT min(value) FROM relatum.%2$I WHERE key_id = present.key_id), '
                 '(SELECT max(value) FROM relatum.%2$I WHERE key_id = present.key_id) '
                 'FROM present WHERE key_id IS NOT NULL', closed, name);
  EXECUTE format('ANALYZE relatum.%I', name);
  PERFORM brin_summarize_new_values(format('relatum.%I', name || '_offsets')::regclass);
  -- Autovacuum runs once more, freezes all rows and marks all pages as all-visible; then it has nothing left to do.
  EXECUTE format('ALTER TABLE relatum.%I SET (autovacuum_freeze_min_age = 0, '
                 'autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 1)', name);
  UPDATE relatum.table_parts SET closed_at = clock_timestamp() WHERE part = closed;
  RETURN true;
EXCEPTION WHEN lock_not_available THEN
  RETURN false;
END $$;

-- This function and drop_part wait for ACCESS EXCLUSIVE, and delay lookups, for at most 50 ms.
CREATE OR REPLACE FUNCTION relatum.finish_part(closed integer) RETURNS boolean
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
END $$;

-- Moves retained rows into the open part, in one statement, so that each row exists once at any moment. The emptied
-- table is kept for a day, for older snapshots.
CREATE OR REPLACE FUNCTION relatum.empty_part(leaving integer) RETURNS boolean
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
  -- Deletions of the part's rows wait, and then find the rows in the open part.
  EXECUTE format('LOCK TABLE relatum.%I IN SHARE ROW EXCLUSIVE MODE', 'relationships_' || leaving);
  EXECUTE format(
    'WITH moved AS (DELETE FROM relatum.%I old USING relatum.streams stream '
    'WHERE stream.stream_id = old.stream_id AND stream.replaced_at IS NULL '
    'AND old.stream_offset >= coalesce(stream.retained_from, old.stream_offset) RETURNING old.*) '
    'INSERT INTO relatum.%I (stream_offset, time_us, stream_id, key_id, value) '
    'SELECT stream_offset, time_us, stream_id, key_id, value FROM moved ORDER BY key_id, value',
    'relationships_' || leaving, 'relationships_' || target);
  DELETE FROM relatum.part_streams WHERE part = leaving;
  DELETE FROM relatum.part_keys WHERE part = leaving;
  UPDATE relatum.table_parts SET emptied_at = now() WHERE part = leaving;
  RETURN true;
EXCEPTION WHEN lock_not_available THEN
  RETURN false;
END $$;

CREATE OR REPLACE FUNCTION relatum.drop_part(gone integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
BEGIN
  PERFORM FROM relatum.table_parts
  WHERE part = gone AND closed_at IS NOT NULL AND (emptied_at IS NULL OR emptied_at <= now() - interval '1 day')
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND OR EXISTS (
    SELECT FROM relatum.part_streams ranges JOIN relatum.streams stream USING (stream_id)
    WHERE ranges.part = gone AND stream.replaced_at IS NULL
      AND (stream.retained_from IS NULL OR ranges.last_offset >= stream.retained_from)
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
END $$;

REVOKE ALL ON FUNCTION relatum.make_part(), relatum.analyze_part(integer), relatum.close_part(integer),
  relatum.finish_part(integer), relatum.empty_part(integer), relatum.drop_part(integer),
  relatum.copy_privileges(regclass, regclass) FROM PUBLIC;

-- ------------------------------------------------------------------------------------------------ lookups by key
-- PostgreSQL caches these functions' plans even if the session prepares no statements, as behind a pooler: planning a
-- call takes as long as running it. They run with the caller's rights.

DO $make$
DECLARE
  -- Excludes parts that cannot hold the value: see docs/adr/0023.
  holds text := $text$(
    r.part = 0
    OR r.part >= (SELECT min(p.part) FROM relatum.table_parts p WHERE p.part > 0 AND p.closed_at IS NULL)
    OR r.part >= (SELECT min(k.part) FROM relatum.part_keys k
                  WHERE k.key_id = of_key AND k.low <= of_value AND k.high >= of_value)
    AND r.part <= (SELECT max(k.part) FROM relatum.part_keys k
                   WHERE k.key_id = of_key AND k.low <= of_value AND k.high >= of_value))$text$;
  rows text := 'RETURN QUERY SELECT r.stream_offset, r.time_us FROM relatum.relationships r '
               'WHERE r.key_id = of_key AND r.value = of_value AND r.stream_id = of_stream '
               'AND r.stream_offset >= first_offset AND ' || holds;
  span text := 'r.time_us >= since AND r.time_us < until';
BEGIN
  EXECUTE replace(replace($text$
CREATE OR REPLACE FUNCTION relatum.rows_of(of_key smallint, of_value text, of_stream integer, first_offset bigint,
                                           since bigint, until bigint, most bigint, ordering text)
RETURNS TABLE (stream_offset bigint, time_us bigint) LANGUAGE plpgsql STABLE ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
DECLARE
  branch text := ordering || CASE WHEN since IS NULL THEN '' ELSE ', in a span' END;
BEGIN
  CASE branch
  WHEN 'oldest' THEN <rows> ORDER BY r.time_us, r.stream_offset LIMIT most;
  WHEN 'newest' THEN <rows> ORDER BY r.time_us DESC, r.stream_offset DESC LIMIT most;
  WHEN 'offset' THEN <rows> ORDER BY r.stream_offset LIMIT most;
  WHEN 'oldest, in a span' THEN <rows> AND <span> ORDER BY r.time_us, r.stream_offset LIMIT most;
  WHEN 'newest, in a span' THEN <rows> AND <span> ORDER BY r.time_us DESC, r.stream_offset DESC LIMIT most;
  WHEN 'offset, in a span' THEN <rows> AND <span> ORDER BY r.stream_offset LIMIT most;
  END CASE;
END $$$text$, '<rows>', rows), '<span>', span);

  EXECUTE replace($text$
CREATE OR REPLACE FUNCTION relatum.stream_of(of_key smallint, of_value text, behind integer)
RETURNS integer LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
BEGIN
  RETURN (SELECT r.stream_id FROM relatum.relationships r
          WHERE r.key_id = of_key AND r.value = of_value AND r.stream_id > behind AND <holds>
          ORDER BY r.stream_id LIMIT 1);
END $$$text$, '<holds>', holds);
END $make$;

-- A database's default privileges may not include EXECUTE.
GRANT EXECUTE ON FUNCTION
  relatum.rows_of(smallint, text, integer, bigint, bigint, bigint, bigint, text),
  relatum.stream_of(smallint, text, integer)
  TO PUBLIC;
