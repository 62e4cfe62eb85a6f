"""The partitions of a super stream, the partition of a key, and the rules that choose a partition. No I/O."""

import itertools
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol, Self, TypeAlias

import mmh3

from relatum.common.checks import checked_count, checked_text, shown
from relatum.common.headers import NAME_BYTES_MAX
from relatum.errors import ConfigurationError, InvalidInput, NotFound

SEED: Final = 104_729
"""The hash seed that all stream clients of RabbitMQ use."""


def partition_of(routing_key: str | bytes, partitions: int) -> int:
    """Return the place, counted from 0, of a routing key's partition among a super stream's partitions.

    Args:
        routing_key: The key; text is encoded as UTF-8.
        partitions: The number of partitions, at least 1.

    Raises:
        InvalidInput: The key is neither text nor bytes, or contains a lone surrogate.
    """
    # Encoded here, because a lone surrogate in a text crashes the process in mmh3 5.2.
    if isinstance(routing_key, str):
        try:
            routing_key = routing_key.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"a key cannot contain a lone surrogate: {shown(routing_key)}") from None
    elif not isinstance(routing_key, bytes):
        raise InvalidInput(f"a key must be text or bytes, not {shown(routing_key)}")
    return mmh3.hash(routing_key, SEED, signed=False) % partitions


LAYOUT_MAX: Final = 100_000
"""Maximum partitions of a layout that is given by their number. RabbitMQ itself creates at most 1,000."""


def checked_stream_name(name: Any, what: str = "A super stream's name") -> str:
    """Return a valid name: the broker would remove line breaks, and declare a stream with another name."""
    if not isinstance(name, str):
        raise InvalidInput(f"{what} must be text, not {type(name).__name__}.")
    if not 1 <= (length := len(name.encode(errors="surrogatepass"))) <= NAME_BYTES_MAX:
        raise InvalidInput(f"{what} must have 1 to {NAME_BYTES_MAX} bytes, not {length}: {name[:40]!r}")
    checked_text(what, name)
    if "\n" in name or "\r" in name:
        raise InvalidInput(f"{what} must be on one line, not {name[:40]!r}")
    return name


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """One stream of a super stream.

    Attributes:
        place: The partition's place in the super stream, counted from 0.
        stream: The stream's name.
        binding_key: The routing key of messages that the super stream's exchange routes to this stream.
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
        """Return the layout of a super stream with this number of partitions: `NAME-0`, `NAME-1` and so on."""
        checked_count("partitions", partitions, most=LAYOUT_MAX)
        return cls.keyed(super_stream, [str(place) for place in range(partitions)])

    @classmethod
    def keyed(cls, super_stream: str, binding_keys: Sequence[str]) -> Self:
        """Return the layout of a super stream with these binding keys, in order, and streams `NAME-KEY`."""
        if isinstance(binding_keys, str) or not isinstance(binding_keys, Iterable):
            raise InvalidInput(f"binding_keys= takes a list of texts, not {shown(binding_keys)}")
        keys = tuple(binding_keys)
        if not all(isinstance(key, str) for key in keys):
            raise InvalidInput("binding_keys= takes only texts, such as '0'")
        return cls.of(checked_stream_name(super_stream), ((f"{super_stream}-{key}", key) for key in keys))

    @classmethod
    def of(cls, super_stream: str, streams: Iterable[tuple[str, str]]) -> Self:
        """Return the layout of a super stream from its streams, in order, each given with its binding key."""
        return cls(super_stream, tuple(Partition(place, *pair) for place, pair in enumerate(streams)))

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.partitions)

    def __len__(self) -> int:
        return len(self.partitions)

    def route(self, key: str | bytes) -> Partition:
        """Return the partition of a key, the same that RabbitMQ's Java, Go, .NET and Rust clients choose.

        Args:
            key: The key; text is encoded as UTF-8.
        """
        return self.partitions[partition_of(key, len(self.partitions))]

    def partition(self, stream: str) -> Partition:
        """Return the partition with this stream.

        Raises:
            NotFound: The stream is not a partition of this super stream.
        """
        for partition in self.partitions:
            if partition.stream == stream:
                return partition
        raise NotFound(f"{stream!r} is not a partition of {self.super_stream!r}.")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition from which a rule can choose.

    Attributes:
        stream: The stream's name.
        weight: The weight for the rule "weighted". A partition of weight 0 is never chosen. Default: 1.
        load: The load that "least_loaded" compares, such as the number of sets in the partition. Default: 0.
    """

    stream: str
    weight: float = 1.0
    load: float = 0


