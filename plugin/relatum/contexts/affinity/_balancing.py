"""How messages of no affinity set are balanced over the partitions by one router. Pure."""

import threading
from collections import Counter
from collections.abc import Sequence

from relatum.superstreams import Balance, BalanceName, Candidate, balance_of


class MessageBalance:
    """The rule for sets, for messages of none, with turns of its own: their load is what was sent here.

    Threads may share it.

    Raises:
        ConfigurationError: there is no such rule.
    """

    def __init__(self, balance: BalanceName | Balance) -> None:
        self._rule = balance_of(balance)
        self._sent: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, name: str | None, candidates: Sequence[Candidate], /) -> int:
        """The index of the chosen partition, to which the message counts as sent."""
        with self._lock:
            seen = [Candidate(each.stream, each.weight, self._sent[each.stream]) for each in candidates]
            index = self._rule(name, seen)
            self._sent[candidates[index].stream] += 1
            return index
