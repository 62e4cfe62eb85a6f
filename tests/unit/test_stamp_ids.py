"""Ids of messages that have none."""

import threading
import time
import uuid
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.limits import TIME_US_MAX
from relatum.uuid7 import MARK, time_us_of, uuid7


def test_ids_are_uuids_of_version_7() -> None:
    """Version, variant and the millisecond stand where RFC 9562 has them."""
    now = time.time_ns()
    got = uuid.UUID(uuid7(now))
    assert (got.version, got.variant) == (7, uuid.RFC_4122)
    assert got.int >> 80 == now // 1_000_000


def test_ids_of_one_moment_differ_and_ascend() -> None:
    """Ten thousand ids of one millisecond: all different; those of one block of 4,096 in order."""
    ids = [uuid7(1) for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    blocks: dict[str, list[str]] = {}
    for one in ids:
        blocks.setdefault(one[19] + one[23:], []).append(one)
    assert all(block == sorted(block) for block in blocks.values())


def test_threads_do_not_share_an_id() -> None:
    """Threads that make ids at once get different ones, also where blocks end."""
    made: list[list[str]] = [[] for _ in range(8)]

    def make(into: list[str]) -> None:
        into.extend(uuid7(2) for _ in range(10_000))

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one for into in made for one in into}) == 80_000


@given(st.integers(0, TIME_US_MAX * 1000))
def test_an_id_says_when_it_was_made(time_ns: int) -> None:
    """To the microsecond or the one before, for any moment; later ids do not say earlier times."""
    time_us = time_us_of(uuid7(time_ns))
    assert time_us is not None
    assert time_ns - 1250 <= time_us * 1000 <= time_ns
    later_us = time_us_of(uuid7(time_ns + 1))
    assert later_us is not None
    assert later_us >= time_us


OURS: Final = f"00000000-0000-7000-8000-000000{MARK}"
"""As `uuid7` makes them; spelled out, as names of tests are to be the same in all processes that run them."""


@pytest.mark.parametrize(
    "other",
    [
        None,
        7,
        "",
        MARK,
        OURS.encode(),
        "0" * 30 + MARK,
        "mine-0000-0000-8000-8000000000" + MARK,
        OURS[:14] + "4" + OURS[15:],
        OURS[:-1],
        OURS.upper(),
        "f" * 8 + OURS[8:],
        OURS[:-6] + "c53a9f",
    ],
)
def test_other_ids_say_nothing(other: object) -> None:
    """No id, of another version, of a time that is none, of another end: no time is read out of those."""
    assert time_us_of(other) is None


@given(st.uuids())
def test_ids_of_others_say_nothing(other: uuid.UUID) -> None:
    """Neither random ones nor UUIDv7 of any time."""
    as_v7 = uuid.UUID(int=other.int & ~(0xF << 76) | 0x7 << 76)
    for text in (str(other), str(as_v7)):
        assert text.endswith(MARK) or time_us_of(text) is None
