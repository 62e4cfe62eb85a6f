"""The tables of durable group consumers: what each consumer name knows of the groups it shares among its members.

They are primary data, like positions: dropping them means that every group is given again.

- `group_consumers`: one row for each consumer name, with what its members must agree on.
- `group_scans`: the offset ranges of a stream whose group rows a consumer knows. A range, and not one position: what
  is back-filled later lies behind the position and must be seen, too.
- `group_states`: one row for each group a consumer has seen: open (not complete), ready, claimed (a member has it),
  done (acknowledged) or dead (given up). Done rows stay as long as the streams hold a message of the group, so that a
  late duplicate does not open it again.
"""

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)

from relatum.store._tables import made_at, metadata, moment, part_of

group_consumers = Table(
    "group_consumers",
    metadata,
    Column("consumer_id", Integer, Identity(always=True), primary_key=True),
    Column("vhost", Text, nullable=False, server_default="/"),
    Column("name", Text, nullable=False),
    # What was asked for by name, sorted; NULL for every recorded stream.
    Column("streams", ARRAY(Text)),
    Column("ordering", Text, nullable=False),
    # Where the first member began: groups whose first message lies before are none of this consumer's.
    Column("start_offset", BigInteger),
    Column("start_us", BigInteger),
    # Which generation the offset is of; a stream that is declared again is read from its beginning.
    Column("start_stream_id", Integer),
    made_at("created_at"),
    UniqueConstraint("vhost", "name", name="group_consumers_name"),
    CheckConstraint("ordering IN ('logical', 'physical')", name="group_consumers_ordering"),
)

group_scans = Table(
    "group_scans",
    metadata,
    Column("from_offset", BigInteger, nullable=False),
    Column("to_offset", BigInteger, nullable=False),
    part_of("group_consumers", "consumer_id"),
    Column("stream_id", Integer, nullable=False),
    PrimaryKeyConstraint("consumer_id", "stream_id", "from_offset"),
    CheckConstraint("from_offset <= to_offset", name="group_scans_range"),
    # Every window moves one row's end: room on its page keeps that update out of the index.
    postgresql_with={"fillfactor": "50"},
)

group_states = Table(
    "group_states",
    metadata,
    # The order groups are given in: an offset where the consumer reads one stream, else a time in microseconds.
    Column("rank", BigInteger, nullable=False),
    # Where the message with the number 1 lies; until that is seen, the first message that was.
    Column("first_offset", BigInteger, nullable=False),
    Column("opened_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    # When a message of it was last seen: a group is given up when none has come for some time.
    Column("touched_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    moment("told_at"),
    moment("lease_expires_at"),
    moment("done_at"),
    part_of("group_consumers", "consumer_id"),
    Column("stream_id", Integer, nullable=False),
    # How often a member has claimed it: with the holder, what an acknowledgement must match.
    Column("deliveries", Integer, nullable=False, server_default="0"),
    # How often it was handed to the caller, by members whose consumer limits that; not every claim is.
    Column("given", Integer, nullable=False, server_default="0"),
    Column("state", Text, nullable=False),
    Column("holder", Text),
    Column("group_id", Text(collation="C"), nullable=False),
    PrimaryKeyConstraint("consumer_id", "group_id"),
    CheckConstraint("state IN ('open', 'ready', 'claimed', 'done', 'dead')", name="group_states_state"),
    # Each holds only what is still to do: finding the next group costs the same whatever number was done.
    Index(
        "group_states_next",
        "consumer_id",
        "rank",
        "stream_id",
        "first_offset",
        postgresql_where=text("state IN ('ready', 'claimed')"),
    ),
    Index(
        "group_states_idle",
        "consumer_id",
        "touched_at",
        postgresql_where=text("state = 'open' AND told_at IS NULL"),
    ),
)
