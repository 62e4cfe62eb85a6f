"""Where a consumer name begins in each partition, if it is not at the first message. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class MovedBefore(NamedTuple):
    """What matters of a move to one who begins in the middle.

    Attributes:
        source: The partition its contexts left.
        target: The one they went to.
        fence_offset: Where its fence lies in the source; None while that is not known.
        begins: Where its marker lies in the target, or an offset below that.
    """

    source: Any
    target: Any
    fence_offset: int | None
    begins: int


def consistent_starts(starts: Mapping[Any, int], moves: Iterable[MovedBefore]) -> dict[Any, int]:
    """Offsets to begin at, from which each context's messages come in order.

    The ends of several partitions, or their messages of one time, are read one after the other. So one may begin behind
    a marker while the other begins before its fence: then it begins at the marker, to hold what is behind it. Those who
    begin so get some messages from before they began, and miss none.

    Args:
        starts: Where each partition was to begin. They were read before the moves.
        moves: All moves of the super stream. One whose fence is not known has no marker yet, and does not matter.
    """
    consistent = dict(starts)
    known = [move for move in moves if move.fence_offset is not None]
    goes_on = True
    while goes_on:
        goes_on = False
        for move in known:
            source, target = consistent.get(move.source), consistent.get(move.target)
            if source is None or target is None or move.fence_offset is None:
                continue
            if source <= move.fence_offset and move.begins < target:
                consistent[move.target], goes_on = move.begins, True
    return consistent
