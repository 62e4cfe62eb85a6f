"""Which partition the next message, or the next named set of messages, goes to. Pure."""

import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from relatum.checks import shown
from relatum.errors import ConfigurationError, InvalidInput
from relatum.superstreams._routing import partition_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition that may be chosen.

    Attributes:
        stream: The stream's name.
        weight: Its share among the candidates for the rule "weighted", above 0; 0 is never chosen by it. Default: 1.
        load: What "least_loaded" compares, such as the number of sets placed there. Default: 0.
    """

    stream: str
    weight: float = 1.0
    load: float = 0


class Balance(Protocol):
    """A rule that chooses among partitions. Any function of this form is one; threads may share it."""

    def __call__(self, name: str | None, candidates: Sequence[Candidate], /) -> int:
        """The index of the chosen one.

        Args:
            name: The name of the set that is placed, or a message's routing key; None where there is none.
            candidates: At least one, in the order of the partitions.
        """


BalanceName: TypeAlias = Literal["round_robin", "least_loaded", "weighted", "hash"]
"""Rules by name: one after the other; where the least is; in proportion to weights; by the hash of the name."""


class RoundRobin:
    """One after the other.

    Args:
        start: Where to begin. None (default): at random, so that many publishers that have just started do not all
            begin with the same partition.
    """

    def __init__(self, start: int | None = None) -> None:
        self._count = itertools.count(secrets.randbelow(1 << 30) if start is None else start)

    def __call__(self, _name: str | None, candidates: Sequence[Candidate], /) -> int:
        """The index of the next one."""
        return next(self._count) % len(candidates)


class Weighted:
    """In proportion to weights, and evenly mixed: 5, 1 and 1 give a a b a c a a, not five times a first.

    Each turn every candidate gains its weight; the one that has most is chosen and gives back what all have gained.
    Streams are known by name, so the proportion holds while partitions come and go.
    """

    def __init__(self) -> None:
        self._gained: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, _name: str | None, candidates: Sequence[Candidate], /) -> int:
        """The index of the one whose turn it is."""
        total = sum(candidate.weight for candidate in candidates)
        if total <= 0:
            raise InvalidInput("No partition has a weight above 0.")
        with self._lock:
            gained = [self._gained.get(candidate.stream, 0.0) + candidate.weight for candidate in candidates]
            open_to = [index for index, candidate in enumerate(candidates) if candidate.weight > 0]
            chosen = max(open_to, key=gained.__getitem__)
            gained[chosen] -= total
            self._gained = {candidate.stream: value for candidate, value in zip(candidates, gained, strict=True)}
        return chosen


class Hashed:
    """By the hash of the name, as clients of RabbitMQ route keys; what has no name goes one after the other."""

    def __init__(self) -> None:
        self._unnamed = RoundRobin()

    def __call__(self, name: str | None, candidates: Sequence[Candidate], /) -> int:
        """The index of the name's own."""
        return self._unnamed(None, candidates) if name is None else partition_of(name, len(candidates))


class LeastLoaded:
    """Where the least is; one after the other among those that have equally little."""

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def __call__(self, _name: str | None, candidates: Sequence[Candidate], /) -> int:
        """The index of one that has least."""
        least = min(candidate.load for candidate in candidates)
        lightest = [index for index, candidate in enumerate(candidates) if candidate.load == least]
        return lightest[self._turn(None, [candidates[index] for index in lightest])]


_RULES: Final[dict[str, Callable[[], Balance]]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "weighted": Weighted,
    "hash": Hashed,
}


class Own:
    """A rule of the caller's own.

    Raises:
        ConfigurationError: when it is asked, and gives what is no candidate's index.
    """

    def __init__(self, rule: Balance) -> None:
        self._rule = rule

    def __call__(self, name: str | None, candidates: Sequence[Candidate], /) -> int:
        """The index it gives."""
        index = self._rule(name, candidates)
        if not isinstance(index, int) or not 0 <= index < len(candidates):
            raise ConfigurationError(
                f"the function that balances gives the index of one of {len(candidates)} candidates, not {index!r}; "
                "nothing was sent"
            )
        return index


def balance_of(rule: "BalanceName | Balance") -> Balance:
    """The rule of that name, begun anew; a rule of the caller's own, whose answers are checked.

    Raises:
        ConfigurationError: there is no rule of that name, or it cannot be called.
    """
    if callable(rule):
        return Own(rule)
    if not isinstance(rule, str) or rule not in _RULES:
        raise ConfigurationError(f"balance is one of {', '.join(_RULES)}, or a function, not {shown(rule)}")
    return _RULES[rule]()
