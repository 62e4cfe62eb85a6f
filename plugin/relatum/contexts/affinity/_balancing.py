"""How affinity sets, and the messages of none, are balanced over the partitions by one router. Pure."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from relatum.checks import as_options, checked_weights
from relatum.errors import ConfigurationError
from relatum.superstreams import Balance, BalanceName, Candidate, balance_of


class SetBalance:
    """A rule for sets, which the database counts for all routers. Threads may share it.

    Raises:
        ConfigurationError: there is no such rule, or a weight is no number from 0, or the rule knows no weights.
    """

    def __init__(self, balance: BalanceName | Balance, weights: Mapping[str, float] | None = None) -> None:
        if weights is not None:
            with as_options():
                checked_weights("weights", weights)
        if weights is not None and isinstance(balance, str) and balance != "weighted":
            raise ConfigurationError(f"weights are for the rule 'weighted', or a function, not for {balance!r}")
        self._rule = balance_of(balance)
        self._weights = None if weights is None else dict(weights)

    def __call__(self, name: str | None, candidates: Sequence[Candidate], /) -> int:
        """The index of the chosen partition."""
        return self._rule(name, [self._seen(each) for each in candidates])

    def _seen(self, candidate: Candidate) -> Candidate:
        """The partition as the rule shall see it."""
        return Candidate(candidate.stream, self._weight_of(candidate), candidate.load)

    def _weight_of(self, candidate: Candidate) -> float:
        return candidate.weight if self._weights is None else self._weights.get(candidate.stream, 1.0)


class MessageBalance(SetBalance):
    """The same rule for messages of no set, with turns of its own: their load is what was sent here."""

    def __init__(self, balance: BalanceName | Balance, weights: Mapping[str, float] | None = None) -> None:
        super().__init__(balance, weights)
        self._sent: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, name: str | None, candidates: Sequence[Candidate], /) -> int:
        """The index of the chosen partition, to which the message counts as sent."""
        with self._lock:
            index = super().__call__(name, candidates)
            self._sent[candidates[index].stream] += 1
            return index

    def _seen(self, candidate: Candidate) -> Candidate:
        return Candidate(candidate.stream, self._weight_of(candidate), self._sent[candidate.stream])
