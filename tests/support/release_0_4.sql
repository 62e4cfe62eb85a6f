-- What `relatum migrate` of release 0.4.0 runs in a new database: revisions 0001 to 0004, as its `--sql` prints them.
CREATE SCHEMA IF NOT EXISTS relatum;
CREATE TABLE relatum.alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
-- Running upgrade  -> 0001
CREATE TABLE relatum.streams (
    stream_id INTEGER GENERATED ALWAYS AS IDENTITY,
    vhost TEXT DEFAULT '/' NOT NULL,
    name TEXT NOT NULL,
    super_stream TEXT,
    generation INTEGER DEFAULT '1' NOT NULL,
    state TEXT DEFAULT 'recording' NOT NULL,
    record_time BOOLEAN DEFAULT true NOT NULL,
    first_offset BIGINT,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    replaced_at TIMESTAMP WITH TIME ZONE,
    lease_holder TEXT,
    lease_expires_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (stream_id)
);
CREATE UNIQUE INDEX streams_current ON relatum.streams (vhost, name) WHERE replaced_at IS NULL;
CREATE INDEX streams_super_stream ON relatum.streams (vhost, super_stream) WHERE replaced_at IS NULL;
CREATE TABLE relatum.keys (
    key_id SMALLINT GENERATED ALWAYS AS IDENTITY,
    name TEXT COLLATE "C" NOT NULL,
    sources TEXT[] NOT NULL,
    type TEXT NOT NULL,
    since TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    removed_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (key_id),
    CONSTRAINT keys_type CHECK (type IN ('text', 'integer', 'timestamp'))
);
CREATE UNIQUE INDEX keys_in_force ON relatum.keys (name) WHERE removed_at IS NULL;
CREATE TABLE relatum.coverage (
    coverage_id BIGINT GENERATED ALWAYS AS IDENTITY,
    stream_id INTEGER NOT NULL,
    from_offset BIGINT NOT NULL,
    to_offset BIGINT NOT NULL,
    key_ids SMALLINT[] NOT NULL,
    with_time BOOLEAN NOT NULL,
    kind TEXT DEFAULT 'recorded' NOT NULL,
    is_tail BOOLEAN DEFAULT false NOT NULL,
    last_offset BIGINT,
    last_fingerprint BIGINT,
    last_chunk_ms BIGINT,
    recorded_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (coverage_id),
    CONSTRAINT coverage_range CHECK (from_offset <= to_offset),
    CONSTRAINT coverage_kind CHECK (kind IN ('recorded', 'hole')),
    FOREIGN KEY(stream_id) REFERENCES relatum.streams (stream_id)
)
 WITH (fillfactor = 50);
