"""Lookups by time, done the slow way: every message is looked at."""

from collections.abc import Iterable
from typing import Literal

Place = tuple[int, int, int]
"""A message's time, partition and offset: its place in the order."""

Moment = tuple[int, int | None, int]
"""A time, the partition and the offset of the message whose it is; no partition for one that is elsewhere."""


def is_beyond(place: Place, moment: Moment, where: Literal["after", "before"], *, inclusive: bool) -> bool:
    time, partition, offset = moment
    if partition is not None:
        return place > (time, partition, offset) if where == "after" else place < (time, partition, offset)
    if inclusive and place[0] == time:
        return True
    return place[0] > time if where == "after" else place[0] < time


def after(places: Iterable[Place], moment: Moment, *, inclusive: bool = False) -> Place | None:
    return min((place for place in places if is_beyond(place, moment, "after", inclusive=inclusive)), default=None)


def before(places: Iterable[Place], moment: Moment, *, inclusive: bool = False) -> Place | None:
    return max((place for place in places if is_beyond(place, moment, "before", inclusive=inclusive)), default=None)


def nearest(places: list[Place], moment: Moment) -> Place | None:
    """The place whose time is nearest: of equally near ones the earlier, of those of an equal time the last before."""
    candidates = [before(places, moment, inclusive=True), after(places, moment)]
    near = [place for place in candidates if place is not None]
    return min(near, key=lambda place: (abs(place[0] - moment[0]), place), default=None)


def window(places: Iterable[Place], moment: Moment, before_us: int, after_us: int) -> list[Place]:
    time, partition, offset = moment
    return sorted(
        place
        for place in places
        if time - before_us <= place[0] <= time + after_us and place[1:] != (partition, offset)
    )