class Balance(Protocol):
    """A rule that chooses a partition: any thread-safe function with this signature."""

    def __call__(self, name: str | None, candidates: Sequence[Candidate], /) -> int:
        """Return the index of the chosen candidate.

        Args:
            name: The name of the set to place, or a message's routing key; None if there is none.
            candidates: At least one, in the order of the partitions.
        """


BalanceName: TypeAlias = Literal["round_robin", "least_loaded", "weighted", "hash"]
"""The names of rules: in turn, the least load, in proportion to weights, by the hash of the name."""


def _round_robin() -> Balance:
    """Choose in turn. The start is random, so that publishers that start together choose different partitions."""
    turns = itertools.count(secrets.randbelow(1 << 30))
    return lambda _name, candidates: next(turns) % len(candidates)


def _weighted() -> Balance:
    """Choose in proportion to weights, evenly mixed: weights 5, 1 and 1 give a a b a c a a, not a a a a a b c.

    In each turn, every candidate gains its weight; the one with the highest sum is chosen and loses the total weight.
    The sums are kept by stream name, so the proportion holds while partitions are added and removed.
    """
    gained: dict[str, float] = {}
    lock = threading.Lock()

    def choose(_name: str | None, candidates: Sequence[Candidate], /) -> int:
        total = sum(candidate.weight for candidate in candidates)
        if total <= 0:
            raise InvalidInput("No partition has a weight above 0: give at least one stream such a weight.")
        with lock:
            now = {each.stream: gained.get(each.stream, 0.0) + each.weight for each in candidates}
            chosen = max((each for each in candidates if each.weight > 0), key=lambda each: now[each.stream])
            now[chosen.stream] -= total
            gained.clear()
            gained.update(now)
        return candidates.index(chosen)

    return choose


def _hash() -> Balance:
    """Choose by the hash of the name, as RabbitMQ's clients route keys. Without a name, choose in turn."""
    unnamed = _round_robin()
    return lambda name, candidates: unnamed(None, candidates) if name is None else partition_of(name, len(candidates))


def _least_loaded() -> Balance:
    """Choose the candidate with the least load. If several have it, choose among them in turn."""
    turn = _round_robin()

    def choose(_name: str | None, candidates: Sequence[Candidate], /) -> int:
        least = min(candidate.load for candidate in candidates)
        lightest = [index for index, candidate in enumerate(candidates) if candidate.load == least]
        return lightest[turn(None, [candidates[index] for index in lightest])]

    return choose


_RULES: Final[dict[str, Callable[[], Balance]]] = {
    "round_robin": _round_robin,
    "least_loaded": _least_loaded,
    "weighted": _weighted,
    "hash": _hash,
}


def _checked(rule: Balance, name: str | None, candidates: Sequence[Candidate], /) -> int:
    index = rule(name, candidates)
    if not isinstance(index, int) or not 0 <= index < len(candidates):
        raise ConfigurationError(
            f"the balance function must return the index of one of {len(candidates)} candidates, not {index!r}; "
            "nothing was sent"
        )
    return index


def balance_of(rule: "BalanceName | Balance") -> Balance:
    """Return a new rule of this name, or the given function with a check of its results.

    Raises:
        ConfigurationError: There is no rule of this name, or the rule is not callable.
    """
    if callable(rule):
        return partial(_checked, rule)
    if not isinstance(rule, str) or rule not in _RULES:
        raise ConfigurationError(f"balance= takes one of {', '.join(_RULES)}, or a function, not {shown(rule)}")
    return _RULES[rule]()
