"""Routing keys to streams of a super stream."""

import pytest

from relatum.superstreams import partition_of


@pytest.mark.parametrize(("key", "place"), [("hello1", 1), ("hello2", 0), ("hello3", 1), ("hello4", 2), ("hello5", 0)])
def test_places_are_those_of_other_clients(key: str, place: int) -> None:
    """A key goes where RabbitMQ's Java, Go, .NET and Rust clients send it."""
    assert partition_of(key, 3) == place
    assert partition_of(key.encode(), 3) == place


def _murmur3(data: bytes, seed: int) -> int:
    """MurmurHash3 x86 32-bit, written after its description."""
    value, mask = seed, 0xFFFFFFFF

    def mixed(block: int) -> int:
        block = block * 0xCC9E2D51 & mask
        return ((block << 15 | block >> 17) & mask) * 0x1B873593 & mask

    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        value ^= mixed(int.from_bytes(data[at : at + 4], "little"))
        value = ((value << 13 | value >> 19) & mask) * 5 + 0xE6546B64 & mask
    if data[whole:]:
        value ^= mixed(int.from_bytes(data[whole:], "little"))
    value ^= len(data)
    value = (value ^ value >> 16) * 0x85EBCA6B & mask
    value = (value ^ value >> 13) * 0xC2B2AE35 & mask
    return value ^ value >> 16


@pytest.mark.parametrize("key", ["", "a", "ab", "abc", "abcd", "order-4711", "ключ", "鍵🔑", "x" * 300])
def test_hash_is_murmur3_over_utf8(key: str) -> None:
    """The hash is taken of the UTF-8 bytes, and the remainder is unsigned, for any number of streams."""
    for partitions in (1, 2, 3, 7, 200):
        assert partition_of(key, partitions) == _murmur3(key.encode(), 104_729) % partitions


def test_known_murmur3() -> None:
    """The function these tests compare with gives the published values of MurmurHash3."""
    assert _murmur3(b"", 0) == 0
    assert _murmur3(b"", 1) == 0x514E28B7
    assert _murmur3(b"test", 0x9747B28C) == 0x704B81DC
    assert _murmur3(b"Hello, world!", 0x9747B28C) == 0x24884CBA
