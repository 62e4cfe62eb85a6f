-- The schema `relatum` of a new database. What is changed here is changed by a revision, too, for databases that are
-- there; tests/migration/test_migrations.py holds the two together.
--
-- Most tables are derived from the streams, which are the truth: they can be dropped and rebuilt (`relatum backfill`).
-- Primary data, which nobody can rebuild: expectations and taps, and the tables of group consumers, collectors,
-- placements and serial consumers.
--
-- Columns in tables of many rows are ordered widest first: eight-byte columns need no padding so. A fillfactor below
-- 100 leaves room on each page for rows that are updated all the time: the update stays out of the indexes.

-- ------------------------------------------------------------------------------------- streams and their coverage

-- Those whose streams are recorded, each virtual host by an id of its own. See docs/adr/0043.
CREATE TABLE relatum.brokers (
  broker_id uuid PRIMARY KEY,
  -- For people: as it was when one of its streams was first recorded.
  cluster_name text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now()
);

-- One row for each generation of a stream. A stream that is deleted and declared again starts at offset 0 again; it
-- gets a new row, so that no row of the old one can answer for the new one.
CREATE TABLE relatum.streams (
  stream_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  name text NOT NULL,
  super_stream text,
  generation integer NOT NULL DEFAULT 1,
  state text NOT NULL DEFAULT 'recording',
  record_time boolean NOT NULL DEFAULT true,
  first_offset bigint,
  created_at timestamptz NOT NULL DEFAULT now(),
  replaced_at timestamptz,
  -- A row of recorder_members.
  lease_holder text,
  -- Of recorders and lookups of release 0.4; unused since, and goes with the release after 0.5.
  lease_expires_at timestamptz,
  -- Rows of offsets before it are of messages that retention has dropped.
  retained_from bigint,
  -- NULL where nobody could tell yet.
  broker_id uuid REFERENCES relatum.brokers
);
CREATE UNIQUE INDEX streams_current ON relatum.streams (vhost, name) WHERE replaced_at IS NULL;
CREATE INDEX streams_super_stream ON relatum.streams (vhost, super_stream) WHERE replaced_at IS NULL;

-- The recorders that are up, each with a lease: what names one of them in `streams` is held by it.
CREATE TABLE relatum.recorder_members (
  lease_expires_at timestamptz NOT NULL,
  holder text NOT NULL,
  -- Recorders of one name share their streams.
  name text NOT NULL,
  CONSTRAINT recorder_members_holder PRIMARY KEY (holder, name)
) WITH (fillfactor = 50);
CREATE INDEX recorder_members_name ON relatum.recorder_members (name);

-- The key definitions in force, and those removed.
CREATE TABLE relatum.keys (
  key_id smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text COLLATE "C" NOT NULL,
  sources text[] NOT NULL,
  type text NOT NULL,
  since timestamptz NOT NULL DEFAULT now(),
  removed_at timestamptz,
  -- The key whose messages values of this one name.
  names_key_id smallint REFERENCES relatum.keys,
  -- Users who may see messages, but not the values of this key, are shown digests of them.
  masked boolean NOT NULL DEFAULT false,
  CONSTRAINT keys_type CHECK (type IN ('text', 'integer', 'timestamp'))
);
CREATE UNIQUE INDEX keys_in_force ON relatum.keys (name) WHERE removed_at IS NULL;

-- The secret that digests of masked keys' values are made with, in one row. See docs/adr/0030.
CREATE TABLE relatum.masking (
  is_only boolean PRIMARY KEY DEFAULT true,
  secret bytea NOT NULL,
  CONSTRAINT masking_is_only CHECK (is_only)
);
-- 244 random bits.
INSERT INTO relatum.masking (secret) SELECT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());

