"""What retention took before it was recorded, lately: for the metrics, so that somebody is told of it."""

from typing import Final

import sqlalchemy as sa

from relatum.store import events

LATELY_S: Final = 86_400
"""Seconds that a hole is told of after it was noticed: a day, so that nobody misses it and no alert stays for ever.

A counter would not do: a hole is noticed at a recorder's start, most often, and a counter that begins at 1 shows no
increase.
"""

_MOST: Final = 1000
"""Holes looked at, the newest."""


def late_holes(connection: sa.Connection, stream_id: int) -> list[tuple[float, int]]:
    """The holes noticed within `LATELY_S`: how many seconds ago, and how many offsets each has."""
    age_s = sa.extract("epoch", sa.func.now() - events.c.at)
    rows = connection.execute(
        sa.select(age_s, events.c.to_offset - events.c.from_offset)
        .where(events.c.stream_id == stream_id, events.c.kind == "hole", events.c.to_offset.is_not(None))
        .where(events.c.at > sa.func.now() - sa.func.make_interval(0, 0, 0, 0, 0, 0, LATELY_S))
        .order_by(events.c.event_id.desc())
        .limit(_MOST)
    )
    return [(float(age), int(offsets)) for age, offsets in rows]
