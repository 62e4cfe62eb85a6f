-- The five roles and their privileges. Roles belong to the whole server: they may already exist for another database,
-- or this user may not create roles. So `relatum migrate` runs this file each time: it creates missing roles, if it
-- may, and grants existing roles their privileges. Identity columns need no privileges on their sequences.

-- Recorders create no part until this transaction ends: a new part would lack the new privileges. `make_part` uses the
-- same advisory lock.
SELECT pg_advisory_xact_lock(1919249517, 1);

DO $$
DECLARE
  role text;
BEGIN
  FOREACH role IN ARRAY ARRAY['relatum_recorder', 'relatum_consumer', 'relatum_reader', 'relatum_collector',
                              'relatum_router'] LOOP
    BEGIN
      EXECUTE format('CREATE ROLE %I NOLOGIN', role);
    EXCEPTION WHEN duplicate_object OR unique_violation OR insufficient_privilege THEN
      NULL;
    END;
    CONTINUE WHEN NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role);
    EXECUTE format('GRANT USAGE ON SCHEMA relatum TO %I', role);
    IF role IN ('relatum_reader', 'relatum_consumer') THEN
      -- All tables except receipts and settlements, which only writers need.
      EXECUTE format('GRANT SELECT ON
        relatum.alembic_version, relatum.relations, relatum.streams, relatum.recorder_members, relatum.keys,
        relatum.coverage, relatum.relationships, relatum.table_parts, relatum.part_streams, relatum.part_keys,
        relatum.time_blocks, relatum.checkpoints, relatum.skips, relatum.events, relatum.expectations, relatum.taps,
        relatum.brokers, relatum.group_consumers, relatum.group_scans, relatum.group_states, relatum.collectors,
        relatum.collector_members, relatum.collector_sources, relatum.collected_messages, relatum.super_streams,
        relatum.super_stream_partitions, relatum.placements, relatum.context_moves, relatum.moved_contexts,
        relatum.serial_consumers, relatum.serial_members, relatum.serial_positions, relatum.serial_holds,
        relatum.masking
        TO %I', role);
    END IF;
    IF role = 'relatum_recorder' THEN
      GRANT SELECT, INSERT, UPDATE, DELETE ON
        relatum.streams, relatum.recorder_members, relatum.keys, relatum.coverage, relatum.relationships,
        relatum.table_parts, relatum.part_streams, relatum.part_keys, relatum.time_blocks, relatum.checkpoints,
        relatum.receipts, relatum.skips, relatum.events, relatum.expectations, relatum.taps, relatum.brokers,
        relatum.relations, relatum.group_consumers, relatum.group_scans, relatum.group_states, relatum.settlements
        TO relatum_recorder;
      GRANT SELECT ON
        relatum.alembic_version, relatum.super_streams, relatum.super_stream_partitions, relatum.serial_consumers,
        relatum.serial_members, relatum.serial_positions, relatum.serial_holds
        TO relatum_recorder;
      GRANT SELECT, DELETE ON
        relatum.collectors, relatum.collector_members, relatum.collector_sources, relatum.collected_messages,
        relatum.placements, relatum.context_moves, relatum.moved_contexts
        TO relatum_recorder;
      -- Pruning sets the generation up to which changes were deleted.
      GRANT UPDATE (floor) ON relatum.super_streams TO relatum_recorder;
      GRANT EXECUTE ON FUNCTION
        relatum.make_part(), relatum.analyze_part(integer), relatum.close_part(integer), relatum.finish_part(integer),
        relatum.empty_part(integer), relatum.drop_part(integer)
        TO relatum_recorder;
    ELSIF role = 'relatum_consumer' THEN
      GRANT SELECT, INSERT, UPDATE, DELETE ON
        relatum.group_consumers, relatum.group_scans, relatum.group_states, relatum.serial_consumers,
        relatum.serial_members, relatum.serial_positions, relatum.serial_holds, relatum.settlements
        TO relatum_consumer;
      GRANT SELECT ON relatum.receipts TO relatum_consumer;
    ELSIF role = 'relatum_collector' THEN
      GRANT SELECT, INSERT, UPDATE, DELETE ON
        relatum.collectors, relatum.collector_members, relatum.collector_sources, relatum.collected_messages,
        relatum.settlements
        TO relatum_collector;
    ELSIF role = 'relatum_router' THEN
      GRANT USAGE ON SEQUENCE relatum.placement_epochs TO relatum_router;
      GRANT SELECT, INSERT, UPDATE, DELETE ON
        relatum.super_streams, relatum.super_stream_partitions, relatum.placements, relatum.context_moves,
        relatum.moved_contexts, relatum.serial_consumers, relatum.serial_members, relatum.serial_positions,
        relatum.serial_holds, relatum.settlements
        TO relatum_router;
    END IF;
  END LOOP;
END $$;

-- Rows are written into the parts directly, which therefore need the parent table's privileges. This waits only for parts
-- that lack some: a recorder locks a part's row while it closes the part, which may take minutes, and both sides would
-- update the same rows of the catalog.
SELECT relatum.copy_privileges('relatum.relationships', ('relatum.relationships_' || part)::regclass)
FROM (
  SELECT part FROM relatum.table_parts
  WHERE EXISTS (
    SELECT grantee, privilege_type FROM pg_class, aclexplode(relacl)
    WHERE pg_class.oid = 'relatum.relationships'::regclass AND grantee <> relowner
    EXCEPT
    SELECT grantee, privilege_type FROM pg_class, aclexplode(relacl)
    WHERE pg_class.oid = ('relatum.relationships_' || part)::regclass)
  FOR NO KEY UPDATE) AS lacking;
