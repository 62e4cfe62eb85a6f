"""The tables of the schema `relatum`: what is in each, and why it has the indexes it has.

The streams are the truth and these tables are derived from them: they can be dropped and rebuilt (`relatum backfill`).

- `streams`: one row for each generation of a stream. A stream that is deleted and declared again starts at offset 0
  again; it gets a new row, so that no row of the old one can answer for the new one.
- `brokers`: those whose streams are recorded, each virtual host by an id of its own. See ADR 0043.
- `recorder_members`: the recorders that are up, each with a lease: what names one of them in `streams` is held by it.
- `keys`: the key definitions in force, and those removed.
- `masking`: the secret that digests of masked keys' values are made with, in one row. See ADR 0030.
- `coverage`: the offset ranges of a stream that are recorded, each with the keys it holds; holes that retention tore.
  What was recorded `over_amqp` holds what it found, but proves nothing absent: it is read again by the stream protocol.
- `relationships`: one row for each value of each message. Its one index answers every look-up by key. It is in parts,
  each a table `relationships_<part>` with its own index: see ADR 0023.
- `table_parts`: the parts of `relationships`: made ahead of time, opened for new rows, closed, made compact.
- `part_streams`: which offsets of which streams a closed part holds rows of.
- `time_blocks`: the sparse index of times, one row for up to 128 messages. See ADR 0003.
- `checkpoints`: what lay at some recorded offsets, to find how far back a stream that lost its tail still agrees.
- `receipts`: offsets of the messages whose publishers wait for them; short-lived.
- `skips`: how many values were not recorded, by key and reason.
- `events`: what happened to a stream: replaced, tail lost, hole, missing.
- `settlements`: one row for each step whose writer does not know its outcome for sure yet, and for each that was found
  to have been rolled back; see `relatum.store._settling`. A writer removes its rows as it goes on; what is left of
  those that died is removed by age.

Two are primary data, as those of placements and collectors are:

- `expectations`: what is expected of the messages of streams: definitions, as keys are.
- `taps`: which exchanges are tapped: a broker tells bindings to administrators only.
"""

from datetime import datetime

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)

SCHEMA = "relatum"

metadata = MetaData(schema=SCHEMA)


def moment(name: str) -> "Column[datetime]":
    """A moment that need not be known."""
    return Column(name, DateTime(timezone=True))


def made_at(name: str) -> "Column[datetime]":
    """When the row was written."""
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


def part_of(table: str, key: str) -> "Column[int]":
    """The row of another table that this one is a part of, and goes with."""
    return Column(key, Integer, ForeignKey(f"{SCHEMA}.{table}.{key}", ondelete="CASCADE"), nullable=False)


brokers = Table(
    "brokers",
    metadata,
    Column("broker_id", Uuid, primary_key=True),
    # For people: as it was when one of its streams was seen to be its own.
    Column("cluster_name", Text, nullable=False),
    made_at("created_at"),
)

streams = Table(
    "streams",
    metadata,
    Column("stream_id", Integer, Identity(always=True), primary_key=True),
    Column("vhost", Text, nullable=False, server_default="/"),
    Column("name", Text, nullable=False),
    Column("super_stream", Text),
    Column("generation", Integer, nullable=False, server_default="1"),
    Column("state", Text, nullable=False, server_default="recording"),
    Column("record_time", Boolean, nullable=False, server_default=text("true")),
    Column("first_offset", BigInteger),
    made_at("created_at"),
    moment("replaced_at"),
    Column("lease_holder", Text),
    # Not used any more: the lease is the holder's own.
    moment("lease_expires_at"),
    # Rows of offsets before it are of messages that retention has dropped.
    Column("retained_from", BigInteger),
    # Whose stream it is; NULL where nobody could tell yet.
    Column("broker_id", Uuid, ForeignKey("relatum.brokers.broker_id")),
    Index("streams_current", "vhost", "name", unique=True, postgresql_where=text("replaced_at IS NULL")),
    Index("streams_super_stream", "vhost", "super_stream", postgresql_where=text("replaced_at IS NULL")),
)

recorder_members = Table(
    "recorder_members",
    metadata,
    Column("lease_expires_at", DateTime(timezone=True), nullable=False),
    Column("holder", Text, nullable=False),
    # Recorders of one name share their streams.
    Column("name", Text, nullable=False),
    PrimaryKeyConstraint("holder", "name", name="recorder_members_holder"),
    Index("recorder_members_name", "name"),
    # Each renews its row every other second: room on its page keeps that update out of the indexes.
    postgresql_with={"fillfactor": "50"},
)