CREATE INDEX coverage_stream ON relatum.coverage (stream_id, from_offset);
CREATE UNIQUE INDEX coverage_tail ON relatum.coverage (stream_id) WHERE is_tail;
CREATE TABLE relatum.relationships (
    stream_offset BIGINT NOT NULL,
    time_us BIGINT,
    stream_id INTEGER NOT NULL,
    key_id SMALLINT NOT NULL,
    value TEXT COLLATE "C" NOT NULL
);
CREATE INDEX relationships_lookup ON relatum.relationships (key_id, value, stream_id, time_us, stream_offset);
CREATE INDEX relationships_offsets ON relatum.relationships USING brin (stream_id, stream_offset) WITH (pages_per_range = 32);
CREATE TABLE relatum.time_blocks (
    min_us BIGINT NOT NULL,
    max_us BIGINT NOT NULL,
    first_offset BIGINT NOT NULL,
    last_offset BIGINT NOT NULL,
    stream_id INTEGER NOT NULL,
    width_class SMALLINT NOT NULL
);
CREATE INDEX time_blocks_lookup ON relatum.time_blocks (stream_id, width_class, min_us);
CREATE INDEX time_blocks_offsets ON relatum.time_blocks (stream_id, first_offset);
CREATE TABLE relatum.checkpoints (
    stream_id INTEGER NOT NULL,
    last_offset BIGINT NOT NULL,
    fingerprint BIGINT NOT NULL,
    chunk_ms BIGINT
);
CREATE INDEX checkpoints_lookup ON relatum.checkpoints (stream_id, last_offset);
CREATE TABLE relatum.receipts (
    message_id TEXT COLLATE "C" NOT NULL,
    stream_id INTEGER NOT NULL,
    stream_offset BIGINT NOT NULL,
    recorded_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL
);
CREATE INDEX receipts_lookup ON relatum.receipts (message_id);
CREATE INDEX receipts_age ON relatum.receipts (recorded_at);
CREATE TABLE relatum.skips (
    stream_id INTEGER NOT NULL,
    key_id SMALLINT NOT NULL,
    reason TEXT NOT NULL,
    count BIGINT NOT NULL,
    CONSTRAINT skips_counter UNIQUE (stream_id, key_id, reason)
);
CREATE TABLE relatum.events (
    event_id BIGINT GENERATED ALWAYS AS IDENTITY,
    stream_id INTEGER NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    kind TEXT NOT NULL,
    from_offset BIGINT,
    to_offset BIGINT,
    detail TEXT DEFAULT '' NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX events_stream ON relatum.events (stream_id, event_id);
CREATE VIEW relatum.relations AS
SELECT k.name AS key, r.value, s.vhost, s.name AS stream, r.stream_offset,
       timestamptz 'epoch' + r.time_us * interval '1 microsecond' AS time
FROM relatum.relationships r
JOIN relatum.streams s ON s.stream_id = r.stream_id AND s.replaced_at IS NULL
JOIN relatum.keys k ON k.key_id = r.key_id AND k.removed_at IS NULL;
DO $$
DECLARE role_name text;
BEGIN
  FOREACH role_name IN ARRAY ARRAY['relatum_recorder', 'relatum_consumer'] LOOP
    BEGIN
      EXECUTE format('CREATE ROLE %I NOLOGIN', role_name);
    EXCEPTION WHEN duplicate_object OR unique_violation OR insufficient_privilege THEN
      NULL;
    END;
  END LOOP;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_recorder') THEN
    GRANT USAGE ON SCHEMA relatum TO relatum_recorder;
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA relatum TO relatum_recorder;
    GRANT USAGE ON ALL SEQUENCES IN SCHEMA relatum TO relatum_recorder;
    REVOKE INSERT, UPDATE, DELETE ON relatum.alembic_version FROM relatum_recorder;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_consumer') THEN
    GRANT USAGE ON SCHEMA relatum TO relatum_consumer;
    GRANT SELECT ON ALL TABLES IN SCHEMA relatum TO relatum_consumer;
  END IF;
END $$;
INSERT INTO relatum.alembic_version (version_num) VALUES ('0001') RETURNING relatum.alembic_version.version_num;
-- Running upgrade 0001 -> 0002
CREATE TABLE relatum.group_consumers (
    consumer_id INTEGER GENERATED ALWAYS AS IDENTITY,
    vhost TEXT DEFAULT '/' NOT NULL,
    name TEXT NOT NULL,
    streams TEXT[],
    ordering TEXT NOT NULL,
    start_offset BIGINT,
    start_us BIGINT,
    start_stream_id INTEGER,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (consumer_id),
    CONSTRAINT group_consumers_name UNIQUE (vhost, name),
    CONSTRAINT group_consumers_ordering CHECK (ordering IN ('logical', 'physical'))
);
CREATE TABLE relatum.group_scans (
    from_offset BIGINT NOT NULL,
    to_offset BIGINT NOT NULL,
    consumer_id INTEGER NOT NULL,
    stream_id INTEGER NOT NULL,
    PRIMARY KEY (consumer_id, stream_id, from_offset),
    CONSTRAINT group_scans_range CHECK (from_offset <= to_offset),
    FOREIGN KEY(consumer_id) REFERENCES relatum.group_consumers (consumer_id) ON DELETE CASCADE
)
 WITH (fillfactor = 50);
CREATE TABLE relatum.group_states (
    rank BIGINT NOT NULL,
    first_offset BIGINT NOT NULL,
    opened_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    touched_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    told_at TIMESTAMP WITH TIME ZONE,
    lease_expires_at TIMESTAMP WITH TIME ZONE,
    done_at TIMESTAMP WITH TIME ZONE,
    consumer_id INTEGER NOT NULL,
    stream_id INTEGER NOT NULL,
    deliveries INTEGER DEFAULT '0' NOT NULL,
    given INTEGER DEFAULT '0' NOT NULL,
    state TEXT NOT NULL,
    holder TEXT,
    group_id TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (consumer_id, group_id),
    CONSTRAINT group_states_state CHECK (state IN ('open', 'ready', 'claimed', 'done', 'dead')),
    FOREIGN KEY(consumer_id) REFERENCES relatum.group_consumers (consumer_id) ON DELETE CASCADE
);
CREATE INDEX group_states_next ON relatum.group_states (consumer_id, rank, stream_id, first_offset) WHERE state IN ('ready', 'claimed');
CREATE INDEX group_states_idle ON relatum.group_states (consumer_id, touched_at) WHERE state = 'open' AND told_at IS NULL;
DO $$
DECLARE role_name text;
BEGIN
  FOREACH role_name IN ARRAY ARRAY['relatum_recorder', 'relatum_consumer'] LOOP
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = role_name) THEN
      EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.group_consumers, relatum.group_scans, '
                     'relatum.group_states TO %I', role_name);
      EXECUTE format('GRANT USAGE ON ALL SEQUENCES IN SCHEMA relatum TO %I', role_name);
    END IF;
  END LOOP;
