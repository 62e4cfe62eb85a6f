"""Rules that choose the partition of the next message, or of the next named set of messages. No I/O."""

import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from relatum.checks import shown
from relatum.errors import ConfigurationError, InvalidInput
from relatum.superstreams.layout import partition_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition that may be chosen.

    Attributes:
        stream: The stream's name.
        weight: The weight for the rule "weighted", which never chooses a weight of 0. Default: 1.
        load: The load that "least_loaded" compares, such as the number of sets in the partition. Default: 0.
    """

    stream: str
    weight: float = 1.0
    load: float = 0


class Balance(Protocol):
    """A rule that chooses among partitions: any thread-safe function with this signature."""

    def __call__(self, name: str | None, candidates: Sequence[Candidate], /) -> int:
        """Return the index of the chosen candidate.

        Args:
            name: The name of the set to place, or a message's routing key; None if there is none.
            candidates: At least one, in the order of the partitions.
        """


BalanceName: TypeAlias = Literal["round_robin", "least_loaded", "weighted", "hash"]
"""Rules by name: in turn; the least load; in proportion to weights; by the hash of the name."""


def _round_robin() -> Balance:
    """Choose in turn, from a random start, so that publishers that start together do not choose the same partition."""
    turns = itertools.count(secrets.randbelow(1 << 30))
    return lambda _name, candidates: next(turns) % len(candidates)


def _weighted() -> Balance:
    """Choose in proportion to weights, evenly mixed: 5, 1 and 1 give a a b a c a a, not five times a first.

    In each turn, every candidate gains its weight; the one with the most is chosen and loses the sum of all weights.
    The state is kept by stream name, so the proportion holds while partitions are added and removed.
    """
    gained: dict[str, float] = {}
    lock = threading.Lock()

    def choose(_name: str | None, candidates: Sequence[Candidate], /) -> int:
        total = sum(candidate.weight for candidate in candidates)
        if total <= 0:
            raise InvalidInput("No partition has a weight above 0.")
        with lock:
            now = {each.stream: gained.get(each.stream, 0.0) + each.weight for each in candidates}
            chosen = max((each for each in candidates if each.weight > 0), key=lambda each: now[each.stream])
            now[chosen.stream] -= total
            gained.clear()
            gained.update(now)
        return candidates.index(chosen)

    return choose


def _hash() -> Balance:
    """Choose by the hash of the name, as RabbitMQ's clients route keys; in turn if there is no name."""
    unnamed = _round_robin()
    return lambda name, candidates: unnamed(None, candidates) if name is None else partition_of(name, len(candidates))


def _least_loaded() -> Balance:
    """Choose the least load; in turn among candidates with the same load."""
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


def _checked(rule: Balance) -> Balance:
    """Wrap the caller's rule; a result that is not a candidate's index raises `ConfigurationError`."""

    def choose(name: str | None, candidates: Sequence[Candidate], /) -> int:
        index = rule(name, candidates)
        if not isinstance(index, int) or not 0 <= index < len(candidates):
            raise ConfigurationError(
                f"the balance function must return the index of one of {len(candidates)} candidates, not {index!r}; "
                "nothing was sent"
            )
        return index

    return choose


def balance_of(rule: "BalanceName | Balance") -> Balance:
    """Return a new rule of this name, or the given function with its results checked.

    Raises:
        ConfigurationError: There is no rule of this name, or the rule is not callable.
    """
    if callable(rule):
        return _checked(rule)
    if not isinstance(rule, str) or rule not in _RULES:
        raise ConfigurationError(f"balance= takes one of {', '.join(_RULES)}, or a function, not {shown(rule)}")
    return _RULES[rule]()
