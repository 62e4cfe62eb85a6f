-- The schema `relatum` of a new database, beside new_in_0_5.sql. Each change here needs a revision for existing databases;
-- tests/migration/test_migrations.py checks that both give the same schema.
--
-- Most tables are derived from the streams, the source of truth: they can be dropped and rebuilt (`relatum backfill`).
-- Primary data, which cannot be rebuilt: expectations and taps, and the tables of group consumers, collectors,
-- placements and serial consumers.
--
-- Columns in tables of many rows are ordered widest first, so that eight-byte columns need no padding. A fillfactor
-- below 100 leaves room on each page for frequent updates, which then do not touch the indexes.

-- ------------------------------------------------------------------------------------- streams and their coverage

-- One row for each generation of a stream. A stream that is deleted and declared again starts at offset 0 again, and
-- gets a new row here, so that the old stream's rows do not answer lookups of the new stream.
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
  -- The `holder` in recorder_members.
  lease_holder text,
  -- Used by recorders and lookups of release 0.4 only; the release after 0.5 drops it.
  lease_expires_at timestamptz,
  -- Rows of lower offsets belong to messages that retention dropped.
  retained_from bigint,
  -- NULL if unknown.
  broker_id uuid REFERENCES relatum.brokers
);
CREATE UNIQUE INDEX streams_current ON relatum.streams (vhost, name) WHERE replaced_at IS NULL;
CREATE INDEX streams_super_stream ON relatum.streams (vhost, super_stream) WHERE replaced_at IS NULL;

-- The key definitions, in force and removed.
CREATE TABLE relatum.keys (
  key_id smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text COLLATE "C" NOT NULL,
  sources text[] NOT NULL,
  type text NOT NULL,
  since timestamptz NOT NULL DEFAULT now(),
  removed_at timestamptz,
  -- The named key: its value in a message's cause is this key's value in the message.
  names_key_id smallint REFERENCES relatum.keys,
  -- If true, the web page and the tools for agents show digests instead of values.
  masked boolean NOT NULL DEFAULT false,
  CONSTRAINT keys_type CHECK (type IN ('text', 'integer', 'timestamp'))
);
CREATE UNIQUE INDEX keys_in_force ON relatum.keys (name) WHERE removed_at IS NULL;

-- The recorded ranges of offsets, each with its keys; and holes, which retention dropped before they were recorded.
CREATE TABLE relatum.coverage (
  coverage_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  stream_id integer NOT NULL REFERENCES relatum.streams,
  from_offset bigint NOT NULL,
  to_offset bigint NOT NULL,
  key_ids smallint[] NOT NULL,
  with_time boolean NOT NULL,
  kind text NOT NULL DEFAULT 'recorded',
  is_tail boolean NOT NULL DEFAULT false,
  -- The last message of the range, which identifies the stream.
  last_offset bigint,
  last_fingerprint bigint,
  last_chunk_ms bigint,
  recorded_at timestamptz NOT NULL DEFAULT now(),
  -- Recorded by release 0.4 over AMQP 0.9.1: rows may be missing, so absence proves nothing. See docs/adr/0004.
  over_amqp boolean NOT NULL DEFAULT false,
  CONSTRAINT coverage_range CHECK (from_offset <= to_offset),
  CONSTRAINT coverage_kind CHECK (kind IN ('recorded', 'hole'))
) WITH (fillfactor = 50);
CREATE INDEX coverage_stream ON relatum.coverage (stream_id, from_offset);
-- One tail per stream: only one of two recorders that start together can create it.
CREATE UNIQUE INDEX coverage_tail ON relatum.coverage (stream_id) WHERE is_tail;

-- -------------------------------------------------------------------------------------------- rows and their times

-- One row for each value of each message, in parts. Each part is a table `relationships_<part>` with two indexes, which
-- `make_part` in functions.sql creates. See docs/adr/0023.
--
-- `…_lookup` answers every lookup by key. `…_offsets` (BRIN) is for pruning and verifying: rows arrive in the order of
-- offsets, so ranges of pages are enough, at 0.01 byte a row. A row with a short value takes 56 bytes.
CREATE TABLE relatum.relationships (
  stream_offset bigint NOT NULL,
  time_us bigint,
  stream_id integer NOT NULL,
  key_id smallint NOT NULL,
  value text COLLATE "C" NOT NULL,
  -- Rows are written into the open part directly, whose number is the column's default there.
  part integer NOT NULL DEFAULT 0
) PARTITION BY RANGE (part);

