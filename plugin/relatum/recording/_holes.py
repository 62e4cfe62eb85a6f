"""What retention took before it was recorded, lately: for the metrics, so that somebody is told of it."""

from collections.abc import Iterable
from typing import Final

import sqlalchemy as sa

from relatum.store import events, interval

LATELY_S: Final = 86_400
"""Seconds that a hole is told of after it was noticed: a day, so that nobody misses it and no alert stays for ever.

A counter would not do: a hole is noticed at a recorder's start, most often, and a counter that begins at 1 shows no
increase.
"""

_MOST: Final = 1000
"""Holes looked at of one stream, the newest."""


def late_holes(connection: sa.Connection, stream_ids: Iterable[int]) -> dict[int, list[tuple[float, int]]]:
    """The holes noticed within `LATELY_S`, by stream: how many seconds ago, and how many offsets each has."""
    age_s = sa.extract("epoch", sa.func.now() - events.c.at)
    rows = connection.execute(
        sa.select(events.c.stream_id, age_s, events.c.to_offset - events.c.from_offset)
        .where(events.c.stream_id == sa.any_(sa.literal(sorted(stream_ids), sa.ARRAY(sa.Integer))))
        .where(events.c.kind == "hole", events.c.to_offset.is_not(None))
        .where(events.c.at > sa.func.now() - interval(LATELY_S))
        .order_by(events.c.event_id.desc())
    )
    found: dict[int, list[tuple[float, int]]] = {}
    for stream_id, age, offsets in rows:
        of_stream = found.setdefault(stream_id, [])
        if len(of_stream) < _MOST:
            of_stream.append((float(age), int(offsets)))
    return found
