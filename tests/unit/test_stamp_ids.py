"""Ids of messages that have none."""

import threading
import time
import uuid

from relatum.uuid7 import uuid7


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
        blocks.setdefault(one[19:], []).append(one)
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
