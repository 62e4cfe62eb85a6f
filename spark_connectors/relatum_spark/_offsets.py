"""Offsets in options and partitions: JSON in and out, ranges cut into slices. No I/O."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX

EARLIEST: Final = -2
"""Stands for the first message retained, in JSON as in Kafka's."""

LATEST: Final = -1
"""Stands for the end of the stream, in JSON as in Kafka's."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Offsets of one stream, from `start` to before `stop`. There may be gaps between them."""

    stream: str
    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


def slices(
    bounds: Mapping[str, tuple[int, int]] | Iterable[Slice],
    *,
    min_partitions: int | None = None,
    max_records: int | None = None,
) -> list[Slice]:
    """Cut ranges of offsets into slices of even size, in the order of the streams and offsets; empty ranges give none.

    Args:
        bounds: (start, stop) by stream, or slices.
        min_partitions: How many slices there should be at least; fewer only where there are fewer offsets.
        max_records: Offsets in one slice at most; None for no limit.
    """
    if isinstance(bounds, Mapping):
        bounds = [Slice(stream, start, stop) for stream, (start, stop) in bounds.items()]
    whole = [each for each in bounds if len(each)]
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


def parse_offsets(text: str, *, option: str) -> dict[str, int]:
    """Offsets by stream from JSON: `{"orders": 120}`; each is the next one to read, -2 the first, -1 the end.

    Raises:
        InvalidInput: it is not JSON of that form; names the option.
    """
    return _parse_numbers(text, option, EARLIEST)


def parse_moments(text: str, *, option: str) -> dict[str, int]:
    """Milliseconds since 1970 by stream from JSON.

    Raises:
        InvalidInput: it is not JSON of that form; names the option.
    """
    return _parse_numbers(text, option, 0)


def _parse_numbers(text: str, option: str, least: int) -> dict[str, int]:
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


def offsets_json(offsets: Mapping[str, int]) -> str:
    """Offsets by stream as JSON, in the order of the names."""
    return json.dumps(dict(sorted(offsets.items())), ensure_ascii=False)