-- The offset ranges of a stream that are recorded, each with the keys it holds; and holes that retention tore.
CREATE TABLE relatum.coverage (
  coverage_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  stream_id integer NOT NULL REFERENCES relatum.streams,
  from_offset bigint NOT NULL,
  to_offset bigint NOT NULL,
  key_ids smallint[] NOT NULL,
  with_time boolean NOT NULL,
  kind text NOT NULL DEFAULT 'recorded',
  is_tail boolean NOT NULL DEFAULT false,
  -- The last message of the range: how the stream is known again.
  last_offset bigint,
  last_fingerprint bigint,
  last_chunk_ms bigint,
  recorded_at timestamptz NOT NULL DEFAULT now(),
  -- Recorded by release 0.4 over AMQP 0.9.1: holds what it found, but proves nothing absent. See docs/adr/0004.
  over_amqp boolean NOT NULL DEFAULT false,
  CONSTRAINT coverage_range CHECK (from_offset <= to_offset),
  CONSTRAINT coverage_kind CHECK (kind IN ('recorded', 'hole'))
) WITH (fillfactor = 50);
CREATE INDEX coverage_stream ON relatum.coverage (stream_id, from_offset);
-- One tail a stream: two recorders that start together cannot both make one.
CREATE UNIQUE INDEX coverage_tail ON relatum.coverage (stream_id) WHERE is_tail;

-- -------------------------------------------------------------------------------------------- rows and their times

-- One row for each value of each message, in parts, each a table `relationships_<part>` with two indexes of its own,
-- which `make_part` in functions.sql makes. See docs/adr/0023.
--
-- `…_lookup` answers every lookup by key. `…_offsets` (BRIN) serves pruning and verifying: rows arrive in the order of
-- offsets, so ranges of pages are enough, at 0.01 byte a row. A row of a short value takes 56 bytes.
CREATE TABLE relatum.relationships (
  stream_offset bigint NOT NULL,
  time_us bigint,
  stream_id integer NOT NULL,
  key_id smallint NOT NULL,
  value text COLLATE "C" NOT NULL,
  -- Rows are written into the open part itself, where its number is the default.
  part integer NOT NULL DEFAULT 0
) PARTITION BY RANGE (part);

-- The rows that release 0.4 wrote, and still writes while it runs beside this one: its tables had no parts.
CREATE TABLE relatum.relationships_0 PARTITION OF relatum.relationships FOR VALUES FROM (0) TO (1);
CREATE INDEX relationships_0_lookup ON relatum.relationships_0 (key_id, value, stream_id, time_us, stream_offset);
CREATE INDEX relationships_0_offsets ON relatum.relationships_0 USING brin (stream_id, stream_offset)
  WITH (pages_per_range = 32);

-- The parts: made ahead of time, opened for new rows, closed, made compact.
CREATE TABLE relatum.table_parts (
  part integer PRIMARY KEY,
  made_at timestamptz NOT NULL DEFAULT now(),
  opened_at timestamptz,
  closed_at timestamptz,
  compact_at timestamptz,
  -- Few of its rows are retained: a day later they are moved, and another day later it is dropped.
  leaving_at timestamptz,
  emptied_at timestamptz
) WITH (fillfactor = 50);

-- Which offsets of which streams a closed part holds rows of.
CREATE TABLE relatum.part_streams (
  first_offset bigint NOT NULL,
  last_offset bigint NOT NULL,
  row_count bigint NOT NULL,
  part integer NOT NULL,
  stream_id integer NOT NULL,
  CONSTRAINT part_streams_place PRIMARY KEY (part, stream_id)
);
CREATE INDEX part_streams_stream ON relatum.part_streams (stream_id, part);

-- Between which values of a key the rows of a closed part are.
CREATE TABLE relatum.part_keys (
  part integer NOT NULL,
  key_id smallint NOT NULL,
  low text COLLATE "C" NOT NULL,
  high text COLLATE "C" NOT NULL,
  CONSTRAINT part_keys_place PRIMARY KEY (key_id, part)
);

INSERT INTO relatum.table_parts (part, opened_at) VALUES (0, now());
SELECT relatum.make_part();
UPDATE relatum.table_parts SET opened_at = now();

-- The rows for people and their queries: docs/sql.md.
CREATE VIEW relatum.relations AS
SELECT k.name AS key, r.value, s.vhost, s.name AS stream, r.stream_offset,
       timestamptz 'epoch' + r.time_us * interval '1 microsecond' AS time