-- The rows of release 0.4, whose table had no parts; it still writes here while it runs beside this release.
CREATE TABLE relatum.relationships_0 PARTITION OF relatum.relationships FOR VALUES FROM (0) TO (1);
CREATE INDEX relationships_0_lookup ON relatum.relationships_0 (key_id, value, stream_id, time_us, stream_offset);
CREATE INDEX relationships_0_offsets ON relatum.relationships_0 USING brin (stream_id, stream_offset)
  WITH (pages_per_range = 32);

INSERT INTO relatum.table_parts (part, opened_at) VALUES (0, now());
SELECT relatum.make_part();
UPDATE relatum.table_parts SET opened_at = now();

-- A view for users' own queries: docs/sql.md.
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

-- ------------------------------------------------------------------------------------ internal data of recorders

-- Fingerprints of some recorded messages, to find the last of them that a stream still has after it lost its tail.
CREATE TABLE relatum.checkpoints (
  stream_id integer NOT NULL,
  last_offset bigint NOT NULL,
  fingerprint bigint NOT NULL,
  chunk_ms bigint
);
CREATE INDEX checkpoints_lookup ON relatum.checkpoints (stream_id, last_offset);

-- Offsets of messages for which publishers wait; short-lived.
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

-- Events of a stream: replaced, tail_lost, hole, missing, unreadable.
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

-- ------------------------------------------------------------------- durable group consumers. See docs/groups.md

-- One row for each consumer name, with the options that its members must share.
CREATE TABLE relatum.group_consumers (
  consumer_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  name text NOT NULL,
  -- The names of the consumer's streams, sorted; NULL for all recorded streams.
  streams text[],
  ordering text NOT NULL,
  -- The start of the first member: groups with an earlier first message do not belong to this consumer.
  start_offset bigint,
  start_us bigint,
  -- The generation of the stream with that offset; a stream that is declared again is read from its beginning.
  start_stream_id integer,
  created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT group_consumers_name UNIQUE (vhost, name),
  CONSTRAINT group_consumers_ordering CHECK (ordering IN ('logical', 'physical'))
);

-- The ranges of offsets whose group rows a consumer has seen. Ranges, not one position, since offsets before the
-- position may be back-filled later, and must be seen, too.
CREATE TABLE relatum.group_scans (
  from_offset bigint NOT NULL,
  to_offset bigint NOT NULL,
  consumer_id integer NOT NULL REFERENCES relatum.group_consumers ON DELETE CASCADE,
  stream_id integer NOT NULL,
  PRIMARY KEY (consumer_id, stream_id, from_offset),
  CONSTRAINT group_scans_range CHECK (from_offset <= to_offset)
) WITH (fillfactor = 50);

-- One row for each group that a consumer has seen: open (incomplete), ready, claimed (by a member), done (acknowledged)
-- or dead (given up). Done rows are kept while a message of the group is retained, so that a late duplicate does not
-- open it again.
CREATE TABLE relatum.group_states (
  -- The order of delivery: an offset if the consumer reads one stream, else a time in microseconds.
  rank bigint NOT NULL,
  -- The offset of the message with number 1; until it is seen, of the first message seen.
  first_offset bigint NOT NULL,
  opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  -- When a message of the group was last seen.
  touched_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  -- Used by consumers of release 0.4 only; the release after 0.5 drops it.
  told_at timestamptz,
  lease_expires_at timestamptz,
  done_at timestamptz,
  consumer_id integer NOT NULL REFERENCES relatum.group_consumers ON DELETE CASCADE,
  stream_id integer NOT NULL,
  -- The number of claims; an acknowledgement must match it and the holder.
  deliveries integer NOT NULL DEFAULT 0,
  -- The number of deliveries to callers, counted if the consumer limits them; not every claim is delivered.
  given integer NOT NULL DEFAULT 0,
  state text NOT NULL,
  holder text,
  group_id text COLLATE "C" NOT NULL,
  PRIMARY KEY (consumer_id, group_id),
  CONSTRAINT group_states_state CHECK (state IN ('open', 'ready', 'claimed', 'done', 'dead'))
);
-- Unfinished groups only: finding the next group costs the same for any number of done groups.
CREATE INDEX group_states_next ON relatum.group_states (consumer_id, rank, stream_id, first_offset)
  WHERE state IN ('ready', 'claimed');