END $$;
UPDATE relatum.alembic_version SET version_num='0002' WHERE relatum.alembic_version.version_num = '0001';
-- Running upgrade 0002 -> 0003
CREATE TABLE relatum.collectors (
    collector_id INTEGER GENERATED ALWAYS AS IDENTITY,
    vhost TEXT DEFAULT '/' NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    keep_s INTEGER,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (collector_id),
    CONSTRAINT collectors_name UNIQUE (vhost, name)
);
CREATE TABLE relatum.collector_members (
    member_id BIGINT GENERATED ALWAYS AS IDENTITY,
    joined_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    lease_expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    collector_id INTEGER NOT NULL,
    lease_s FLOAT NOT NULL,
    holder TEXT NOT NULL,
    types TEXT[] NOT NULL,
    PRIMARY KEY (member_id),
    FOREIGN KEY(collector_id) REFERENCES relatum.collectors (collector_id) ON DELETE CASCADE
)
 WITH (fillfactor = 50);
CREATE INDEX collector_members_collector ON relatum.collector_members (collector_id, lease_expires_at);
CREATE TABLE relatum.collector_sources (
    source_id INTEGER GENERATED ALWAYS AS IDENTITY,
    collector_id INTEGER NOT NULL,
    stream TEXT COLLATE "C" NOT NULL,
    position BIGINT,
    last_offset BIGINT,
    last_fingerprint BIGINT,
    last_chunk_ms BIGINT,
    passed_over BIGINT DEFAULT '0' NOT NULL,
    refused BIGINT DEFAULT '0' NOT NULL,
    member_id BIGINT,
    moved_at TIMESTAMP WITH TIME ZONE,
    replaced_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (source_id),
    FOREIGN KEY(collector_id) REFERENCES relatum.collectors (collector_id) ON DELETE CASCADE
)
 WITH (fillfactor = 50);