FROM relatum.relationships r
JOIN relatum.streams s ON s.stream_id = r.stream_id AND s.replaced_at IS NULL
JOIN relatum.keys k ON k.key_id = r.key_id AND k.removed_at IS NULL;

-- The sparse index of times, one row for up to 128 messages. See docs/adr/0003.
CREATE TABLE relatum.time_blocks (
  min_us bigint NOT NULL,
  max_us bigint NOT NULL,
  first_offset bigint NOT NULL,
  last_offset bigint NOT NULL,
  stream_id integer NOT NULL,
  width_class smallint NOT NULL
);
CREATE INDEX time_blocks_lookup ON relatum.time_blocks (stream_id, width_class, min_us);
CREATE INDEX time_blocks_offsets ON relatum.time_blocks (stream_id, first_offset);

-- ---------------------------------------------------------------------------------------------- books of recorders

-- What some recorded offsets held, to find how far back a stream that lost its tail still agrees.
CREATE TABLE relatum.checkpoints (
  stream_id integer NOT NULL,
  last_offset bigint NOT NULL,
  fingerprint bigint NOT NULL,
  chunk_ms bigint
);
CREATE INDEX checkpoints_lookup ON relatum.checkpoints (stream_id, last_offset);

-- Offsets of the messages whose publishers wait for them; short-lived.
CREATE TABLE relatum.receipts (
  message_id text COLLATE "C" NOT NULL,
  stream_id integer NOT NULL,
  stream_offset bigint NOT NULL,
  recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX receipts_lookup ON relatum.receipts (message_id);
CREATE INDEX receipts_age ON relatum.receipts (recorded_at);

-- How many values were not recorded, by key and reason.
CREATE TABLE relatum.skips (
  stream_id integer NOT NULL,
  key_id smallint NOT NULL,
  reason text NOT NULL,
  count bigint NOT NULL,
  CONSTRAINT skips_counter UNIQUE (stream_id, key_id, reason)
);

-- What happened to a stream: replaced, tail lost, hole, missing.
CREATE TABLE relatum.events (
  event_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  stream_id integer NOT NULL,
  at timestamptz NOT NULL DEFAULT now(),
  kind text NOT NULL,
  from_offset bigint,
  to_offset bigint,
  detail text NOT NULL DEFAULT ''
);
CREATE INDEX events_stream ON relatum.events (stream_id, event_id);

-- Tokens of steps whose writer does not know their outcome for sure yet, and of those found to have been rolled back.
-- A writer removes its rows as it goes on; what a dead one leaves is removed by age. See docs/adr/0013.
CREATE TABLE relatum.settlements (
  -- Ascending with time, so that the index is written at its end.
  token uuid PRIMARY KEY,
  written_at timestamptz NOT NULL DEFAULT now(),
  -- Written by one who settles: the step was rolled back, and cannot come through any more.
  is_void boolean NOT NULL DEFAULT false
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000);

-- ---------------------------------------------------------------------------------------------------- definitions

-- Each message of `of_stream` is followed, in `follows`, by one with the same value of a key; both are streams or
-- super streams.
CREATE TABLE relatum.expectations (
  expectation_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  name text COLLATE "C" NOT NULL,
  of_stream text NOT NULL,
  -- By its name: a key that is defined anew is meant as well.
  by_key text COLLATE "C" NOT NULL,
  follows text NOT NULL,
  within_s double precision NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  -- By how much clocks may differ.
  grace_s double precision NOT NULL DEFAULT '1',
  CONSTRAINT expectations_name UNIQUE (vhost, name),
  CONSTRAINT expectations_within CHECK (within_s > 0),
  CONSTRAINT expectations_grace CHECK (grace_s >= 0)
);

-- Which exchanges are tapped into which streams: a broker shows bindings to administrators only.
CREATE TABLE relatum.taps (
  tap_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  exchange text NOT NULL,
  kind text,
  stream text NOT NULL,
  binding_key text NOT NULL,
  -- Of the binding, as JSON with sorted names: a binding is removed by the very arguments it was made with.
  arguments text NOT NULL DEFAULT '{}',
  -- Whether the stream was declared for a tap: only such a stream is deleted with it.
  made_stream boolean NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT taps_binding UNIQUE (vhost, exchange, stream, binding_key, arguments)
);

-- ------------------------------------------------------------------- durable group consumers. See docs/groups.md

-- One row for each consumer name, with what its members must agree on.
CREATE TABLE relatum.group_consumers (
  consumer_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  name text NOT NULL,
  -- What was asked for by name, sorted; NULL for every recorded stream.
  streams text[],
  ordering text NOT NULL,
  -- Where the first member began: groups whose first message came before are none of this consumer's.
  start_offset bigint,
  start_us bigint,
  -- Which generation the offset is of; a stream that is declared again is read from its beginning.
  start_stream_id integer,
  created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT group_consumers_name UNIQUE (vhost, name),
  CONSTRAINT group_consumers_ordering CHECK (ordering IN ('logical', 'physical'))
);

-- The offset ranges of a stream whose group rows a consumer knows. A range, and not one position: what is back-filled
-- later is behind the position and must be seen, too.
CREATE TABLE relatum.group_scans (
  from_offset bigint NOT NULL,
  to_offset bigint NOT NULL,
  consumer_id integer NOT NULL REFERENCES relatum.group_consumers ON DELETE CASCADE,
  stream_id integer NOT NULL,
  PRIMARY KEY (consumer_id, stream_id, from_offset),
  CONSTRAINT group_scans_range CHECK (from_offset <= to_offset)
) WITH (fillfactor = 50);

-- One row for each group a consumer has seen: open (not complete), ready, claimed (a member has it), done
-- (acknowledged) or dead (given up). Done rows stay as long as the streams hold a message of the group, so that a late
-- duplicate does not open it again.
CREATE TABLE relatum.group_states (
  -- The order groups are given in: an offset where the consumer reads one stream, else a time in microseconds.
  rank bigint NOT NULL,
  -- The offset of the message with the number 1; until that is seen, of the first message that was.
  first_offset bigint NOT NULL,
  opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  -- When a message of it was last seen.
  touched_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  -- Of consumers of release 0.4; unused since, and goes with the release after 0.5.
  told_at timestamptz,
  lease_expires_at timestamptz,
  done_at timestamptz,
  consumer_id integer NOT NULL REFERENCES relatum.group_consumers ON DELETE CASCADE,
  stream_id integer NOT NULL,
  -- How often a member has claimed it: with the holder, what an acknowledgement must match.
  deliveries integer NOT NULL DEFAULT 0,
  -- How often it was handed to the caller, by members whose consumer limits that; not every claim is.
  given integer NOT NULL DEFAULT 0,
  state text NOT NULL,
  holder text,
  group_id text COLLATE "C" NOT NULL,
  PRIMARY KEY (consumer_id, group_id),
  CONSTRAINT group_states_state CHECK (state IN ('open', 'ready', 'claimed', 'done', 'dead'))
);
-- What is still to do: finding the next group costs the same however many are done.
CREATE INDEX group_states_next ON relatum.group_states (consumer_id, rank, stream_id, first_offset)
  WHERE state IN ('ready', 'claimed');

-- --------------------------------------------------------------------- message collectors. See docs/collector.md
-- They hold ids and states, no bodies: those are in the streams.

-- One row for each name.
CREATE TABLE relatum.collectors (
  collector_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  name text COLLATE "C" NOT NULL,
  -- Seconds a finished message is remembered; NULL for ever.
  keep_s integer,
  created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT collectors_name UNIQUE (vhost, name)
);

-- The processes of a collector, each with a lease. A member whose lease ran out is dead to the others, whatever it
-- believes itself: they take its messages over, and its results count no more.
CREATE TABLE relatum.collector_members (
  member_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  joined_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  lease_expires_at timestamptz NOT NULL,
  collector_id integer NOT NULL REFERENCES relatum.collectors ON DELETE CASCADE,
  lease_s double precision NOT NULL,
  holder text NOT NULL,
  types text[] NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX collector_members_collector ON relatum.collector_members (collector_id, lease_expires_at);

-- One row for each generation of a stream a collector has taken messages from, with the position of the member that
-- follows it. What is below the position is collected, or was passed over.
CREATE TABLE relatum.collector_sources (
  source_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  collector_id integer NOT NULL REFERENCES relatum.collectors ON DELETE CASCADE,
  stream text COLLATE "C" NOT NULL,
  -- The next offset to be read; NULL where nobody has followed the stream yet.
  position bigint,
  -- The last message read: how the stream is known again.
  last_offset bigint,
  last_fingerprint bigint,
  last_chunk_ms bigint,
  -- Messages below the position that were not collected: of types without an executor.
  passed_over bigint NOT NULL DEFAULT '0',
  -- Of collectors of release 0.4; unused since, and goes with the release after 0.5.
  refused bigint NOT NULL DEFAULT '0',
  member_id bigint,
  moved_at timestamptz,
  replaced_at timestamptz
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX collector_sources_current ON relatum.collector_sources (collector_id, stream)
  WHERE replaced_at IS NULL;

-- One row for each message, named by its source and offset. No foreign keys: each would cost more than writing the row
-- does. Each row is written three times, soon after one another: the fillfactor keeps the second in place.
CREATE TABLE relatum.collected_messages (
  stream_offset bigint NOT NULL,
  member_id bigint,
  bulk_id bigint,
  collected_at timestamptz NOT NULL DEFAULT now(),
  forwarded_at timestamptz,
  finished_at timestamptz,
  next_attempt_at timestamptz,
  source_id integer NOT NULL,
  size integer NOT NULL,
  attempts smallint NOT NULL DEFAULT '0',
  state text NOT NULL DEFAULT 'collected',
  message_id text COLLATE "C" NOT NULL,
  type text COLLATE "C" NOT NULL,
  reason text,
  CONSTRAINT collected_messages_place PRIMARY KEY (source_id, stream_offset),
  CONSTRAINT collected_messages_state CHECK (state IN ('collected', 'forwarded', 'succeeded', 'failed', 'dead')),
  -- Final states have a time and the others none: the indexes below may speak of the time alone.
  CONSTRAINT collected_messages_finished_at
    CHECK ((finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'dead'))),
  CONSTRAINT collected_messages_reason CHECK (finished_at IS NULL OR (reason IS NOT NULL) = (state <> 'succeeded'))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX collected_messages_id ON relatum.collected_messages (message_id);
-- What a member has still to do; from collected to forwarded nothing moves in any index.
CREATE INDEX collected_messages_unfinished ON relatum.collected_messages (member_id) WHERE finished_at IS NULL;
CREATE INDEX collected_messages_finished ON relatum.collected_messages (source_id, finished_at)
  WHERE finished_at IS NOT NULL;
-- Those that failed or are dead: found at once among many that succeeded. By `state`, rows would move in it as well.
CREATE INDEX collected_messages_unsuccessful ON relatum.collected_messages (source_id, finished_at, stream_offset)
  WHERE finished_at IS NOT NULL AND reason IS NOT NULL;

-- ------------------------------------------------ contexts and affinity sets. See docs/contexts.md, docs/affinity.md
-- Who changes several kinds of rows locks them in this order, or two of them wait for each other for ever: placements
-- by name, the row of super_streams, partitions by their id.
--
-- The streams hold fences and markers, but not who was placed where before the first of them.

-- All epochs come from here: what is placed later has a higher one, whatever its name was used for before. CACHE 1 keeps
-- none back for a session: with values kept back, later ones could be lower.
CREATE SEQUENCE relatum.placement_epochs AS bigint;

-- One row for each super stream whose messages are placed.
CREATE TABLE relatum.super_streams (
  super_stream_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  name text COLLATE "C" NOT NULL,
  -- The header that names the sets; all who publish to or consume from the super stream agree on it.
  header text NOT NULL,
  -- Raised by each change that makes a cached placement wrong.
  generation bigint NOT NULL DEFAULT '1',
  -- Changes up to this generation are not all remembered.
  floor bigint NOT NULL DEFAULT '0',
  created_at timestamptz NOT NULL DEFAULT now(),
  -- Seconds without use after which sets are closed, for all routers alike; NULL: never.
  idle_s double precision,
  CONSTRAINT super_streams_name UNIQUE (vhost, name)
) WITH (fillfactor = 50);

-- Its partitions. One that is retired takes no new placements.
CREATE TABLE relatum.super_stream_partitions (
  partition_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  super_stream_id integer NOT NULL REFERENCES relatum.super_streams ON DELETE CASCADE,
  stream text COLLATE "C" NOT NULL,
  binding_key text NOT NULL,
  place integer NOT NULL,
  state text NOT NULL DEFAULT 'active',
  weight double precision NOT NULL DEFAULT '1',
  -- Placements in this partition that are not released.
  open_sets bigint NOT NULL DEFAULT '0',
  CONSTRAINT super_stream_partitions_stream UNIQUE (super_stream_id, stream),
  CONSTRAINT super_stream_partitions_state CHECK (state IN ('active', 'retired')),
  CONSTRAINT super_stream_partitions_weight CHECK (weight >= 0)
) WITH (fillfactor = 50);

-- One row for each serialization context or affinity set. No foreign keys: each would lock the row of the super stream,
-- which all publishers share. A set of a few messages is placed, released and forgotten within the hour.
CREATE TABLE relatum.placements (
  placement_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  epoch bigint NOT NULL,
  -- The epoch it was opened with, which moves do not change: whether a release means this opening or one before.
  first_epoch bigint NOT NULL,
  -- The generation of the last change that made a cached copy wrong; 0 for none.
  generation bigint NOT NULL DEFAULT '0',
  move_id bigint,
  opened_at timestamptz NOT NULL DEFAULT now(),
  used_at timestamptz NOT NULL DEFAULT now(),
  released_at timestamptz,
  super_stream_id integer NOT NULL,
  partition_id integer NOT NULL,
  name text COLLATE "C" NOT NULL,
  state text NOT NULL DEFAULT 'open',
  CONSTRAINT placements_name UNIQUE (super_stream_id, name),
  CONSTRAINT placements_state CHECK (state IN ('open', 'moving', 'released')),
  CONSTRAINT placements_move CHECK ((state = 'moving') = (move_id IS NOT NULL)),
  CONSTRAINT placements_released CHECK ((state = 'released') = (released_at IS NOT NULL))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX placements_changes ON relatum.placements (super_stream_id, generation);
CREATE INDEX placements_partition ON relatum.placements (partition_id) WHERE state <> 'released';
CREATE INDEX placements_idle ON relatum.placements (super_stream_id, used_at) WHERE state = 'open';
CREATE INDEX placements_over ON relatum.placements (super_stream_id, released_at) WHERE state = 'released';

-- One row for each move of contexts from one partition to another, with how far it is.
CREATE TABLE relatum.context_moves (
  move_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  super_stream_id integer NOT NULL REFERENCES relatum.super_streams ON DELETE CASCADE,
  source_id integer NOT NULL,
  -- The source itself where the move is aborted.
  target_id integer NOT NULL,
  state text NOT NULL DEFAULT 'fencing',
  aborting boolean NOT NULL DEFAULT false,
  attempt integer NOT NULL DEFAULT 1,
  contexts integer NOT NULL,
  -- 0 while it waits before its fence (docs/adr/0051): one that is published then says nothing, and is not stored.
  fence_epoch bigint NOT NULL,
  -- The contexts' epoch when it has ended: that of the fence, or a later one where it was aborted.
  epoch bigint NOT NULL,
  -- Offsets at and below the first fence and the first marker that can be.
  scan_from bigint NOT NULL,
  target_scan_from bigint NOT NULL,
  fence_offset bigint,
  marker_offset bigint,
  -- Who goes on with it; only to be shown.
  holder text,
  lease_expires_at timestamptz,
  started_at timestamptz NOT NULL DEFAULT now(),
  fenced_at timestamptz,
  ended_at timestamptz,
  reason text,
  -- The super stream's when its contexts were stopped. No default: movers of release 0.4, which do not wait before the
  -- fence, are refused.
  generation bigint NOT NULL,
  CONSTRAINT context_moves_state CHECK (state IN ('fencing', 'fenced', 'switched', 'aborted')),
  CONSTRAINT context_moves_ended_at CHECK ((ended_at IS NOT NULL) = (state IN ('switched', 'aborted'))),
  CONSTRAINT context_moves_fence CHECK (state = 'fencing' OR fence_offset IS NOT NULL),
  CONSTRAINT context_moves_waited CHECK (state = 'fencing' OR fence_epoch > 0),
  CONSTRAINT context_moves_marker CHECK (ended_at IS NULL OR marker_offset IS NOT NULL)
);
CREATE INDEX context_moves_super_stream ON relatum.context_moves (super_stream_id, move_id);
CREATE INDEX context_moves_open ON relatum.context_moves (super_stream_id) WHERE ended_at IS NULL;
CREATE INDEX context_moves_source ON relatum.context_moves (source_id, fence_offset);
CREATE INDEX context_moves_target ON relatum.context_moves (target_id, marker_offset);

-- The contexts of each move, each with the epoch it had before.
CREATE TABLE relatum.moved_contexts (
  move_id bigint NOT NULL REFERENCES relatum.context_moves ON DELETE CASCADE,
  from_epoch bigint NOT NULL,
  name text COLLATE "C" NOT NULL,
  CONSTRAINT moved_contexts_place PRIMARY KEY (move_id, name)
);
CREATE INDEX moved_contexts_name ON relatum.moved_contexts (name, move_id);

-- One row for each consumer name of a super stream.
CREATE TABLE relatum.serial_consumers (
  consumer_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  super_stream_id integer NOT NULL REFERENCES relatum.super_streams ON DELETE CASCADE,
  name text COLLATE "C" NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT serial_consumers_name UNIQUE (super_stream_id, name)
);

-- Its members that are up, each with a lease.
CREATE TABLE relatum.serial_members (
  lease_expires_at timestamptz NOT NULL,
  consumer_id integer NOT NULL REFERENCES relatum.serial_consumers ON DELETE CASCADE,
  holder text NOT NULL,
  CONSTRAINT serial_members_holder PRIMARY KEY (consumer_id, holder)
) WITH (fillfactor = 50);

-- One row for each consumer and partition, also for those nobody reads yet: whether what comes before a moved context
-- was consumed is asked of the row of the partition it came from.
CREATE TABLE relatum.serial_positions (
  -- The next offset to be read: everything below is delivered, passed over, or held.
  position bigint NOT NULL,
  -- Raised by each write, which names the one it follows: two members cannot both move a position.
  version bigint NOT NULL DEFAULT '0',
  -- The last message read: how the stream is known again.
  last_offset bigint,
  last_fingerprint bigint,
  last_chunk_ms bigint,
  -- Of consumers of release 0.4; unused since, and goes with the release after 0.5.
  lease_expires_at timestamptz,
  consumer_id integer NOT NULL REFERENCES relatum.serial_consumers ON DELETE CASCADE,
  partition_id integer NOT NULL REFERENCES relatum.super_stream_partitions ON DELETE CASCADE,
  holder text,
  CONSTRAINT serial_positions_place PRIMARY KEY (consumer_id, partition_id)
) WITH (fillfactor = 50);

-- One row for each move whose contexts wait in a partition for what is before them in another.
CREATE TABLE relatum.serial_holds (
  move_id bigint NOT NULL,
  marker_offset bigint NOT NULL,
  -- Held messages before this offset have been delivered.
  cursor bigint NOT NULL,
  epoch bigint NOT NULL,
  fence_offset bigint NOT NULL,
  -- Messages that wait, as far as was read.
  held bigint NOT NULL DEFAULT '0',
  since timestamptz NOT NULL DEFAULT now(),
  consumer_id integer NOT NULL REFERENCES relatum.serial_consumers ON DELETE CASCADE,
  -- The partition they wait in, and the one that has what is before them.
  partition_id integer NOT NULL,
  source_id integer NOT NULL,
  CONSTRAINT serial_holds_place PRIMARY KEY (consumer_id, partition_id, move_id)
) WITH (fillfactor = 50);
-- Moves that somebody waits for are not forgotten.
CREATE INDEX serial_holds_move ON relatum.serial_holds (move_id);
