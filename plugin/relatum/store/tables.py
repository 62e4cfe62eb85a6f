"""The tables of the schema `relatum`, for statements: names and types of the columns that are used, and who may write.

What is in each, its constraints, defaults and indexes stand in `relatum_migrations/sql/schema.sql`, and nowhere else.

Statements that change several kinds of rows lock them in this order, or two of them wait for each other for ever:
placements by name, the row of `super_streams`, partitions by their id.
"""

from typing import Any, Final

import sqlalchemy as sa

from relatum.errors import AccessRefused

SCHEMA: Final = "relatum"

metadata = sa.MetaData(schema=SCHEMA)

_TYPES: Final[dict[str, Any]] = {
    "boolean": sa.Boolean(),
    "small": sa.SmallInteger(),
    "integer": sa.Integer(),
    "big": sa.BigInteger(),
    "double": sa.Double(),
    "text": sa.Text(),
    # Compared byte by byte: values, and what is looked up among many.
    "sorted": sa.Text(collation="C"),
    "moment": sa.DateTime(timezone=True),
    "uuid": sa.Uuid(),
    "smalls": sa.ARRAY(sa.SmallInteger),
    "texts": sa.ARRAY(sa.Text),
}


def _table(name: str, **columns: str) -> sa.Table:
    """A table with columns by their type."""
    named = ((each, _TYPES[kind]) for kind, names in columns.items() for each in names.split())
    return sa.Table(name, metadata, *(sa.Column(each, of_type) for each, of_type in named))


brokers = _table("brokers", uuid="broker_id", text="cluster_name")

streams = _table(
    "streams",
    integer="stream_id generation",
    text="vhost name super_stream state lease_holder",
    boolean="record_time",
    big="first_offset retained_from",
    moment="created_at replaced_at",
    uuid="broker_id",
)

keys = _table(
    "keys",
    small="key_id names_key_id",
    sorted="name",
    text="type",
    texts="sources",
    boolean="masked",
    moment="since removed_at",
)

coverage = _table(
    "coverage",
    big="coverage_id from_offset to_offset last_offset last_fingerprint last_chunk_ms",
    integer="stream_id",
    smalls="key_ids",
    text="kind",
    boolean="with_time is_tail over_amqp",
    moment="recorded_at",
)

relationships = _table(
    "relationships", big="stream_offset time_us", integer="stream_id part", small="key_id", sorted="value"
)

table_parts = _table("table_parts", integer="part", moment="closed_at")

part_streams = _table("part_streams", integer="part stream_id", big="first_offset last_offset row_count")

part_keys = _table("part_keys", integer="part", small="key_id", sorted="low high")

time_blocks = _table(
    "time_blocks", big="min_us max_us first_offset last_offset", integer="stream_id", small="width_class"
)

checkpoints = _table("checkpoints", integer="stream_id", big="last_offset fingerprint chunk_ms")

receipts = _table("receipts", sorted="message_id", integer="stream_id", big="stream_offset", moment="recorded_at")

skips = _table("skips", integer="stream_id", small="key_id", text="reason", big="count")

events = _table("events", big="event_id from_offset to_offset", integer="stream_id", text="kind detail", moment="at")

expectations = _table(
    "expectations",
    integer="expectation_id",
    text="vhost of_stream follows",
    sorted="name by_key",
    double="within_s grace_s",
    moment="created_at",
)

group_scans = _table("group_scans", integer="consumer_id stream_id", big="from_offset to_offset")

group_states = _table("group_states", integer="stream_id")

super_streams = _table("super_streams", integer="super_stream_id", text="vhost header", sorted="name")

super_stream_partitions = _table(
    "super_stream_partitions",
    integer="partition_id super_stream_id place",
    sorted="stream",
    text="binding_key state",
    big="open_sets",
)


_WRITABLE: Final = sa.text(
    "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = 'relatum' AND c.relkind IN ('r', 'p') AND NOT c.relispartition "
    "AND (has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE') "
    "OR has_any_column_privilege(c.oid, 'INSERT, UPDATE')) ORDER BY 1"
)

_MAY_RECORD: Final = sa.text("SELECT has_table_privilege('relatum.relationships', 'INSERT'), current_user")


def check_may_record(connection: sa.Connection) -> None:
    """See that the user may write what a recorder writes.

    Raises:
        AccessRefused: it may not.
    """
    may, user = connection.execute(_MAY_RECORD).one()
    if not may:
        raise AccessRefused(
            f"PostgreSQL lets the user {user!r} read here, but not record: grant it the role that may "
            "(GRANT relatum_recorder TO its_name), or give the URL of another user"
        )


def writable_tables(connection: sa.Connection) -> list[str]:
    """The tables of the schema that the user may write, whatever the session is set to."""
    return list(connection.execute(_WRITABLE).scalars())
