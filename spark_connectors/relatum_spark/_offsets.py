"""Ranges of offsets: cut into slices, and shared out over micro-batches. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Slice:
    """Offsets of one stream, from `start` to before `stop`. There may be gaps between them."""

    stream: str
    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


def slices(
    ranges: Iterable[Slice], *, min_partitions: int | None = None, max_records: int | None = None
) -> list[Slice]:
    """Cut ranges into slices of even size, in order; empty ranges give none.

    `min_partitions` slices are made at least, unless there are fewer offsets; none is longer than `max_records`.
    """
    whole = [each for each in ranges if len(each)]
    counts = [1 if max_records is None else -(-len(each) // max_records) for each in whole]
    total = sum(len(each) for each in whole)
    if min_partitions is not None and sum(counts) < min_partitions:
        # Each gets its share of the wanted number, rounded up: so the sum is at least that.
        shares = [-(-len(each) * min_partitions // total) for each in whole]
        counts = [max(pair) for pair in zip(counts, shares, strict=True)]
    return [part for each, count in zip(whole, counts, strict=True) for part in _cut(each, count)]


def _cut(whole: Slice, count: int) -> list[Slice]:
    count = min(count, len(whole))
    edges = [whole.start + len(whole) * number // count for number in range(count + 1)]
    return [Slice(whole.stream, start, stop) for start, stop in pairwise(edges)]


# --- micro-batches ----------------------------------------------------------------------------------------


def plan_end(start: Mapping[str, int], ends: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Return where a micro-batch ends in each stream: at most `limit` offsets after `start` in all.

    Each stream that lags gets one offset, so that none starves, and a part of the rest in proportion to its lag. Where
    more streams lag than `limit`, they get one in turn. An end below the start counts as the start.
    """
    lags = {stream: max(0, ends[stream] - offset) for stream, offset in sorted(start.items())}
    if limit is None or sum(lags.values()) <= limit:
        shares = lags
    elif limit < sum(1 for lag in lags.values() if lag):
        # What was read so far moves on by `limit` with each batch, and so does the turn.
        shares = _in_turn(lags, limit, sum(start.values()))
    else:
        shares = _in_proportion(lags, limit)
    return {stream: start[stream] + count for stream, count in shares.items()}


def _in_turn(lags: Mapping[str, int], limit: int, turn: int) -> dict[str, int]:
    lagging = [stream for stream, lag in lags.items() if lag]
    chosen = {lagging[(turn + number) % len(lagging)] for number in range(limit)}
    return {stream: int(stream in chosen) for stream in lags}


def _in_proportion(lags: Mapping[str, int], limit: int) -> dict[str, int]:
    rest = limit - sum(1 for lag in lags.values() if lag)
    lag_rest = sum(lag - 1 for lag in lags.values() if lag)
    shares = {stream: 1 + rest * (lag - 1) // lag_rest if lag else 0 for stream, lag in lags.items()}
    # What rounding down left over goes to those it took most from, one offset each.
    left = limit - sum(shares.values())
    by_remainder = sorted(
        (stream for stream, lag in lags.items() if shares[stream] < lag),
        key=lambda stream: -(rest * (lags[stream] - 1) % lag_rest),
    )
    return shares | {stream: shares[stream] + 1 for stream in by_remainder[:left]}