keys = Table(
    "keys",
    metadata,
    Column("key_id", SmallInteger, Identity(always=True), primary_key=True),
    Column("name", Text(collation="C"), nullable=False),
    Column("sources", ARRAY(Text), nullable=False),
    Column("type", Text, nullable=False),
    made_at("since"),
    moment("removed_at"),
    # The key whose messages values of this one name.
    Column("names_key_id", SmallInteger, ForeignKey("relatum.keys.key_id")),
    # Who may look at messages, and not at its values, is shown digests of them.
    Column("masked", Boolean, nullable=False, server_default=text("false")),
    Index("keys_in_force", "name", unique=True, postgresql_where=text("removed_at IS NULL")),
    CheckConstraint("type IN ('text', 'integer', 'timestamp')", name="keys_type"),
)

masking = Table(
    "masking",
    metadata,
    Column("is_only", Boolean, primary_key=True, server_default=text("true")),
    Column("secret", LargeBinary, nullable=False),
    CheckConstraint("is_only", name="masking_is_only"),
)

coverage = Table(
    "coverage",
    metadata,
    Column("coverage_id", BigInteger, Identity(always=True), primary_key=True),
    Column("stream_id", Integer, ForeignKey("relatum.streams.stream_id"), nullable=False),
    Column("from_offset", BigInteger, nullable=False),
    Column("to_offset", BigInteger, nullable=False),
    Column("key_ids", ARRAY(SmallInteger), nullable=False),
    Column("with_time", Boolean, nullable=False),
    Column("kind", Text, nullable=False, server_default="recorded"),
    Column("is_tail", Boolean, nullable=False, server_default=text("false")),
    Column("last_offset", BigInteger),
    Column("last_fingerprint", BigInteger),
    Column("last_chunk_ms", BigInteger),
    made_at("recorded_at"),
    Column("over_amqp", Boolean, nullable=False, server_default=text("false")),
    Index("coverage_stream", "stream_id", "from_offset"),
    # One tail a stream: two recorders that start together cannot both make one.
    Index("coverage_tail", "stream_id", unique=True, postgresql_where=text("is_tail")),
    CheckConstraint("from_offset <= to_offset", name="coverage_range"),
    CheckConstraint("kind IN ('recorded', 'hole')", name="coverage_kind"),
    # Every batch moves one row's end: room on its page keeps that update out of the indexes.
    postgresql_with={"fillfactor": "50"},
)

relationships = Table(
    "relationships",
    metadata,
    # Widest first: the eight-byte columns need no padding so, and a row of a short value takes 56 bytes.
    Column("stream_offset", BigInteger, nullable=False),
    Column("time_us", BigInteger),
    Column("stream_id", Integer, nullable=False),
    Column("key_id", SmallInteger, nullable=False),
    Column("value", Text(collation="C"), nullable=False),
    # Rows are written into the open part itself, where its number is the default. 0: those of the release before.
    Column("part", Integer, nullable=False, server_default="0"),
    postgresql_partition_by="RANGE (part)",
)
"""Each part has two indexes of its own, made by `make_part` in the database:

- `…_lookup` (key_id, value, stream_id, time_us, stream_offset);
- `…_offsets`, BRIN (stream_id, stream_offset): rows arrive in offset order, so block ranges are enough for pruning and
  verifying, at 0.01 byte a row.
"""

table_parts = Table(
    "table_parts",
    metadata,
    Column("part", Integer, primary_key=True, autoincrement=False),
    made_at("made_at"),
    moment("opened_at"),
    moment("closed_at"),
    moment("compact_at"),
    # Few of its rows are retained: a day later they are moved, and another day later it is dropped.
    moment("leaving_at"),
    moment("emptied_at"),
    # Each commit locks one row of it.
    postgresql_with={"fillfactor": "50"},
)

part_streams = Table(
    "part_streams",
    metadata,
    Column("first_offset", BigInteger, nullable=False),
    Column("last_offset", BigInteger, nullable=False),
    Column("row_count", BigInteger, nullable=False),
    Column("part", Integer, nullable=False),
    Column("stream_id", Integer, nullable=False),
    PrimaryKeyConstraint("part", "stream_id", name="part_streams_place"),
    Index("part_streams_stream", "stream_id", "part"),
)