CREATE UNIQUE INDEX collector_sources_current ON relatum.collector_sources (collector_id, stream) WHERE replaced_at IS NULL;
CREATE TABLE relatum.collected_messages (
    stream_offset BIGINT NOT NULL,
    member_id BIGINT,
    bulk_id BIGINT,
    collected_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    forwarded_at TIMESTAMP WITH TIME ZONE,
    finished_at TIMESTAMP WITH TIME ZONE,
    next_attempt_at TIMESTAMP WITH TIME ZONE,
    source_id INTEGER NOT NULL,
    size INTEGER NOT NULL,
    attempts SMALLINT DEFAULT '0' NOT NULL,
    state TEXT DEFAULT 'collected' NOT NULL,
    message_id TEXT COLLATE "C" NOT NULL,
    type TEXT COLLATE "C" NOT NULL,
    reason TEXT,
    CONSTRAINT collected_messages_place PRIMARY KEY (source_id, stream_offset),
    CONSTRAINT collected_messages_state CHECK (state IN ('collected', 'forwarded', 'succeeded', 'failed', 'dead')),
    CONSTRAINT collected_messages_finished_at CHECK ((finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'dead')))
)
 WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX collected_messages_id ON relatum.collected_messages (message_id);
CREATE INDEX collected_messages_unfinished ON relatum.collected_messages (member_id) WHERE finished_at IS NULL;
CREATE INDEX collected_messages_finished ON relatum.collected_messages (source_id, finished_at) WHERE finished_at IS NOT NULL;
DO $$
BEGIN
  BEGIN
    CREATE ROLE relatum_collector NOLOGIN;
  EXCEPTION WHEN duplicate_object OR unique_violation OR insufficient_privilege THEN
    NULL;
  END;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_collector') THEN
    GRANT USAGE ON SCHEMA relatum TO relatum_collector;
    GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.collectors, relatum.collector_members, relatum.collector_sources,
      relatum.collected_messages TO relatum_collector;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_recorder') THEN
    GRANT SELECT, DELETE ON relatum.collectors, relatum.collector_members, relatum.collector_sources,
      relatum.collected_messages TO relatum_recorder;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_consumer') THEN
    GRANT SELECT ON relatum.collectors, relatum.collector_members, relatum.collector_sources,
      relatum.collected_messages TO relatum_consumer;
  END IF;
END $$;
UPDATE relatum.alembic_version SET version_num='0003' WHERE relatum.alembic_version.version_num = '0002';
-- Running upgrade 0003 -> 0004
CREATE SEQUENCE relatum.placement_epochs AS bigint;
CREATE TABLE relatum.super_streams (
    super_stream_id INTEGER GENERATED ALWAYS AS IDENTITY,
    vhost TEXT DEFAULT '/' NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    header TEXT NOT NULL,
    generation BIGINT DEFAULT '1' NOT NULL,
    floor BIGINT DEFAULT '0' NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (super_stream_id),
    CONSTRAINT super_streams_name UNIQUE (vhost, name)
)
 WITH (fillfactor = 50);
CREATE TABLE relatum.super_stream_partitions (
    partition_id INTEGER GENERATED ALWAYS AS IDENTITY,
    super_stream_id INTEGER NOT NULL,
    stream TEXT COLLATE "C" NOT NULL,
    binding_key TEXT NOT NULL,
    place INTEGER NOT NULL,
    state TEXT DEFAULT 'active' NOT NULL,
    weight FLOAT DEFAULT '1' NOT NULL,
    open_sets BIGINT DEFAULT '0' NOT NULL,
    PRIMARY KEY (partition_id),
    CONSTRAINT super_stream_partitions_stream UNIQUE (super_stream_id, stream),
    CONSTRAINT super_stream_partitions_state CHECK (state IN ('active', 'retired')),
    CONSTRAINT super_stream_partitions_weight CHECK (weight >= 0),
    FOREIGN KEY(super_stream_id) REFERENCES relatum.super_streams (super_stream_id) ON DELETE CASCADE
)
 WITH (fillfactor = 50);
