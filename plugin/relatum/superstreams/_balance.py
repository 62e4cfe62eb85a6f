"""Rules that choose the partition of the next message, or of the next named set of messages. Pure."""

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


def _round_robin() -> Balance:
    """One after the other, from a random one on, so that publishers that start together do not begin with the same."""
    turns = itertools.count(secrets.randbelow(1 << 30))
    return lambda _name, candidates: next(turns) % len(candidates)


def _weighted() -> Balance:
    """In proportion to weights, and evenly mixed: 5, 1 and 1 give a a b a c a a, not five times a first.

    Each turn every candidate gains its weight; the one that has most is chosen and gives back what all have gained.
    Streams are known by name, so the proportion holds while partitions come and go.
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
    """By the hash of the name, as clients of RabbitMQ route keys; what has no name goes one after the other."""
    unnamed = _round_robin()
    return lambda name, candidates: unnamed(None, candidates) if name is None else partition_of(name, len(candidates))


def _least_loaded() -> Balance:
    """Where the least is; one after the other among those that have equally little."""
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
    """A rule of the caller's own; a `ConfigurationError` where it gives what is no candidate's index."""

    def choose(name: str | None, candidates: Sequence[Candidate], /) -> int:
        index = rule(name, candidates)
        if not isinstance(index, int) or not 0 <= index < len(candidates):
            raise ConfigurationError(
                f"the function that balances gives the index of one of {len(candidates)} candidates, not {index!r}; "
                "nothing was sent"
            )
        return index

    return choose


def balance_of(rule: "BalanceName | Balance") -> Balance:
    """The rule of that name, begun anew; a rule of the caller's own, whose answers are checked.

    Raises:
        ConfigurationError: there is no rule of that name, or it cannot be called.
    """
    if callable(rule):
        return _checked(rule)
    if not isinstance(rule, str) or rule not in _RULES:
        raise ConfigurationError(f"balance is one of {', '.join(_RULES)}, or a function, not {shown(rule)}")
    return _RULES[rule]()
