"""Chunks that are kept are found by the offsets they hold, and are bounded."""

import random

from hypothesis import given
from hypothesis import strategies as st

from relatum.reading import KeptChunks
from relatum.wire import Chunk


def chunk(first: int, records: int, size: int = 100) -> Chunk:
    """A chunk with records from an offset on."""
    return Chunk(0, first, records, records, 0, 1, bytes(size), 0, size)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=30),
    offsets=st.sets(st.integers(0, 400)),
    chance=st.randoms(use_true_random=False),
)
def test_each_offset_is_found_in_its_chunk(
    lengths: list[tuple[int, int]], offsets: set[int], chance: random.Random
) -> None:
    """Whatever order the chunks came in, with gaps between them, and some more than once."""
    chunks, first = [], 0
    for records, gap in lengths:
        chunks.append(chunk(first, records))
        first += records + gap
    held = [each for each in chunks if chance.random() < 0.7]
    kept = KeptChunks()
    for each in sorted([*held, *held[:3]], key=lambda _: chance.random()):
        kept.keep("s", each)
    expected = {each: [n for n in sorted(offsets) if each.first_offset <= n <= each.last_offset] for each in held}
    assert dict(kept.holding("s", sorted(offsets))) == {each: inside for each, inside in expected.items() if inside}
    assert list(kept.holding("other", sorted(offsets))) == []


def test_the_oldest_go_where_there_are_too_many() -> None:
    """Bytes are counted over all streams; one that came twice is one."""
    kept = KeptChunks(bytes_max=350)
    for n in (3, 1, 1, 2, 0):
        kept.keep(f"s{n % 2}", chunk(10 * n, 10))
    found = [n for n in range(4) if list(kept.holding(f"s{n % 2}", [10 * n]))]
    assert found == [0, 1, 2]
    kept.keep("s0", chunk(100, 1, size=1000))
    assert not any(list(kept.holding(f"s{n % 2}", [10 * n])) for n in (0, 1, 2, 10))