CREATE TABLE relatum.placements (
    placement_id BIGINT GENERATED ALWAYS AS IDENTITY,
    epoch BIGINT NOT NULL,
    first_epoch BIGINT NOT NULL,
    generation BIGINT DEFAULT '0' NOT NULL,
    move_id BIGINT,
    opened_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    used_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    released_at TIMESTAMP WITH TIME ZONE,
    super_stream_id INTEGER NOT NULL,
    partition_id INTEGER NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    state TEXT DEFAULT 'open' NOT NULL,
    PRIMARY KEY (placement_id),
    CONSTRAINT placements_name UNIQUE (super_stream_id, name),
    CONSTRAINT placements_state CHECK (state IN ('open', 'moving', 'released')),
    CONSTRAINT placements_move CHECK ((state = 'moving') = (move_id IS NOT NULL)),
    CONSTRAINT placements_released CHECK ((state = 'released') = (released_at IS NOT NULL))
)
 WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX placements_changes ON relatum.placements (super_stream_id, generation);
CREATE INDEX placements_partition ON relatum.placements (partition_id) WHERE state <> 'released';
CREATE INDEX placements_idle ON relatum.placements (super_stream_id, used_at) WHERE state = 'open';
CREATE INDEX placements_over ON relatum.placements (super_stream_id, released_at) WHERE state = 'released';
CREATE TABLE relatum.context_moves (
    move_id BIGINT GENERATED ALWAYS AS IDENTITY,
    super_stream_id INTEGER NOT NULL,
    source_id INTEGER NOT NULL,
    target_id INTEGER NOT NULL,
    state TEXT DEFAULT 'fencing' NOT NULL,
    aborting BOOLEAN DEFAULT false NOT NULL,
    attempt INTEGER DEFAULT '1' NOT NULL,
    contexts INTEGER NOT NULL,
    fence_epoch BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    scan_from BIGINT NOT NULL,
    target_scan_from BIGINT NOT NULL,
    fence_offset BIGINT,
    marker_offset BIGINT,
    holder TEXT,
    lease_expires_at TIMESTAMP WITH TIME ZONE,
    started_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    fenced_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    reason TEXT,
    PRIMARY KEY (move_id),
    CONSTRAINT context_moves_state CHECK (state IN ('fencing', 'fenced', 'switched', 'aborted')),
    CONSTRAINT context_moves_ended_at CHECK ((ended_at IS NOT NULL) = (state IN ('switched', 'aborted'))),
    CONSTRAINT context_moves_fence CHECK (state = 'fencing' OR fence_offset IS NOT NULL),
    CONSTRAINT context_moves_marker CHECK (ended_at IS NULL OR marker_offset IS NOT NULL),
    FOREIGN KEY(super_stream_id) REFERENCES relatum.super_streams (super_stream_id) ON DELETE CASCADE
);
CREATE INDEX context_moves_super_stream ON relatum.context_moves (super_stream_id, move_id);
CREATE INDEX context_moves_open ON relatum.context_moves (super_stream_id) WHERE ended_at IS NULL;
CREATE INDEX context_moves_source ON relatum.context_moves (source_id, fence_offset);
CREATE INDEX context_moves_target ON relatum.context_moves (target_id, marker_offset);
CREATE TABLE relatum.moved_contexts (
    move_id BIGINT NOT NULL,
    from_epoch BIGINT NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    CONSTRAINT moved_contexts_place PRIMARY KEY (move_id, name),
    FOREIGN KEY(move_id) REFERENCES relatum.context_moves (move_id) ON DELETE CASCADE
);
CREATE INDEX moved_contexts_name ON relatum.moved_contexts (name, move_id);
CREATE TABLE relatum.serial_consumers (
    consumer_id INTEGER GENERATED ALWAYS AS IDENTITY,
    super_stream_id INTEGER NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (consumer_id),
    CONSTRAINT serial_consumers_name UNIQUE (super_stream_id, name),
    FOREIGN KEY(super_stream_id) REFERENCES relatum.super_streams (super_stream_id) ON DELETE CASCADE
);
CREATE TABLE relatum.serial_members (
    lease_expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    consumer_id INTEGER NOT NULL,
    holder TEXT NOT NULL,
    CONSTRAINT serial_members_holder PRIMARY KEY (consumer_id, holder),
    FOREIGN KEY(consumer_id) REFERENCES relatum.serial_consumers (consumer_id) ON DELETE CASCADE
)
 WITH (fillfactor = 50);
