"""Forgetting finished messages, so that the table holds what is to do and what somebody may still ask for."""

import time
from typing import Final

import sqlalchemy as sa

from relatum.checks import checked_count, checked_seconds
from relatum.collecting import _collector_statements as statements
from relatum.store import translated_errors

KEEP_S: Final = 7 * 86_400
"""Seconds a finished message is remembered by default: a producer that was down over a weekend still learns of it."""

BATCH_ROWS: Final = 10_000
"""Rows deleted in one transaction: a fraction of a second."""


def forget_finished(
    engine: sa.Engine,
    collector: int | None = None,
    *,
    batch_rows: int = BATCH_ROWS,
    seconds: float | None = 0.5,
) -> int:
    """Delete messages that were finished longer ago than their collector keeps them; gives how many.

    Args:
        engine: The database.
        collector: The id of one; None: all collectors.
        batch_rows: Rows deleted in one transaction at most.
        seconds: Seconds after which no further batch is begun; None: until none is left.
    """
    checked_count("batch_rows", batch_rows)
    if seconds is not None:
        checked_seconds("seconds", seconds)
    deadline = None if seconds is None else time.monotonic() + seconds
    with translated_errors(), engine.connect() as connection:
        sources = connection.execute(statements.kept, {"in_collector": collector}).all()
    forgotten = 0
    for source in sources:
        bounds = {"of_source": source.source_id, "older_s": source.keep_s, "most": batch_rows}
        deleted = batch_rows
        while deleted == batch_rows and (deadline is None or time.monotonic() < deadline):
            with translated_errors(), engine.begin() as connection:
                deleted = connection.execute(statements.forget, bounds).rowcount
            forgotten += deleted
    return forgotten
