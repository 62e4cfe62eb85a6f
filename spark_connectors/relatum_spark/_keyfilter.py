"""Messages that carry one of some values of a key: their offsets from the table, and the check of each."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from relatum.errors import InvalidRelationshipKey
from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message, RecordBatch, StreamReader
from relatum.recording import Extractor, is_same
from relatum.store import (
    coverage_of,
    covered,
    current_stream,
    last_position,
    may_hold_offsets,
    missing,
    relationships,
)
from relatum_spark._offsets import Slice


@dataclass(frozen=True)
class KeyFilter:
    """Messages that carry one of some values of a key. Can be pickled.

    Attributes:
        definition: The key.
        values: Canonical values.
    """

    definition: KeyDefinition
    values: frozenset[str]

    @classmethod
    def of(cls, definition: KeyDefinition, values: Iterable[Any]) -> "KeyFilter":
        """A filter for values as a caller gives them; a composite's are sequences.

        Raises:
            InvalidRelationshipKey: no message can carry one of the values.
        """
        try:
            return cls(definition, frozenset(definition.canonical_query(value) for value in values))
        except InvalidValue as error:
            message = f"option keyValues: no message can carry one of these values of {definition.name!r}: {error}"
            raise InvalidRelationshipKey(message, key=definition.name, reason=error.reason.value) from error

    def passes(self, message: Message) -> bool:
        """Whether the message carries one of the values."""
        return not self.values.isdisjoint(self.definition.values_of(message))

    def passing(self, batch: RecordBatch) -> list[int]:
        """The rows of a batch that carry one of the values; only the key is decoded."""
        values = self.values
        extract, chunk_ms = Extractor([self.definition]).from_record, batch.chunk_ms
        found = (extract(record, chunk_ms).values for record in batch.records)
        return [row for row, pairs in enumerate(found) if any(value in values for _, value in pairs)]


@dataclass(frozen=True, slots=True)
class Found:
    """What the table says of a range: the offsets it names, and the parts it cannot answer for."""

    offsets: tuple[int, ...]
    unknown: list[Slice]


def look_up(connection: sa.Connection, reader: StreamReader, wanted: Slice, only: KeyFilter, vhost: str) -> Found:
    """Where in a range messages with a filter's values lie.

    Offsets that are not recorded for the key are `unknown`, so the answer is right however far the table is behind; so
    are all of them where the stream is not the one that was recorded.

    Args:
        connection: To the database, in a transaction that sees one state (REPEATABLE READ).
        reader: Asked for the message that was recorded last, to know the stream again.
        wanted: The range.
        only: The key and its values.
        vhost: The stream's virtual host.
    """
    row = current_stream(connection, vhost, wanted.stream)
    ranges = [] if row is None else coverage_of(connection, [row.stream_id])
    position = last_position(ranges)
    if row is None or (
        position is not None and not is_same(reader, wanted.stream, position, reader.bounds(wanted.stream))
    ):
        return Found((), [wanted])
    whole = (wanted.start, wanted.stop)
    known = covered(ranges, only.definition.key_id)
    unknown = missing(whole, known)
    statement = (
        sa.select(relationships.c.stream_offset)
        .distinct()
        .where(
            relationships.c.key_id == only.definition.key_id,
            relationships.c.value == sa.any_(sa.literal(sorted(only.values), sa.ARRAY(sa.Text))),
            relationships.c.stream_id == row.stream_id,
            relationships.c.stream_offset >= wanted.start,
            relationships.c.stream_offset < wanted.stop,
            may_hold_offsets(row.stream_id, wanted.start, wanted.stop),
        )
        .order_by(relationships.c.stream_offset)
    )
    offsets = connection.execute(statement).scalars()
    # Rows may lie in ranges that are not recorded (yet, or of a key defined again): those ranges are read anyway.
    inside = tuple(offset for offset in offsets if not any(start <= offset < stop for start, stop in unknown))
    return Found(inside, [Slice(wanted.stream, start, stop) for start, stop in unknown])
