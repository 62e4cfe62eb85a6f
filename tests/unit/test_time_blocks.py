"""The sparse index of times."""

from hypothesis import given
from hypothesis import strategies as st

from relatum.limits import TIME_BLOCK_DISORDER_US_MAX, TIME_BLOCK_MESSAGES_MAX
from tests.support._recording import time_blocks, width_class

times = st.lists(st.integers(-(10**7), 10**7) | st.integers(0, 100), min_size=1, max_size=400)


@given(times, st.none() | st.integers(-(10**7), 10**7))
def test_every_message_lies_in_a_block_whose_ends_are_real(values: list[int], high: int | None) -> None:
    """What a look-up by time relies on holds whatever the order of times is."""
    offsets = [3 * place + 7 for place in range(len(values))]
    blocks, after = time_blocks(offsets, values, high)
    for offset, time_us in zip(offsets, values, strict=True):
        holding = [b for b in blocks if b.min_us <= time_us <= b.max_us and b.first_offset <= offset <= b.last_offset]
        assert holding
    for block in blocks:
        inside = {t for o, t in zip(offsets, values, strict=True) if block.first_offset <= o <= block.last_offset}
        assert {block.min_us, block.max_us} <= inside
        assert block.max_us - block.min_us <= 4**block.width_class
    assert after == max(values if high is None else [*values, high])


@given(times)
def test_messages_in_order_take_one_block_for_each_full_count(values: list[int]) -> None:
    """Order makes the index sparse, however far apart the times are."""
    values = sorted(values)
    blocks, _ = time_blocks(range(len(values)), values, None)
    assert len(blocks) == -(-len(values) // TIME_BLOCK_MESSAGES_MAX)


@given(times)
def test_disorder_never_makes_wide_blocks(values: list[int]) -> None:
    """A block that is not in order is at most a second wide, so a look-up reads few of them."""
    offsets = range(len(values))
    blocks, _ = time_blocks(offsets, values, 10**8)
    assert all(block.max_us - block.min_us <= TIME_BLOCK_DISORDER_US_MAX for block in blocks)


@given(st.integers(0, 2**62))
def test_a_width_class_is_the_smallest_that_holds_the_width(width: int) -> None:
    """The class bounds the width from above, and the next smaller one does not."""
    found = width_class(width)
    assert width <= 4**found or found == width == 0
    assert found <= 1 or width > 4 ** (found - 1)
