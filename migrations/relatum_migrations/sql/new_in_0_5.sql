-- The tables that release 0.4 lacks. Runs before schema.sql in a new database, and before 0024.sql in one of release 0.4.
-- This file no longer changes: a later release changes these tables by ALTER, in a revision and in schema.sql.

-- The brokers whose streams are recorded, with an id for each virtual host. See docs/adr/0043.
CREATE TABLE relatum.brokers (
  broker_id uuid PRIMARY KEY,
  -- For display: the cluster's name when it was last seen.
  cluster_name text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now()
);

-- The running recorders, each with a lease. A recorder holds the rows of `streams` that name it.
CREATE TABLE relatum.recorder_members (
  lease_expires_at timestamptz NOT NULL,
  holder text NOT NULL,
  -- Recorders with the same name share their streams.
  name text NOT NULL,
  CONSTRAINT recorder_members_holder PRIMARY KEY (holder, name)
) WITH (fillfactor = 50);
CREATE INDEX recorder_members_name ON relatum.recorder_members (name);

-- The secret of the digests of masked keys' values, in one row. See docs/adr/0030.
CREATE TABLE relatum.masking (
  is_only boolean PRIMARY KEY DEFAULT true,
  secret bytea NOT NULL,
  CONSTRAINT masking_is_only CHECK (is_only)
);
-- 244 random bits.
INSERT INTO relatum.masking (secret) SELECT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());

-- The parts: created ahead of time, opened for new rows, closed, made compact.
CREATE TABLE relatum.table_parts (
  part integer PRIMARY KEY,
  made_at timestamptz NOT NULL DEFAULT now(),
  opened_at timestamptz,
  closed_at timestamptz,
  compact_at timestamptz,
  -- When only few rows were still retained: they are moved a day later, and the part is dropped after another day.
  leaving_at timestamptz,
  emptied_at timestamptz
) WITH (fillfactor = 50);

-- The ranges of offsets of each stream in a closed part.
CREATE TABLE relatum.part_streams (
  first_offset bigint NOT NULL,
  last_offset bigint NOT NULL,
  row_count bigint NOT NULL,
  part integer NOT NULL,
  stream_id integer NOT NULL,
  CONSTRAINT part_streams_place PRIMARY KEY (part, stream_id)
);
CREATE INDEX part_streams_stream ON relatum.part_streams (stream_id, part);

-- The range of values of each key in a closed part.
CREATE TABLE relatum.part_keys (
  part integer NOT NULL,
  key_id smallint NOT NULL,
  low text COLLATE "C" NOT NULL,
  high text COLLATE "C" NOT NULL,
  CONSTRAINT part_keys_place PRIMARY KEY (key_id, part)
);

-- Tokens of steps whose writer does not know the outcome yet, and of steps settled as rolled back. A writer removes its
-- tokens with later steps; tokens of dead writers are removed by age. See docs/adr/0013.
CREATE TABLE relatum.settlements (
  -- Ascending with time, so that index entries are added at the end.
  token uuid PRIMARY KEY,
  written_at timestamptz NOT NULL DEFAULT now(),
  -- Set by settling: the step was rolled back, and can no longer be committed.
  is_void boolean NOT NULL DEFAULT false
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000);

-- Each message of `of_stream` must be followed, in `follows`, by a message with the same value of a key; both are
-- streams or super streams.
CREATE TABLE relatum.expectations (
  expectation_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  name text COLLATE "C" NOT NULL,
  of_stream text NOT NULL,
  -- A name, so that a key that was redefined still counts.
  by_key text COLLATE "C" NOT NULL,
  follows text NOT NULL,
  within_s double precision NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  -- Maximum difference of clocks.
  grace_s double precision NOT NULL DEFAULT '1',
  CONSTRAINT expectations_name UNIQUE (vhost, name),
  CONSTRAINT expectations_within CHECK (within_s > 0),
  CONSTRAINT expectations_grace CHECK (grace_s >= 0)
);

-- The exchanges that are tapped into streams: a broker shows bindings only to administrators.
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
