"""What is expected of the messages of streams: definitions, as keys are. They are primary data."""

from sqlalchemy import CheckConstraint, Column, Double, Identity, Integer, Table, Text, UniqueConstraint

from relatum.store._tables import made_at, metadata

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
