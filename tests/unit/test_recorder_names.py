"""By which name recorders share: the same for the same streams, and never too long for an index."""

from relatum.recording._recorder import SHARED_NAME_BYTES_MAX, shared_name


def test_the_same_streams_are_one_name_in_whatever_order() -> None:
    """Also where one is named twice."""
    assert shared_name("/", ["b", "a", "b"]) == shared_name("/", ["a", "b"]) == "/ a,b"
    assert shared_name("/", ["a"]) != shared_name("other", ["a"])


def test_thousands_of_streams_are_a_short_name() -> None:
    """PostgreSQL refuses an index entry of more than 2,700 bytes; 2,000 names are more than that."""
    names = [f"orders-of-region-{n}" for n in range(2_000)]
    name = shared_name("/", names)
    assert len(name.encode()) <= SHARED_NAME_BYTES_MAX
    assert name == shared_name("/", reversed(names)) != shared_name("/", names[:-1])
