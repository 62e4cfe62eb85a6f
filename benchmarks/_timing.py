"""Timing things that are compared: in turns, so that a busy moment of the machine meets both."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of what is timed, for both sides alike."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(action: Callable[[], object]) -> float:
    """Seconds an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def nothing() -> None:
    """Do nothing."""


def in_turns(
    actions: Mapping[str, Callable[[], object]], rounds: int, between: Callable[[], None] = nothing
) -> dict[str, list[float]]:
    """Seconds of each action in each round; each round has an order of its own. `between` runs untimed before each."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    shuffler = random.Random(rounds)
    for _ in range(rounds):
        # Not merely rotated: then one would always come right after the same other.
        shuffler.shuffle(names)
        for name in names:
            between()
            taken[name].append(timed(actions[name]))
    return taken


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of the values, 0 to 1, does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def milliseconds(seconds: float) -> str:
    """A time, as the table shows it."""
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def per_second(rate: float) -> str:
    """A rate of messages, as the table shows it."""
    return f"{rate:,.0f} messages/s"
