-- Second step from release 0.4: everything in schema.sql that release 0.4 lacks. The reasons are in schema.sql.
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

-- ------------------------------------------------------------------------------------------------------ new tables

CREATE TABLE relatum.brokers (
  broker_id uuid PRIMARY KEY,
  cluster_name text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE relatum.recorder_members (
  lease_expires_at timestamptz NOT NULL,
  holder text NOT NULL,
  name text NOT NULL,
  CONSTRAINT recorder_members_holder PRIMARY KEY (holder, name)
) WITH (fillfactor = 50);
CREATE INDEX recorder_members_name ON relatum.recorder_members (name);

CREATE TABLE relatum.masking (
  is_only boolean PRIMARY KEY DEFAULT true,
  secret bytea NOT NULL,
  CONSTRAINT masking_is_only CHECK (is_only)
);
INSERT INTO relatum.masking (secret) SELECT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());

CREATE TABLE relatum.settlements (
  token uuid PRIMARY KEY,
  written_at timestamptz NOT NULL DEFAULT now(),
  is_void boolean NOT NULL DEFAULT false
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000);

CREATE TABLE relatum.expectations (
  expectation_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  name text COLLATE "C" NOT NULL,
  of_stream text NOT NULL,
  by_key text COLLATE "C" NOT NULL,
  follows text NOT NULL,
  within_s double precision NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  grace_s double precision NOT NULL DEFAULT '1',
  CONSTRAINT expectations_name UNIQUE (vhost, name),
  CONSTRAINT expectations_within CHECK (within_s > 0),
  CONSTRAINT expectations_grace CHECK (grace_s >= 0)
);

CREATE TABLE relatum.taps (
  tap_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  exchange text NOT NULL,
  kind text,
  stream text NOT NULL,
  binding_key text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT taps_binding UNIQUE (vhost, exchange, stream, binding_key)
);

CREATE TABLE relatum.table_parts (
  part integer PRIMARY KEY,
  made_at timestamptz NOT NULL DEFAULT now(),
  opened_at timestamptz,
  closed_at timestamptz,
  compact_at timestamptz,
  leaving_at timestamptz,
  emptied_at timestamptz
) WITH (fillfactor = 50);

CREATE TABLE relatum.part_streams (
  first_offset bigint NOT NULL,
  last_offset bigint NOT NULL,
  row_count bigint NOT NULL,
  part integer NOT NULL,
  stream_id integer NOT NULL,
  CONSTRAINT part_streams_place PRIMARY KEY (part, stream_id)
);
CREATE INDEX part_streams_stream ON relatum.part_streams (stream_id, part);

CREATE TABLE relatum.part_keys (
  part integer NOT NULL,
  key_id smallint NOT NULL,
  low text COLLATE "C" NOT NULL,
  high text COLLATE "C" NOT NULL,
  CONSTRAINT part_keys_place PRIMARY KEY (key_id, part)
);

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

-- The parent table is new: copy the old table's privileges to it, and grant its readers the tables about parts, which
-- lookups use. Parts get their privileges from the parent.
DO $$
DECLARE
  granted record;
BEGIN
  FOR granted IN
    SELECT each.privilege_type, CASE each.grantee WHEN 0 THEN 'PUBLIC' ELSE each.grantee::regrole::text END AS grantee
    FROM pg_class, aclexplode(relacl) AS each
    WHERE pg_class.oid = 'relatum.relationships_0'::regclass AND each.grantee <> relowner
  LOOP
    EXECUTE format('GRANT %s ON relatum.relationships TO %s', granted.privilege_type, granted.grantee);
    IF granted.privilege_type = 'SELECT' THEN
      EXECUTE format('GRANT SELECT ON relatum.table_parts, relatum.part_streams, relatum.part_keys TO %s',
                     granted.grantee);
    END IF;
  END LOOP;
END $$;

INSERT INTO relatum.table_parts (part, opened_at) VALUES (0, now());
SELECT relatum.make_part();
UPDATE relatum.table_parts SET opened_at = now();