-- --------------------------------------------------------------------- message collectors. See docs/collector.md
-- These tables hold ids and states; the bodies are in the streams.

-- One row for each collector's name.
CREATE TABLE relatum.collectors (
  collector_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  name text COLLATE "C" NOT NULL,
  -- Seconds for which a finished message is kept; NULL: forever.
  keep_s integer,
  created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT collectors_name UNIQUE (vhost, name)
);

-- The processes of a collector, each with a lease. A member with an expired lease counts as dead, even if it runs:
-- other members take its messages over, and its results are refused.
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

-- One row for each generation of a stream that a collector reads, with the position of the member that follows it.
-- Messages before the position were collected or passed over.
CREATE TABLE relatum.collector_sources (
  source_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  collector_id integer NOT NULL REFERENCES relatum.collectors ON DELETE CASCADE,
  stream text COLLATE "C" NOT NULL,
  -- The next offset to read; NULL if no member has followed the stream yet.
  position bigint,
  -- The last message read, which identifies the stream.
  last_offset bigint,
  last_fingerprint bigint,
  last_chunk_ms bigint,
  -- Messages before the position that were not collected, since their types have no executor.
  passed_over bigint NOT NULL DEFAULT '0',
  -- Used by collectors of release 0.4 only; the release after 0.5 drops it.
  refused bigint NOT NULL DEFAULT '0',
  member_id bigint,
  moved_at timestamptz,
  replaced_at timestamptz
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX collector_sources_current ON relatum.collector_sources (collector_id, stream)
  WHERE replaced_at IS NULL;

-- One row for each message, identified by its source and offset. No foreign keys: each would cost more than writing the
-- row. Each row is written three times in quick succession; the fillfactor keeps the second version on its page.
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
  -- Final states have a time and others do not, so the indexes below need only the time.
  CONSTRAINT collected_messages_finished_at
    CHECK ((finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'dead'))),
  CONSTRAINT collected_messages_reason CHECK (finished_at IS NULL OR (reason IS NOT NULL) = (state <> 'succeeded'))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX collected_messages_id ON relatum.collected_messages (message_id);
-- A member's unfinished messages; from collected to forwarded, no index changes.
CREATE INDEX collected_messages_unfinished ON relatum.collected_messages (member_id) WHERE finished_at IS NULL;
CREATE INDEX collected_messages_finished ON relatum.collected_messages (source_id, finished_at)
  WHERE finished_at IS NOT NULL;
-- Failed and dead messages, among many that succeeded. With `state`, rows would also move in the index.
CREATE INDEX collected_messages_unsuccessful ON relatum.collected_messages (source_id, finished_at, stream_offset)
  WHERE finished_at IS NOT NULL AND reason IS NOT NULL;

-- ------------------------------------------------ contexts and affinity sets. See docs/contexts.md, docs/affinity.md
-- Transactions that change several kinds of rows lock them in this order, to avoid deadlocks: placements by name, the
-- row of super_streams, partitions by id.
--
-- The streams hold fences and markers, but not the placements before the first fence.

-- All epochs come from here: a later placement has a higher epoch, even if its name was used before. CACHE 1 (the
-- default), since values cached by a session could be handed out after higher ones.
CREATE SEQUENCE relatum.placement_epochs AS bigint;

-- One row for each super stream whose messages are placed.
CREATE TABLE relatum.super_streams (
  super_stream_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  vhost text NOT NULL DEFAULT '/',
  name text COLLATE "C" NOT NULL,
  -- The header that names the sets; all publishers and consumers of the super stream share it.
  header text NOT NULL,
  -- Incremented by each change that invalidates cached placements.
  generation bigint NOT NULL DEFAULT '1',
  -- Changes up to this generation may have been deleted.
  floor bigint NOT NULL DEFAULT '0',
  created_at timestamptz NOT NULL DEFAULT now(),
  -- Seconds without use after which sets are closed, for all routers; NULL: never.
  idle_s double precision,
  CONSTRAINT super_streams_name UNIQUE (vhost, name)
) WITH (fillfactor = 50);