part_keys = Table(
    "part_keys",
    metadata,
    Column("part", Integer, nullable=False),
    Column("key_id", SmallInteger, nullable=False),
    Column("low", Text(collation="C"), nullable=False),
    Column("high", Text(collation="C"), nullable=False),
    PrimaryKeyConstraint("key_id", "part", name="part_keys_place"),
)

time_blocks = Table(
    "time_blocks",
    metadata,
    Column("min_us", BigInteger, nullable=False),
    Column("max_us", BigInteger, nullable=False),
    Column("first_offset", BigInteger, nullable=False),
    Column("last_offset", BigInteger, nullable=False),
    Column("stream_id", Integer, nullable=False),
    Column("width_class", SmallInteger, nullable=False),
    Index("time_blocks_lookup", "stream_id", "width_class", "min_us"),
    Index("time_blocks_offsets", "stream_id", "first_offset"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("stream_id", Integer, nullable=False),
    Column("last_offset", BigInteger, nullable=False),
    Column("fingerprint", BigInteger, nullable=False),
    Column("chunk_ms", BigInteger),
    Index("checkpoints_lookup", "stream_id", "last_offset"),
)

receipts = Table(
    "receipts",
    metadata,
    Column("message_id", Text(collation="C"), nullable=False),
    Column("stream_id", Integer, nullable=False),
    Column("stream_offset", BigInteger, nullable=False),
    made_at("recorded_at"),
    Index("receipts_lookup", "message_id"),
    Index("receipts_age", "recorded_at"),
)

skips = Table(
    "skips",
    metadata,
    Column("stream_id", Integer, nullable=False),
    Column("key_id", SmallInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    UniqueConstraint("stream_id", "key_id", "reason", name="skips_counter"),
)

events = Table(
    "events",
    metadata,
    Column("event_id", BigInteger, Identity(always=True), primary_key=True),
    Column("stream_id", Integer, nullable=False),
    made_at("at"),
    Column("kind", Text, nullable=False),
    Column("from_offset", BigInteger),
    Column("to_offset", BigInteger),
    Column("detail", Text, nullable=False, server_default=""),
    Index("events_stream", "stream_id", "event_id"),
)

settlements = Table(
    "settlements",
    metadata,
    # Ascending with time, so that the index is written at its end.
    Column("token", Uuid, primary_key=True),
    made_at("written_at"),
    # Written by one who settles: the step was rolled back, and can come through no more.
    Column("is_void", Boolean, nullable=False, server_default=text("false")),
    # Each row lives for a moment: a small table that is cleaned often.
    postgresql_with={"autovacuum_vacuum_scale_factor": "0.0", "autovacuum_vacuum_threshold": "10000"},
)

expectations = Table(
    "expectations",
    metadata,
    Column("expectation_id", Integer, Identity(always=True), primary_key=True),
    Column("vhost", Text, nullable=False, server_default="/"),
    Column("name", Text(collation="C"), nullable=False),
    # Each message of this stream or super stream …
    Column("of_stream", Text, nullable=False),
    # … is followed by one with the same value of this key, by its name: one that is defined anew is meant as well …
    Column("by_key", Text(collation="C"), nullable=False),
    # … in this stream or super stream.
    Column("follows", Text, nullable=False),
    Column("within_s", Double, nullable=False),
    Column("grace_s", Double, nullable=False, server_default="1"),
    made_at("created_at"),
    UniqueConstraint("vhost", "name", name="expectations_name"),
    CheckConstraint("within_s > 0", name="expectations_within"),
    CheckConstraint("grace_s >= 0", name="expectations_grace"),
)

taps = Table(
    "taps",
    metadata,
    Column("tap_id", Integer, Identity(always=True), primary_key=True),
    Column("vhost", Text, nullable=False, server_default="/"),
    Column("exchange", Text, nullable=False),
    Column("kind", Text),
    Column("stream", Text, nullable=False),
    Column("binding_key", Text, nullable=False),
    # Of the binding, as JSON with sorted names: a binding is taken away by the very arguments it was made with.
    Column("arguments", Text, nullable=False, server_default=text("'{}'")),
    # Whether the stream was declared for a tap: only such a one is deleted with it.
    Column("made_stream", Boolean, nullable=False),
    made_at("created_at"),
    UniqueConstraint("vhost", "exchange", "stream", "binding_key", "arguments", name="taps_binding"),
)
