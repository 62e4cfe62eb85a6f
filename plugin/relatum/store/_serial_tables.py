"""The tables of serial consumers: how far each consumer name is in each partition, and what it holds back there.

They are primary data, like all positions: dropping them means that every message is delivered again.

- `serial_consumers`: one row for each consumer name of a super stream.
- `serial_members`: its members that are up, each with a lease.
- `serial_positions`: one row for each consumer and partition, also for those nobody reads yet: whether what comes
  before a moved context was consumed is asked of the row of the partition it came from.
- `serial_checkpoints`: what lay at some of the offsets behind each position, so that one whose stream has lost its end
  goes on at the last place where both agree.
- `serial_holds`: one row for each move whose contexts wait in a partition for what is before them in another.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)

from relatum.store._tables import made_at, metadata, moment, part_of

serial_consumers = Table(
    "serial_consumers",
    metadata,
    Column("consumer_id", Integer, Identity(always=True), primary_key=True),
    part_of("super_streams", "super_stream_id"),
    Column("name", Text(collation="C"), nullable=False),
    made_at("created_at"),
    UniqueConstraint("super_stream_id", "name", name="serial_consumers_name"),
)

serial_members = Table(
    "serial_members",
    metadata,
    Column("lease_expires_at", DateTime(timezone=True), nullable=False),
    part_of("serial_consumers", "consumer_id"),
    Column("holder", Text, nullable=False),
    PrimaryKeyConstraint("consumer_id", "holder", name="serial_members_holder"),
    # Each member renews its row every second: room on its page keeps that update short.
    postgresql_with={"fillfactor": "50"},
)

serial_positions = Table(
    "serial_positions",
    metadata,
    # The next offset to be read: everything below is delivered, passed over, or held.
    Column("position", BigInteger, nullable=False),
    # Raised by each write, which names the one it follows: two members cannot both move a position.
    Column("version", BigInteger, nullable=False, server_default="0"),
    # What lay at the last offset read: how the stream is known again.
    Column("last_offset", BigInteger),
    Column("last_fingerprint", BigInteger),
    Column("last_chunk_ms", BigInteger),
    moment("lease_expires_at"),
    part_of("serial_consumers", "consumer_id"),
    part_of("super_stream_partitions", "partition_id"),
    Column("holder", Text),
    PrimaryKeyConstraint("consumer_id", "partition_id", name="serial_positions_place"),
    # Every batch moves one row: room on its page keeps that update out of the index.
    postgresql_with={"fillfactor": "50"},
)

serial_checkpoints = Table(
    "serial_checkpoints",
    metadata,
    Column("last_offset", BigInteger, nullable=False),
    Column("fingerprint", BigInteger, nullable=False),
    Column("chunk_ms", BigInteger),
    part_of("serial_consumers", "consumer_id"),
    part_of("super_stream_partitions", "partition_id"),
    PrimaryKeyConstraint("consumer_id", "partition_id", "last_offset", name="serial_checkpoints_place"),
)

serial_holds = Table(
    "serial_holds",
    metadata,
    Column("move_id", BigInteger, nullable=False),
    Column("marker_offset", BigInteger, nullable=False),
    # Held messages before this offset have been delivered.
    Column("cursor", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("fence_offset", BigInteger, nullable=False),
    # Messages that wait, as far as was read.
    Column("held", BigInteger, nullable=False, server_default="0"),
    made_at("since"),
    part_of("serial_consumers", "consumer_id"),
    # Where they wait, and where what is before them lies.
    Column("partition_id", Integer, nullable=False),
    Column("source_id", Integer, nullable=False),
    PrimaryKeyConstraint("consumer_id", "partition_id", "move_id", name="serial_holds_place"),
    # Moves that somebody waits for are not forgotten.
    Index("serial_holds_move", "move_id"),
    postgresql_with={"fillfactor": "50"},
)