CREATE TABLE relatum.serial_positions (
    position BIGINT NOT NULL,
    version BIGINT DEFAULT '0' NOT NULL,
    last_offset BIGINT,
    last_fingerprint BIGINT,
    last_chunk_ms BIGINT,
    lease_expires_at TIMESTAMP WITH TIME ZONE,
    consumer_id INTEGER NOT NULL,
    partition_id INTEGER NOT NULL,
    holder TEXT,
    CONSTRAINT serial_positions_place PRIMARY KEY (consumer_id, partition_id),
    FOREIGN KEY(consumer_id) REFERENCES relatum.serial_consumers (consumer_id) ON DELETE CASCADE,
    FOREIGN KEY(partition_id) REFERENCES relatum.super_stream_partitions (partition_id) ON DELETE CASCADE
)
 WITH (fillfactor = 50);
CREATE TABLE relatum.serial_holds (
    move_id BIGINT NOT NULL,
    marker_offset BIGINT NOT NULL,
    cursor BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    fence_offset BIGINT NOT NULL,
    held BIGINT DEFAULT '0' NOT NULL,
    since TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    consumer_id INTEGER NOT NULL,
    partition_id INTEGER NOT NULL,
    source_id INTEGER NOT NULL,
    CONSTRAINT serial_holds_place PRIMARY KEY (consumer_id, partition_id, move_id),
    FOREIGN KEY(consumer_id) REFERENCES relatum.serial_consumers (consumer_id) ON DELETE CASCADE
)
 WITH (fillfactor = 50);
CREATE INDEX serial_holds_move ON relatum.serial_holds (move_id);
DO $$
BEGIN
  BEGIN
    CREATE ROLE relatum_router NOLOGIN;
  EXCEPTION WHEN duplicate_object OR unique_violation OR insufficient_privilege THEN
    NULL;
  END;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_router') THEN
    GRANT USAGE ON SCHEMA relatum TO relatum_router;
    GRANT USAGE ON SEQUENCE relatum.placement_epochs TO relatum_router;
    GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.super_streams, relatum.super_stream_partitions,
      relatum.placements, relatum.context_moves, relatum.moved_contexts, relatum.serial_consumers,
      relatum.serial_members, relatum.serial_positions, relatum.serial_holds TO relatum_router;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_consumer') THEN
    GRANT SELECT ON relatum.super_streams, relatum.super_stream_partitions, relatum.placements,
      relatum.context_moves, relatum.moved_contexts TO relatum_consumer;
    GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.serial_consumers, relatum.serial_members,
      relatum.serial_positions, relatum.serial_holds TO relatum_consumer;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_recorder') THEN
    GRANT SELECT ON relatum.super_streams, relatum.super_stream_partitions, relatum.serial_consumers,
      relatum.serial_members, relatum.serial_positions, relatum.serial_holds TO relatum_recorder;
    GRANT SELECT, DELETE ON relatum.placements, relatum.context_moves, relatum.moved_contexts TO relatum_recorder;
    GRANT UPDATE (floor) ON relatum.super_streams TO relatum_recorder;
  END IF;
END $$;
UPDATE relatum.alembic_version SET version_num='0004' WHERE relatum.alembic_version.version_num = '0003';
