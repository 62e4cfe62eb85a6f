"""Which contexts have to move for all to be spread evenly. Pure."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from relatum.errors import InvalidInput


def spread(placed: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """For each partition, the contexts that have to come to it; as few as possible move.

    Partitions get shares in proportion to their weights, within one context of the exact share.

    Contexts of partitions without a weight, or with 0, all leave.
    """
    quotas = _quotas(placed, weights)
    leaving = [name for stream, names in placed.items() for name in names[quotas.get(stream, 0) :]]
    arriving: dict[str, tuple[str, ...]] = {}
    at = 0
    for stream, quota in quotas.items():
        missing = quota - len(placed.get(stream, ()))
        if missing > 0:
            arriving[stream] = tuple(leaving[at : at + missing])
            at += missing
    return arriving


def _quotas(placed: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> dict[str, int]:
    """How many contexts each partition is to have."""
    total = sum(map(Fraction, weights.values()))
    if total <= 0 or any(weight < 0 for weight in weights.values()):
        raise InvalidInput("contexts are spread over partitions with weights from 0, at least one of them above 0")
    count = sum(map(len, placed.values()))
    exact = {stream: count * Fraction(weight) / total for stream, weight in weights.items()}
    quotas = {stream: int(share) for stream, share in exact.items()}

    def first_served(stream: str) -> tuple[Fraction, int]:
        # Of equal remainders, to whom has most already: what stays need not move.
        return exact[stream] - quotas[stream], len(placed.get(stream, ()))

    for stream in sorted(quotas, key=first_served, reverse=True)[: count - sum(quotas.values())]:
        quotas[stream] += 1
    return quotas
