"""Ranges of offsets: parsed from options, cut into slices, and shared out over micro-batches. No I/O."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX, TIME_US_MAX

EARLIEST: Final = -2
"""The first message retained, in JSON as in Kafka's."""

LATEST: Final = -1
"""The end of the stream, in JSON as in Kafka's."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Offsets of one stream, from `start` to before `stop`. There may be gaps between them."""

    stream: str
    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a read begins or ends in each stream: at an offset, or at a moment in milliseconds since 1970."""

    option: str
    number: int | Mapping[str, int]
    """One for all streams, or one by stream."""
    is_moment: bool = False

    def of(self, stream: str) -> int:
        """Return the offset or moment of a stream; raises `InvalidInput` where the option leaves the stream out."""
        if isinstance(self.number, int):
            return self.number
        if stream not in self.number:
            raise InvalidInput(f"option {self.option} says nothing of the stream {stream!r}")
        return self.number[stream]


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


# --- options ----------------------------------------------------------------------------------------------


def parse_place(side: str, text_of: Callable[[str], str | None], default: int) -> Place:
    """Read where a read begins (`side` "starting") or ends ("ending") from the options.

    A moment for all streams goes before moments by stream, and those go before offsets, as in Kafka's source.
    """
    by_moment, by_moments, by_offset = (f"{side}{name}" for name in ("Timestamp", "OffsetsByTimestamp", "Offsets"))
    if (text := text_of(by_moment)) is not None:
        if not text.strip().isdecimal() or int(text) > TIME_US_MAX // 1000:
            raise InvalidInput(f"option {by_moment}: {text!r} is not a moment in milliseconds since 1970")
        return Place(by_moment, int(text), is_moment=True)
    if (text := text_of(by_moments)) is not None:
        return Place(by_moments, _numbers(text, by_moments, 0), is_moment=True)
    text = text_of(by_offset)
    if text is None:
        return Place(by_offset, default)
    words = {"latest": LATEST} | ({"earliest": EARLIEST} if side == "starting" else {})
    if (word := text.strip().lower()) in words:
        return Place(by_offset, words[word])
    offsets = _numbers(text, by_offset, EARLIEST)
    if side == "ending" and EARLIEST in offsets.values():
        raise InvalidInput(f"option {by_offset}: {text!r} ends at -2, the beginning")
    return Place(by_offset, offsets)


def _numbers(text: str, option: str, least: int) -> dict[str, int]:
    """Read numbers by stream from JSON such as `{"orders": 120}`."""
    try:
        numbers = json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError:
        raise InvalidInput(f'option {option}: {text!r} is none of its words, nor JSON like {{"orders": 0}}') from None
    except ValueError as error:
        raise InvalidInput(f"option {option}: {error}") from None
    if not isinstance(numbers, dict):
        raise InvalidInput(f"option {option}: {text!r} is not a JSON object of numbers by stream")
    for stream, number in numbers.items():
        if type(number) is not int or not least <= number <= INTEGER_MAX:
            raise InvalidInput(
                f"option {option}: {number!r} of the stream {stream!r} must be a whole number >= {least}"
            )
    return numbers


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a stream is named twice")
    return found


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