-- The partitions of super streams. A retired partition takes no new placements.
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
  -- The epoch of its opening, which moves do not change: releases with earlier epochs are ignored.
  first_epoch bigint NOT NULL,
  -- The generation of the last change that invalidated cached copies; 0 for none.
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

-- One row for each move of contexts from one partition to another, with its state.
CREATE TABLE relatum.context_moves (
  move_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  super_stream_id integer NOT NULL REFERENCES relatum.super_streams ON DELETE CASCADE,
  source_id integer NOT NULL,
  -- The source itself if the move is aborted.
  target_id integer NOT NULL,
  state text NOT NULL DEFAULT 'fencing',
  aborting boolean NOT NULL DEFAULT false,
  attempt integer NOT NULL DEFAULT 1,
  contexts integer NOT NULL,
  -- 0 while it waits before its fence (docs/adr/0011): a fence published then has no effect, and is not stored.
  fence_epoch bigint NOT NULL,
  -- The contexts' epoch after the move: that of the fence, or a later one if it was aborted.
  epoch bigint NOT NULL,
  -- Offsets at or before the first possible fence and the first possible marker.
  scan_from bigint NOT NULL,
  target_scan_from bigint NOT NULL,
  fence_offset bigint,
  marker_offset bigint,
  -- The process that runs it; only for display.
  holder text,
  lease_expires_at timestamptz,
  started_at timestamptz NOT NULL DEFAULT now(),
  fenced_at timestamptz,
  ended_at timestamptz,
  reason text,
  -- The super stream's generation when the contexts were stopped. No default, so that movers of release 0.4, which do
  -- not wait before the fence, are refused.
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

-- The running members of serial consumers, each with a lease.
CREATE TABLE relatum.serial_members (
  lease_expires_at timestamptz NOT NULL,
  consumer_id integer NOT NULL REFERENCES relatum.serial_consumers ON DELETE CASCADE,
  holder text NOT NULL,
  CONSTRAINT serial_members_holder PRIMARY KEY (consumer_id, holder)
) WITH (fillfactor = 50);

-- One row for each consumer and partition, even before a member reads it: the row of a moved context's former partition
-- shows whether the messages before the move were consumed.
CREATE TABLE relatum.serial_positions (
  -- The next offset to read: earlier messages were delivered, passed over, or are held.
  position bigint NOT NULL,
  -- Incremented by each write, which must match the previous version: only one of two members can move a position.
  version bigint NOT NULL DEFAULT '0',
  -- The last message read, which identifies the stream.
  last_offset bigint,
  last_fingerprint bigint,
  last_chunk_ms bigint,
  -- Used by consumers of release 0.4 only; the release after 0.5 drops it.
  lease_expires_at timestamptz,
  consumer_id integer NOT NULL REFERENCES relatum.serial_consumers ON DELETE CASCADE,
  partition_id integer NOT NULL REFERENCES relatum.super_stream_partitions ON DELETE CASCADE,
  holder text,
  CONSTRAINT serial_positions_place PRIMARY KEY (consumer_id, partition_id)
) WITH (fillfactor = 50);

-- One row for each move whose messages wait in a partition for earlier messages in another partition.
CREATE TABLE relatum.serial_holds (
  move_id bigint NOT NULL,
  marker_offset bigint NOT NULL,
  -- Held messages before this offset have been delivered.
  cursor bigint NOT NULL,
  epoch bigint NOT NULL,
  fence_offset bigint NOT NULL,
  -- The number of waiting messages read so far.
  held bigint NOT NULL DEFAULT '0',
  since timestamptz NOT NULL DEFAULT now(),
  consumer_id integer NOT NULL REFERENCES relatum.serial_consumers ON DELETE CASCADE,
  -- The partition in which they wait, and the partition with the earlier messages.
  partition_id integer NOT NULL,
  source_id integer NOT NULL,
  CONSTRAINT serial_holds_place PRIMARY KEY (consumer_id, partition_id, move_id)
) WITH (fillfactor = 50);
-- Moves with waiting messages are not deleted.
CREATE INDEX serial_holds_move ON relatum.serial_holds (move_id);
