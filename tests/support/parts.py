"""The parts of the relationship table, filled and turned by hand."""

from collections.abc import Sequence

import sqlalchemy as sa

from relatum.store import Part, close_parts, copy_rows, retain_from, table_parts_of, turn_parts
from tests.support import wait_until

MESSAGES = 100
"""Messages whose rows a part has."""


def write(engine: sa.Engine, stream_id: int, offsets: Sequence[int]) -> None:
    """Rows of a key, one for each offset, in one transaction."""
    with engine.begin() as connection:
        copy_rows(connection, lines(stream_id, offsets))


def lines(stream_id: int, offsets: Sequence[int]) -> list[str]:
    """The lines of such rows."""
    return [f"1\tv{offset % 7}\t{stream_id}\t{offset * 1000}\t{offset}\n" for offset in offsets]


def parts_of(engine: sa.Engine) -> list[Part]:
    """All parts."""
    with engine.connect() as connection:
        return table_parts_of(connection)


def offsets_in(engine: sa.Engine, part: int | None = None) -> list[int]:
    """The offsets of which there are rows, in all parts or in one."""
    query = "SELECT stream_offset FROM relatum.relationships WHERE :part IS NULL OR part = :part ORDER BY 1"
    with engine.connect() as connection:
        return list(connection.scalars(sa.text(query).bindparams(sa.bindparam("part", part, sa.Integer))))


def turn(engine: sa.Engine) -> None:
    """Begin the next part, however little is in the open one."""
    last = max(part.part for part in parts_of(engine) if part.is_opened)
    wait_until(lambda: turn_parts(engine, 0)[-1].part > last + 1 or parts_of(engine)[-2].part > last, what="a part")


def close(engine: sa.Engine) -> None:
    """Close what can be closed."""
    close_parts(engine, parts_of(engine))


def close_first(engine: sa.Engine, stream_id: int) -> None:
    """Close part 1, of whose messages none is retained and whose old index is still there; part 2 has others."""
    turn_parts(engine)
    write(engine, stream_id, range(MESSAGES))
    turn(engine)
    write(engine, stream_id, range(MESSAGES, 2 * MESSAGES))
    with engine.begin() as connection:
        assert connection.execute(sa.text("SELECT relatum.close_part(1)")).scalar_one()
        retain_from(connection, {stream_id: MESSAGES})
