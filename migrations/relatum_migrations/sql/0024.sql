-- Second step from release 0.4: everything in schema.sql that release 0.4 lacks, after new_in_0_5.sql.
--
-- Processes of release 0.4 continue to work, except for movers of contexts, whose inserts lack `generation`.
--
-- Locks: all rows of `relationships` are read once (100,000,000 in about 15 s from memory, otherwise at the disk's
-- speed) under SHARE UPDATE EXCLUSIVE: recorders and lookups continue. `collected_messages` is read twice, at a few
-- million rows a second: collectors wait. Other statements take ACCESS EXCLUSIVE on the tables they change, for some
-- milliseconds: `coverage` before `relationships`, the order in which recorders lock them.

-- ------------------------------------------------------------------- long statements, before all other locks are taken

ALTER TABLE relatum.relationships VALIDATE CONSTRAINT relationships_part;

CREATE INDEX collected_messages_unsuccessful ON relatum.collected_messages (source_id, finished_at, stream_offset)
  WHERE finished_at IS NOT NULL AND reason IS NOT NULL;
ALTER TABLE relatum.collected_messages ADD CONSTRAINT collected_messages_reason
  CHECK (finished_at IS NULL OR (reason IS NOT NULL) = (state <> 'succeeded'));

-- ----------------------------------------------------------------------------------------------------- new columns

ALTER TABLE relatum.coverage ADD COLUMN over_amqp boolean NOT NULL DEFAULT false;
-- Only ranges recorded over AMQP 0.9.1 have no chunk time in their last position.
UPDATE relatum.coverage SET over_amqp = true WHERE last_fingerprint IS NOT NULL AND last_chunk_ms IS NULL;

ALTER TABLE relatum.super_streams ADD COLUMN idle_s double precision;

ALTER TABLE relatum.streams ADD COLUMN retained_from bigint, ADD COLUMN broker_id uuid REFERENCES relatum.brokers;

ALTER TABLE relatum.keys
  ADD COLUMN names_key_id smallint REFERENCES relatum.keys,
  ADD COLUMN masked boolean NOT NULL DEFAULT false;

-- Existing moves get 0, which all publishers have passed; new moves must set it.
ALTER TABLE relatum.context_moves
  ADD COLUMN generation bigint NOT NULL DEFAULT '0',
  ADD CONSTRAINT context_moves_waited CHECK (state = 'fencing' OR fence_epoch > 0);
ALTER TABLE relatum.context_moves ALTER COLUMN generation DROP DEFAULT;

-- No statement uses this index.
DROP INDEX relatum.group_states_idle;

-- ------------------------------------------------------------------------ the existing table becomes part 0, unchanged
-- The constraint allows ATTACH without reading rows. The indexes belong to the part only, since the indexes of a
-- partitioned table cannot be rebuilt part by part. This comes last, since lookups wait until the transaction ends.

ALTER TABLE relatum.relationships RENAME TO relationships_0;
ALTER INDEX relatum.relationships_lookup RENAME TO relationships_0_lookup;
ALTER INDEX relatum.relationships_offsets RENAME TO relationships_0_offsets;
CREATE TABLE relatum.relationships (LIKE relatum.relationships_0 INCLUDING DEFAULTS) PARTITION BY RANGE (part);
ALTER TABLE relatum.relationships ATTACH PARTITION relatum.relationships_0 FOR VALUES FROM (0) TO (1);
ALTER TABLE relatum.relationships_0 DROP CONSTRAINT relationships_part;

CREATE OR REPLACE VIEW relatum.relations AS
SELECT k.name AS key, r.value, s.vhost, s.name AS stream, r.stream_offset,
       timestamptz 'epoch' + r.time_us * interval '1 microsecond' AS time
FROM relatum.relationships r
JOIN relatum.streams s ON s.stream_id = r.stream_id AND s.replaced_at IS NULL
JOIN relatum.keys k ON k.key_id = r.key_id AND k.removed_at IS NULL;

-- The parent table is new. Who may use the old table may use it, and the tables about parts, too.
SELECT relatum.copy_privileges('relatum.relationships_0', ('relatum.' || name)::regclass)
FROM unnest(ARRAY['relationships', 'table_parts', 'part_streams', 'part_keys']) AS name;

INSERT INTO relatum.table_parts (part, opened_at) VALUES (0, now());
SELECT relatum.make_part();
UPDATE relatum.table_parts SET opened_at = now();
