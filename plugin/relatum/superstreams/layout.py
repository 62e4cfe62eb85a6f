"""The partitions of a super stream, and the partition of a key."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import mmh3

from relatum.checks import checked_count, checked_text, shown
from relatum.errors import InvalidInput, NotFound
from relatum.headers import NAME_BYTES_MAX

SEED: Final = 104_729
"""The hash seed of all stream clients."""


def partition_of(routing_key: str | bytes, partitions: int) -> int:
    """Return the place, from 0, of a routing key's partition among the ordered partitions of a super stream.

    Args:
        routing_key: The key; text is encoded as UTF-8.
        partitions: The number of partitions, at least 1.

    Raises:
        InvalidInput: The key is neither text nor bytes, or contains half a surrogate pair.
    """
    # Encoded here: half a surrogate pair in a text crashes mmh3 5.2, and with it the process.
    if isinstance(routing_key, str):
        try:
            routing_key = routing_key.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"a key cannot have half a surrogate pair: {shown(routing_key)}") from None
    elif not isinstance(routing_key, bytes):
        raise InvalidInput(f"a key is text or bytes, not {shown(routing_key)}")
    return mmh3.hash(routing_key, SEED, signed=False) % partitions


LAYOUT_MAX: Final = 100_000
"""Maximum partitions of a layout given by their number; RabbitMQ itself creates at most 1,000."""


def checked_stream_name(name: Any, what: str = "A super stream's name") -> str:
    """Return the name of a super stream or stream unchanged.

    Raises:
        InvalidInput: The name is invalid. It must not contain line breaks: RabbitMQ removes them at a declaration, and
            would declare another name than the requested one.
    """
    if not isinstance(name, str):
        raise InvalidInput(f"{what} is text, not {type(name).__name__}.")
    if not 1 <= len(name.encode(errors="surrogatepass")) <= NAME_BYTES_MAX:
        raise InvalidInput(f"{what} must have 1 to {NAME_BYTES_MAX} bytes, unlike {name[:40]!r}.")
    checked_text(what, name)
    if "\n" in name or "\r" in name:
        raise InvalidInput(f"{what} must be on one line, unlike {name[:40]!r}.")
    return name


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """One stream of a super stream.

    Attributes:
        place: Its place in the order of the partitions, from 0.
        stream: The stream's name.
        binding_key: The routing key by which the super stream's exchange routes messages to it.
    """

    place: int
    stream: str
    binding_key: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A super stream and its partitions.

    Attributes:
        super_stream: The name of the super stream and of its exchange.
        partitions: The partitions in order, at least one.
    """

    super_stream: str
    partitions: tuple[Partition, ...]

    def __post_init__(self) -> None:
        if not self.partitions:
            raise InvalidInput(f"Super stream {self.super_stream!r} needs at least one partition.")

    @classmethod
    def numbered(cls, super_stream: str, partitions: int) -> Self:
        """Return the layout of a super stream declared with a number of partitions: `NAME-0`, `NAME-1` and so on."""
        checked_stream_name(super_stream)
        checked_count("partitions", partitions, most=LAYOUT_MAX)
        return cls.keyed(super_stream, [str(place) for place in range(partitions)])

    @classmethod
    def keyed(cls, super_stream: str, binding_keys: Sequence[str]) -> Self:
        """Return the layout of a super stream declared with these binding keys, in order: streams `NAME-KEY`."""
        if isinstance(binding_keys, str) or not isinstance(binding_keys, Iterable):
            raise InvalidInput(f"binding_keys= takes a list of texts, not {shown(binding_keys)}")
        keys = tuple(binding_keys)
        if not all(isinstance(key, str) for key in keys):
            raise InvalidInput("binding_keys= takes only texts")
        return cls.of(checked_stream_name(super_stream), ((f"{super_stream}-{key}", key) for key in keys))

    @classmethod
    def of(cls, super_stream: str, streams: Iterable[tuple[str, str]]) -> Self:
        """Return the layout of streams in order, each with its binding key."""
        return cls(super_stream, tuple(Partition(place, *pair) for place, pair in enumerate(streams)))

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.partitions)

    def __len__(self) -> int:
        return len(self.partitions)

    def route(self, key: str | bytes) -> Partition:
        """Return the partition of a key, the same as with RabbitMQ's Java, Go, .NET and Rust clients.

        Args:
            key: The key; text is encoded as UTF-8.
        """
        return self.partitions[partition_of(key, len(self.partitions))]

    def partition(self, stream: str) -> Partition:
        """Return the partition with this stream.

        Raises:
            NotFound: The stream is no partition of this super stream.
        """
        for partition in self.partitions:
            if partition.stream == stream:
                return partition
        raise NotFound(f"{stream!r} is not a partition of {self.super_stream!r}.")
