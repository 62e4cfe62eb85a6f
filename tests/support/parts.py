"""The parts of the relationship table, filled and turned by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from relatum.store.parts import Part, advance_parts, close_parts, copy_rows, retain_from, table_parts_of
from tests.support import wait_until
from tests.support.place import Place

MESSAGES = 100
"""Messages whose rows a part has."""


@dataclass(frozen=True)
class Parts:
    """A table in parts, and a stream whose rows are written there."""

    engine: sa.Engine
    stream_id: int = 0

    sql = Place.sql

    def write(self, offsets: Sequence[int]) -> None:
        with self.engine.begin() as connection:
            copy_rows(connection, self.lines(offsets))

    def lines(self, offsets: Sequence[int]) -> list[str]:
        return [f"1\tv{offset % 7}\t{self.stream_id}\t{offset * 1000}\t{offset}\n" for offset in offsets]

    def retain(self, first: int) -> None:
        """The stream retains no earlier message any more."""
        with self.engine.begin() as connection:
            retain_from(connection, {self.stream_id: first})

    def all(self) -> list[Part]:
        with self.engine.connect() as connection:
            return table_parts_of(connection)

    @property
    def numbers(self) -> list[int]:
        return [part.part for part in self.all()]

    def offsets(self, part: int | None = None) -> list[int]:
        """The offsets of which there are rows, in all parts or in one."""
        query = "SELECT stream_offset FROM relatum.relationships WHERE :part IS NULL OR part = :part ORDER BY 1"
        with self.engine.connect() as connection:
            return list(connection.scalars(sa.text(query).bindparams(sa.bindparam("part", part, sa.Integer))))

    def turn(self) -> None:
        last = max(part.part for part in self.all() if part.is_opened)
        wait_until(
            lambda: advance_parts(self.engine, 0)[-1].part > last + 1 or self.all()[-2].part > last, what="a next part"
        )

    def close(self) -> None:
        close_parts(self.engine, self.all())

    def close_first(self) -> None:
        """Close part 1, of whose messages none is retained and whose old index is still there; part 2 has others."""
        advance_parts(self.engine)
        self.write(range(MESSAGES))
        self.turn()
        self.write(range(MESSAGES, 2 * MESSAGES))
        assert self.sql("SELECT relatum.close_part(1)") == [(True,)]
        self.retain(MESSAGES)
