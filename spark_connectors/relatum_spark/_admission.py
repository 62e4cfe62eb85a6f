"""How much of each stream one micro-batch reads. No I/O."""

from collections.abc import Mapping


def admit(lags: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Offsets to read of each stream now: all there are, or a fair part of them.

    Each stream that lags gets one offset, so that none starves, and of the rest its part in proportion to its lag.
    Where there are more such streams than `limit`, see `admit_in_turn`.

    Args:
        lags: Offsets that wait, by stream; 0 or more.
        limit: Offsets in all at most; None for no limit.

    Returns:
        As many streams; at most the lag each; the smaller of `limit` and all lags in sum.
    """
    total = sum(lags.values())
    if limit is None or total <= limit:
        return dict(lags)
    rest = limit - sum(1 for lag in lags.values() if lag)
    if rest < 0:
        raise ValueError("fewer offsets than streams")
    lag_rest = sum(lag - 1 for lag in lags.values() if lag)
    admitted = {stream: 1 + rest * (lag - 1) // lag_rest if lag else 0 for stream, lag in lags.items()}
    # What rounding down left over: at most one for each stream, to those it took most from.
    missing = limit - sum(admitted.values())
    by_remainder = sorted(
        (stream for stream, lag in lags.items() if admitted[stream] < lag),
        key=lambda stream: -(rest * (lags[stream] - 1) % lag_rest),
    )
    for stream in by_remainder[:missing]:
        admitted[stream] += 1
    return admitted


def admit_in_turn(lags: Mapping[str, int], limit: int, turn: int) -> dict[str, int]:
    """One offset of each of `limit` streams out of more that lag, beginning with number `turn`, wherever that wraps."""
    lagging = [stream for stream, lag in lags.items() if lag]
    chosen = {lagging[(turn + number) % len(lagging)] for number in range(min(limit, len(lagging)))}
    return {stream: int(stream in chosen) for stream in lags}


def plan_end(start: Mapping[str, int], ends: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Where a micro-batch ends, by stream: from `start` on, at most `limit` offsets in all.

    Args:
        start: The next offset to read, by stream.
        ends: The offset after the last one there is, for the streams of `start`; one below the start counts as it.
        limit: Offsets in all at most; None for no limit.
    """
    lags = {stream: max(0, ends[stream] - offset) for stream, offset in sorted(start.items())}
    if limit is not None and limit < sum(1 for lag in lags.values() if lag):
        # What was read so far moves on by `limit` with each batch: so does the turn.
        admitted = admit_in_turn(lags, limit, sum(start.values()))
    else:
        admitted = admit(lags, limit)
    return {stream: start[stream] + count for stream, count in admitted.items()}
