"""Deleting many rows in bounded transactions, so that nobody waits long for a lock or for vacuum."""

from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa

from relatum.store import Range, translated_errors

BATCH_ROWS: Final = 10_000
"""Rows deleted in one transaction: a fraction of a second."""


def delete_batch(engine: sa.Engine, table: sa.Table, gone: sa.ColumnElement[bool], batch_rows: int) -> int:
    """Delete a bounded number of rows. They are named by their places, since no table needs a key of its own."""
    place: sa.ColumnElement[Any] = sa.literal_column("ctid")
    chosen = sa.select(place).select_from(table).where(gone).limit(batch_rows)
    # Asked again of the row itself: a range of the coverage may have grown since it was chosen.
    statement = sa.delete(table).where(place == sa.any_(sa.func.array(chosen.scalar_subquery())), gone)
    with translated_errors(), engine.begin() as connection:
        return connection.execute(statement).rowcount


def delete_between(
    engine: sa.Engine,
    column: sa.Column[int],
    of_stream: sa.ColumnElement[bool],
    span: Range,
    batch_rows: int,
    tell: Callable[[int], None],
) -> None:
    """Delete a stream's rows from one offset up to before another, window by window.

    An index by blocks would show the same pages for each batch, those that were emptied before among them: a window
    shows each page about once. Windows grow where little lies and shrink where much does.
    """
    start, stop = span
    width = batch_rows
    while start < stop:
        end = min(stop, start + width)
        deleted = delete_batch(engine, column.table, of_stream & (column >= start) & (column < end), batch_rows)
        if deleted:
            tell(deleted)
        if deleted >= batch_rows:
            width = max(1, width // 2)  # There may be more in this window.
            continue
        start = end
        if deleted < batch_rows // 4:
            width *= 2
