"""The streams of a super stream, and the one that a key goes to."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import mmh3

from relatum.checks import checked_count, checked_text, shown
from relatum.errors import InvalidInput, NotFound
from relatum.headers import NAME_BYTES_MAX

SEED: Final = 104_729
"""The seed all clients share."""


def partition_of(routing_key: str | bytes, partitions: int) -> int:
    """The place, from 0, of a routing key's stream among those of a super stream in their order.

    Args:
        routing_key: Text counts as its UTF-8 bytes.
        partitions: How many streams there are, from 1.

    Raises:
        InvalidInput: the key cannot be sent: no text and no bytes, or half a surrogate pair in it.
    """
    # Encoded here: half a surrogate pair in a text ends the process in mmh3 5.2.
    if isinstance(routing_key, str):
        try:
            routing_key = routing_key.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"a key cannot have half a surrogate pair: {shown(routing_key)}") from None
    elif not isinstance(routing_key, bytes):
        raise InvalidInput(f"a key is text or bytes, not {shown(routing_key)}")
    return mmh3.hash(routing_key, SEED, signed=False) % partitions


LAYOUT_MAX: Final = 100_000
"""Partitions of a layout that is given by their number; RabbitMQ itself makes 1,000 at most."""


def checked_stream_name(name: Any, what: str = "A super stream's name") -> str:
    """The name of a super stream or of a stream, as it was given.

    Raises:
        InvalidInput: it is none. RabbitMQ takes ends of lines out of names: what is asked for by one with them in it
            would be another thing than what is made.
    """
    if not isinstance(name, str):
        raise InvalidInput(f"{what} is text, not {type(name).__name__}.")
    if not 1 <= len(name.encode(errors="surrogatepass")) <= NAME_BYTES_MAX:
        raise InvalidInput(f"{what} has 1 to {NAME_BYTES_MAX} bytes; {name[:40]!r} has not.")
    checked_text(what, name)
    if "\n" in name or "\r" in name:
        raise InvalidInput(f"{what} is on one line; {name[:40]!r} is not.")
    return name


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """One stream of a super stream.

    Attributes:
        place: Its place among the partitions in their order, from 0.
        stream: The stream's name.
        binding_key: The routing key by which the super stream's exchange leads to it.
    """

    place: int
    stream: str
    binding_key: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A super stream and its partitions in their order.

    Attributes:
        super_stream: The super stream's name, which is its exchange's.
        partitions: At least one.
    """

    super_stream: str
    partitions: tuple[Partition, ...]

    def __post_init__(self) -> None:
        if not self.partitions:
            raise InvalidInput(f"Super stream {self.super_stream!r} needs at least one partition.")

    @classmethod
    def numbered(cls, super_stream: str, partitions: int) -> Self:
        """The layout of a super stream made with a number of partitions: streams `NAME-0`, `NAME-1` and so on."""
        checked_stream_name(super_stream)
        checked_count("partitions", partitions, most=LAYOUT_MAX)
        return cls.keyed(super_stream, [str(place) for place in range(partitions)])

    @classmethod
    def keyed(cls, super_stream: str, binding_keys: Sequence[str]) -> Self:
        """The layout of a super stream made with binding keys, in their order: streams `NAME-KEY`."""
        if isinstance(binding_keys, str) or not isinstance(binding_keys, Iterable):
            raise InvalidInput(f"binding_keys= takes a list of texts, not {shown(binding_keys)}")
        keys = tuple(binding_keys)
        if not all(isinstance(key, str) for key in keys):
            raise InvalidInput("binding_keys= takes texts, each of them")
        return cls.of(checked_stream_name(super_stream), ((f"{super_stream}-{key}", key) for key in keys))

    @classmethod
    def of(cls, super_stream: str, streams: Iterable[tuple[str, str]]) -> Self:
        """The layout of streams in their order, each with its binding key."""
        return cls(super_stream, tuple(Partition(place, *pair) for place, pair in enumerate(streams)))

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.partitions)

    def __len__(self) -> int:
        return len(self.partitions)

    def route(self, key: str | bytes) -> Partition:
        """The partition a key goes to, as RabbitMQ's Java, Go, .NET and Rust clients have it.

        Args:
            key: Text counts as its UTF-8 bytes.
        """
        return self.partitions[partition_of(key, len(self.partitions))]

    def partition(self, stream: str) -> Partition:
        """The partition that is the stream of that name.

        Raises:
            NotFound: it is none of this super stream's.
        """
        for partition in self.partitions:
            if partition.stream == stream:
                return partition
        raise NotFound(f"{stream!r} is no partition of {self.super_stream!r}.")
