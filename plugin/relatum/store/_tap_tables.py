"""Which exchanges are tapped: a broker tells bindings to administrators only. They are primary data."""

from sqlalchemy import Boolean, Column, Identity, Integer, Table, Text, UniqueConstraint, text

from relatum.store._tables import made_at, metadata

taps = Table(
    "taps",
    metadata,
    Column("tap_id", Integer, Identity(always=True), primary_key=True),
    Column("vhost", Text, nullable=False, server_default="/"),
    # Empty: the default exchange, to which nothing can be bound; by the firehose.
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
